"""TRL's `SFTTrainer` trains spread models with the methods of `moefx.integrations.SpreadTrainer`."""

from __future__ import annotations

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import moefx

from .integration_cases import (
    BATCH,
    LENGTH,
    MAX_NORM,
    PARTS,
    STEPS,
    InOrder,
    Rows,
    spread_model,
    train_in_one_process,
)
from .pipeline_transformers_cases import VOCAB
from .state_cases import create_shared_folder

RATE = 0.5


class SpreadSFTTrainer(InOrder, moefx.integrations.SpreadTrainer, SFTTrainer):
    pass


def case_supervised_fine_tuning() -> None:
    """Train as one process does, over two meshes. The trainer resumes over another mesh."""
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(VOCAB)}, unk_token="0"))
    processor = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1", pad_token="2")
    rows = [{name: value.tolist() for name, value in Rows()[index].items()} for index in range(len(Rows()))]
    folder, (_, _, wanted) = create_shared_folder(), train_in_one_process(torch.optim.SGD, lr=RATE)
    for sizes, options, resumed in ((dict(dp=2, ep=2), {}, None), (dict(ep=4), None, f"{folder}/checkpoint-2")):
        arguments = SFTConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=PARTS,
            learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=MAX_NORM, optim="sgd", max_length=LENGTH,
            router_aux_loss_coef=0.0, save_steps=2, dataset_kwargs={"skip_prepare_dataset": True}, bf16=False,
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = spread_model(sizes, options)
        trainer = SpreadSFTTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=processor
        )
        trainer.train(resume_from_checkpoint=resumed)
        # SFTTrainer computes the loss in float32.
        torch.testing.assert_close(moefx.full_state_dict(trainer.model), wanted, rtol=0, atol=1e-6)
