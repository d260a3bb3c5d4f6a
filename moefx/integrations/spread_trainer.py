"""`SpreadTrainer`: transformers' `Trainer`, for spread models too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from ..checkpoints.load import load_pretrained
from ..checkpoints.save import save_pretrained
from ..distribution.data_parallelism import parallelize
from ..errors import InvalidCheckpoint, InvalidInput
from ..runtime.ranks.replaced_parameters import reshard
from .sharded_state import load_optimizers, save_optimizers
from .spread_accelerator import SpreadAccelerator, unwrap_optimizers
from .spread_training import check_is_whole, find_spread_model, get_spread_mesh

if not hasattr(Trainer, "_clip_grad_norm"):
    raise ImportError(f"SpreadTrainer needs transformers 5.17 or later, and {transformers.__version__} is installed")
_OPTIMIZER = "sharded_optimizer"  # the folder in a Trainer's checkpoint


class SpreadTrainer(Trainer):
    """A `Trainer` that trains models which `moefx.compile(mesh=...)` has spread over ranks. Others train as always.

    A model on which `moefx.parallelize` was not called is parallelized with its defaults before the optimizer is built.
    Checkpoints hold the model as Hugging Face files, and the optimizer's state in parts, one for each rank. They load
    over other meshes, too. All ranks call `save_model`, and see the same folder.

    For other classes of trainers, such as TRL's: `class SpreadSFTTrainer(SpreadTrainer, SFTTrainer): pass`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._shift_smoothed_labels()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        SpreadAccelerator.adopt(self.accelerator)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Parallelize a spread model, unless the user has done so, and build the optimizer of its parameters."""
        spread = find_spread_model(self.model)
        if spread is not None:
            model: Any = self.model
            check_is_whole(model, spread)
            mesh = get_spread_mesh(spread)
            if not mesh.parallelized:
                if self.optimizer is not None:
                    raise InvalidInput(
                        f"{type(self).__name__} was given an optimizer of {type(spread).__name__} before the model was "
                        "sharded: call moefx.parallelize(model, mesh) first, then build the optimizer"
                    )
                parallelize(spread, mesh.mesh)
                self._shift_smoothed_labels()
            reshard(spread)
        return super().create_optimizer(*args, **kwargs)

    def _shift_smoothed_labels(self) -> None:
        """Let the label smoother shift the labels of a causal model. Trainer decides that by the name of the class,
        which FSDP changes."""
        smoother: Any = self.label_smoother
        if smoother is None or not isinstance(self.model, FSDPModule) or isinstance(smoother, functools.partial):
            return
        names = {cls.__name__ for cls in type(self.model).__mro__}
        if names & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
            self.label_smoother = functools.partial(smoother, shift_labels=True)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if find_spread_model(model) is None:
            return super()._clip_grad_norm(model)
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Tensor | float | None:
        if find_spread_model(model) is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm)
        return self.accelerator.clip_grad_norm_(model.parameters(), float("inf"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as Hugging Face files, and the tokenizer. Collective for a spread model."""
        spread = find_spread_model(self.model)
        if spread is None:
            return super().save_model(output_dir, _internal_call)
        folder: Any = output_dir if output_dir is not None else self.args.output_dir
        reshard(spread)
        save_pretrained(spread, folder)
        if self.args.should_save:
            text_processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if text_processor is not None:
                text_processor.save_pretrained(folder)
            torch.save(self.args, Path(folder) / TRAINING_ARGS_NAME)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        spread = find_spread_model(self.model)
        if spread is None:
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        reshard(spread)
        load_pretrained(spread, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if find_spread_model(self.model) is None:
            return super()._load_best_model()
        assert self.state.best_model_checkpoint is not None
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        spread = find_spread_model(self.model)
        if spread is None:
            return super()._save_optimizer_and_scheduler(output_dir)
        save_optimizers(spread, unwrap_optimizers([self.optimizer]), Path(output_dir) / _OPTIMIZER)
        if self.args.should_save:
            scheduler: Any = self.lr_scheduler
            torch.save(scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        spread = find_spread_model(self.model)
        if spread is None or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        folder = Path(checkpoint)
        if (folder / _OPTIMIZER).is_dir():
            load_optimizers(spread, unwrap_optimizers([self.optimizer]), folder / _OPTIMIZER)
            scheduler: Any = self.lr_scheduler
            scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        elif (folder / OPTIMIZER_NAME).exists():
            raise InvalidCheckpoint(
                f"{folder / OPTIMIZER_NAME} is the optimizer's state of a model in one process, and "
                f"{type(spread).__name__} is spread over ranks. Call moefx.load_pretrained(model, folder) and train() "
                "without resume_from_checkpoint: the optimizer starts anew"
            )
