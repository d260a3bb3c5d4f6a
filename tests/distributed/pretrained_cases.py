"""`load_pretrained` and `save_pretrained` over ranks, and asynchronous checkpoints that reshard."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import moefx
from moefx.errors import InvalidCheckpoint, MoefxError

from ..blocks import D
from .models import VOCAB, Model, build_causal_model
from .parallelize_cases import check_raises, make_mesh
from .pipeline_training_cases import Decoder, draw_batch, find_data_rank
from .pipeline_training_cases import build as build_pipeline
from .state_cases import BY_PARAMETER, check_equal, create_shared_folder, load_checkpoint

PLAN = moefx.Plan(validation="symbolic")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def spread(model: nn.Module, sizes: dict[str, int], **options: Any) -> Any:
    """Over an expert axis, and with FSDP if there is a data axis."""
    compiled = moefx.compile(model, mesh=make_mesh(**sizes), plan=PLAN, **options)
    return moefx.parallelize(compiled, make_mesh(**sizes)) if "dp" in sizes else compiled


def from_rank_0(write: Callable[[str], None]) -> str:
    """Write a folder on rank 0, for all ranks."""
    folder = create_shared_folder()
    if dist.get_rank() == 0:
        write(folder)
    dist.barrier()
    return folder


def count_peak(call: Callable[[], Any], folder: str) -> int:
    """Return the most bytes that the call has allocated at a time, without the files of a folder, which are mapped."""
    mapped = {path.stat().st_size for path in Path(folder).glob("*.safetensors")}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    total = peak = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes() if abs(event.nbytes()) not in mapped else 0
        peak = max(peak, total)
    return peak


def count_own_bytes(model: nn.Module) -> int:
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in (*model.parameters(), *model.buffers())]
    return sum(t.numel() * t.element_size() for t in tensors)


def case_plain_models() -> None:
    """Load and save separate experts and stacks. FSDP shards a stack of one dimension after the expert axis."""
    example, folders = (torch.zeros(9, D),), {}
    for kind, sizes in (("gated", dict(ep=4)), ("numbered", dict(dp=2, ep=2))):
        original = Model(kind)
        folders[kind] = from_rank_0(lambda path, model=original: moefx.save_pretrained(model, path))
        if kind == "gated":
            model = on_meta(lambda: Model("gated"))
        else:  # loaded in place
            model = copy.deepcopy(original)
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
        model = moefx.load_pretrained(spread(model, sizes, example_inputs=example), folders[kind])
        check_equal(moefx.full_state_dict(model), original.state_dict())
        again = create_shared_folder()
        moefx.save_pretrained(model, again, max_shard_size=600)
        assert len(list(Path(again).glob("model-*.safetensors"))) > 4  # each rank writes one
        check_equal(moefx.load_pretrained(Model(kind), again).state_dict(), original.state_dict())
    model = spread(on_meta(lambda: Model("gated", layers=1, num_experts=8)), dict(ep=4), example_inputs=example)
    check_raises(InvalidCheckpoint, "12 keys are missing: blocks.0", moefx.load_pretrained, model, folders["gated"])


def case_memory() -> None:
    """A rank allocates its own part to load, and one tensor to save."""
    if torch.__version__ < (2, 13):
        return  # its profiler loses events in some runs

    def make() -> nn.Module:
        model = Model("joined", layers=3)
        for block in model.blocks:
            block.gate_up, block.down = nn.Parameter(torch.randn(4, D, 8192)), nn.Parameter(torch.randn(4, D, 4096))
        return model

    original, example = make(), (torch.zeros(9, D),)
    folder = from_rank_0(lambda path: moefx.save_pretrained(original, path))
    for sizes in (dict(ep=4), dict(dp=2, ep=2)):
        model = spread(on_meta(make), sizes, example_inputs=example)
        peak = count_peak(lambda model=model: moefx.load_pretrained(model, folder), folder)
        own = count_own_bytes(model)
        assert own <= peak < 1.02 * own, (peak, own)
        largest, again = original.blocks[0].gate_up.nbytes, create_shared_folder()
        peak = count_peak(
            lambda model=model, again=again: moefx.save_pretrained(model, again, max_shard_size=900000), folder
        )
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, peak)
        assert largest <= max(peaks) < 2.1 * largest, (peaks, largest)
        check_equal(moefx.full_state_dict(model), original.state_dict())


def case_errors_of_one_rank_are_raised_by_all() -> None:
    """Raise on each rank, and keep the earlier checkpoint."""
    model = spread(Model("joined", layers=1), dict(ep=4), example_inputs=(torch.zeros(9, D),))
    folder, rank, wanted = create_shared_folder(), dist.get_rank(), moefx.full_state_dict(model)
    moefx.save_pretrained(model, folder, max_shard_size=600)
    names = sorted(path.name for path in Path(folder).iterdir())
    full = OSError(errno.ENOSPC, "No space left on device")

    def check_save(failing: int, error: type[Exception], text: str, **options: Any) -> None:
        """Save, with an error on one rank."""
        kind, prefix = (error, "") if rank == failing else (MoefxError, f"rank {failing} failed: {error.__name__}: ")
        check_raises(kind, prefix + text, moefx.save_pretrained, model, folder, **({"max_shard_size": 600} | options))
        dist.barrier()
        assert sorted(path.name for path in Path(folder).iterdir()) == names

    for failing, target in (
        (2, "checkpoints.safetensors_files.ShardFile.append"),  # in each of its files
        (3, "checkpoints.safetensors_files.ShardFile.__init__"),
        (0, "checkpoints.save.write_index"),
        (0, "util.save_folder.os.rename"),
    ):
        with mock.patch(f"moefx.{target}", side_effect=full) if rank == failing else nullcontext():
            check_save(failing, OSError, str(full))
    check_save(1, InvalidCheckpoint, "max_shard_size='5'", max_shard_size="5" if rank == 1 else 600)
    check_raises(
        MoefxError,
        "ranks [3] would write other files",
        moefx.save_pretrained,
        model,
        folder,
        max_shard_size=[600, 9999][rank // 3],
    )
    check_equal(moefx.load_pretrained(Model("joined", layers=1), folder).state_dict(), wanted)
    if rank == 1:
        model.first.bias = nn.Parameter(model.first.bias.to("meta"))
    check_save(1, InvalidCheckpoint, "first.bias is on the meta device")


def case_asynchronous_checkpoints_reshard() -> None:
    """From stages to FSDP over a mesh with "tp", with the state of AdamW, while training goes on."""
    kinds, folder, mesh = ("gated", "joined"), create_shared_folder(), make_mesh(tp=2, ep=2)
    saved = build_pipeline(Decoder(*kinds).double(), make_mesh(pp=2, ep=2), schedule="1f1b")
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.05)
    number, ranks = find_data_rank(make_mesh(pp=2, ep=2))
    ids, target = (each[number] for each in draw_batch(7, ranks, 8))

    def step() -> None:
        saved.step(ids, target=target)
        optimizer.step()
        optimizer.zero_grad()

    step()
    model_state, optimizer_state = get_state_dict(saved, optimizer, options=BY_PARAMETER)
    wanted = moefx.full_state_dict(saved)
    group = dist.new_group(backend="gloo")  # of the saving thread
    state = {"model": model_state, "optimizer": optimizer_state}
    future = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    step()  # writes parameters and moments in place
    future.result()
    assert not all(torch.equal(value, wanted[name]) for name, value in moefx.full_state_dict(saved).items())
    plain = Decoder(*kinds).double()
    of_plain = torch.optim.AdamW(plain.parameters(), lr=0.05)
    load_checkpoint(plain, of_plain, folder)
    check_equal(plain.state_dict(), wanted)
    moments = {name: of_plain.state[parameter]["exp_avg_sq"] for name, parameter in plain.named_parameters()}
    assert all(moment.abs().sum() > 0 for name, moment in moments.items() if "router" in name or "gate." in name)
    other = moefx.compile(Decoder(*kinds).double(), mesh=mesh, plan=PLAN, example_inputs=(ids,))
    other = moefx.parallelize(other, mesh)
    of_other = torch.optim.AdamW(other.parameters(), lr=0.05)
    load_checkpoint(other, of_other, folder)
    check_equal(moefx.full_state_dict(other), wanted)
    for name, parameter in other.named_parameters():
        assert torch.equal(of_other.state[parameter]["exp_avg_sq"].full_tensor(), moments[name]), name


def transformers_models() -> None:
    """Loaded on the meta device from the matrices of single experts, and saved so that `from_pretrained` loads them."""
    from transformers import AutoModelForCausalLM

    from .pipeline_transformers_cases import loss_fn

    original = build_causal_model()
    for parameter in original.parameters():
        dist.broadcast(parameter.data, 0)
    folder = from_rank_0(lambda path: original.save_pretrained(path, max_shard_size="10KB"))
    ids = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
    for sizes in (dict(ep=4), dict(dp=2, ep=2), dict(pp=2, ep=2)):
        meta = on_meta(build_causal_model)
        if "pp" in sizes:
            model = moefx.pipeline(meta, make_mesh(**sizes), plan=PLAN, loss_fn=loss_fn, microbatches=2)
        else:
            model = spread(meta, sizes)
        moefx.load_pretrained(model, folder)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        check_equal(moefx.full_state_dict(model), original.state_dict())
        with torch.no_grad():
            output, wanted = model(ids), original(ids).logits
        output = getattr(output, "logits", output)
        if output is not None:  # on ranks of the last stage
            torch.testing.assert_close(output, wanted, rtol=0, atol=1e-9)
        if "pp" not in sizes:
            check_raises(MoefxError, "call moefx.save_pretrained", model.save_pretrained, "folder")
            check_raises(MoefxError, "call moefx.save_pretrained", model.model.save_pretrained, "folder")
        again = create_shared_folder()
        moefx.save_pretrained(model, again, max_shard_size="10KB")
        assert {path.name for path in Path(again).iterdir()} >= {"config.json", "generation_config.json"}
        found = AutoModelForCausalLM.from_pretrained(again)
        assert found.dtype == torch.float64
        check_equal(found.state_dict(), original.state_dict())
