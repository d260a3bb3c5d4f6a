"""`Pipeline`: the stages of one rank as a module with the original's names, and its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..errors import InvalidInput, MoefxError
from ..runtime.ranks.data_parallel_wrappers import ACCELERATED_PIPELINE_REFUSAL, DDP_REFUSAL
from ..runtime.ranks.staged_models import STAGED
from ..runtime.ranks.state_dicts import RefuseOwnGroups, ShardOnLoad
from ..util.turn_taking import WaitCounts, take_turns
from .micro_batches import check_batch, describe_inputs, find_differences, split_inputs, split_tree
from .pipeline_schedules import Stage, StageOrder, run_forwards
from .stage_dry_run import replace_submodule
from .stage_modules import Call
from .stage_sharding import drop_unreduced_gradients
from .stage_split import StageSplit, check_boundary
from .stage_state import StageGroup

_MAX_BOUNDARIES = 64  # batches of ever new lengths must not fill the memory


class Pipeline(nn.Module):
    """The stages of this rank, made by `moefx.pipeline`. Its parameters and state dict have the original's names.

    `parameters()`, `state_dict()`, `load_state_dict()` (which takes the original's state dict), `train()`, `eval()`,
    `to_empty()` and torch.distributed.checkpoint work as for any module, and so do `moefx.clip_grad_norm_` and
    `moefx.full_state_dict` over all stages.

    Attributes:
        stages: the models of this rank's stages, by number.
        cut_basis: the reason for the number of layers of each stage, for readers.
        planned_batch: (sequences, tokens of a sequence) that `step` takes on a rank; None: any.
        overlaps_exchanges: whether one micro-batch computes while another one waits for an exchange. True for
            "dualpipev". False runs them one after the other; set it on all ranks.
        wait_counts: (covered, total) waits for exchanges on this rank in the last step that overlapped them.
    """

    def __init__(self, model: nn.Module, stages: list[Stage], split: StageSplit, order: StageOrder, group: StageGroup):
        super().__init__()
        vars(self)[STAGED] = group
        DDP_REFUSAL.install(self)
        ACCELERATED_PIPELINE_REFUSAL.install(self)
        self._own_stages, self._split, self._order, self._group = stages, split, order, group
        self._sharded = [m for stage in stages for m in stage.model.modules() if isinstance(m, FSDPModule)]
        self._device = torch.device(group.mesh.device_type)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        for stage in stages:
            stage.port.device = self._device
        self.cut_basis, self.planned_batch = split.basis, cast("tuple[int, int] | None", None)
        self.overlaps_exchanges, self.wait_counts = order.kind.is_dual, WaitCounts()
        self._scheduled_inputs: Any = None  # a description of the inputs that `_schedule` is built for
        self._schedule: Any = None
        self._boundaries: dict[Any, Tensor] = {}
        names: list[str] = []
        for name, module in _list_own_modules(model, stages, split):
            names.append(name)
            _add_module(self, name, module)
        prefixes = tuple(f"{name}." for name in names)
        self._names_elsewhere = [name for name in group.names if not name.startswith(prefixes)]
        self.register_load_state_dict_pre_hook(ShardOnLoad())
        self.register_load_state_dict_pre_hook(self._drop_other_stages)
        if len(group.ranks) > 1:
            RefuseOwnGroups(_list_parameters).install(self)
        self.training = model.training

    @property
    def stages(self) -> dict[int, nn.Module]:
        return {stage.number: stage.model for stage in self._own_stages}

    def step(self, *inputs: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run a training step on all micro-batches, and add the gradients of the mean loss to `.grad`. Collective.

        Args:
            *inputs: the model's inputs. All ranks of a pipeline pass the same ones. Tensors are cut along their first
                dimension, except those in which it is 1.
            **kwargs: further inputs, by name.
            target: the target, cut along its first dimension. The ranks of the last stage need it.

        Returns:
            The mean loss over micro-batches and data ranks, without a gradient, on every rank.

        Raises:
            InvalidInput: the inputs or the target do not fit. Or `loss_fn` raised on another rank; a rank whose own
                `loss_fn` raised raises that error. The gradients of this step are then worthless: zero them.
        """
        if not torch.is_grad_enabled():
            raise InvalidInput("step() trains, and gradients are disabled here: call pipe.evaluate(...) for the loss")
        with self._load_micro_batches(inputs, kwargs, target, needs_target=True, trains=True):
            losses = {"target": torch.arange(self._order.microbatches)} if self._last_stage is not None else {}
            with self._overlap_exchanges():
                self._schedule.step(**losses)
            return self._average_loss()

    @contextlib.contextmanager
    def _overlap_exchanges(self) -> Iterator[None]:
        """Let micro-batches take turns if `overlaps_exchanges`, and count their waits."""
        if not (self._order.kind.is_dual and self.overlaps_exchanges):
            yield
            return
        with take_turns() as turns:
            yield
        self.wait_counts = turns.counts

    @torch.no_grad()
    def evaluate(self, *inputs: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Return the loss of `step` without gradients. Collective."""
        with self._load_micro_batches(inputs, kwargs, target, needs_target=True):
            run_forwards(self._own_stages, self._order, self._group.group, self._device)
            return self._average_loss()

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor | None:
        """Return the model's output without gradients on the ranks of the last stage, None on others. Collective."""
        with self._load_micro_batches(inputs, kwargs, None, needs_target=False):
            outputs = run_forwards(self._own_stages, self._order, self._group.group, self._device)
            return torch.cat(outputs) if outputs else None

    @property
    def _last_stage(self) -> Stage | None:
        return next((stage for stage in self._own_stages if stage.port.is_last), None)

    @contextlib.contextmanager
    def _load_micro_batches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, needs_target: bool, trains: bool = False
    ) -> Iterator[None]:
        """Give the stages their micro-batches, and take them away afterwards.

        Raises:
            InvalidInput: on one rank of the mesh the inputs or the target cannot be cut or are missing, or the inputs
                or modes differ between ranks of a pipeline. Raised on every rank of the mesh, before the step begins.
                Another error of one rank is raised there, and as `InvalidInput` on the others.
        """
        calls, targets, error, seen = [], None, None, None
        try:
            calls, batch = split_inputs(args, kwargs, self._order.microbatches)
            if trains and self.planned_batch is not None:
                check_batch(args, kwargs, self.planned_batch)
            if needs_target and self._last_stage is not None:
                if target is None:
                    call = "step" if trains else "evaluate"
                    raise InvalidInput(
                        f"{call}(..., target=) is missing on a rank of the last stage: pass it on every rank"
                    )
                targets = split_tree(target, batch, self._order.microbatches, "the target")
            seen = {
                **describe_inputs(*calls[0]),
                "pipe.training": self.training,
                "pipe.overlaps_exchanges": self.overlaps_exchanges,
                "autocast": _describe_autocast(self._device.type),
            }
            if seen != self._scheduled_inputs:
                boundary = self._find_boundary(calls[0])
                for stage in self._own_stages:
                    stage.port.boundary = boundary.to(stage.sharding.find_hidden_dtype(boundary))
        except Exception as found:  # whatever it is, the other ranks wait for this one
            error = found
        if self._group.is_true_on_any(error is not None or seen != self._scheduled_inputs):
            self._rebuild_schedule(error, seen)
        for stage in self._own_stages:
            stage.port.inputs, stage.port.losses, stage.port.loss_error = calls, [], None
            stage.port.targets = targets if stage.port.is_last else None
        try:
            yield
        except BaseException:
            self._scheduled_inputs = self._schedule = None  # torch's schedule keeps the losses of a step that failed
            for module in self._sharded:
                drop_unreduced_gradients(module)
            raise
        finally:
            for stage in self._own_stages:
                stage.port.inputs, stage.port.targets = [], None
            for module in self._sharded:  # they stay gathered after a forward, and would hide new values
                module.reshard()

    def _rebuild_schedule(self, error: Exception | None, seen: Any) -> None:
        """Build torch's schedule for new inputs or modes, if all ranks of the pipeline have the same ones. Collective
        over the mesh."""
        self._scheduled_inputs = None
        if differences := find_differences(self._group.raise_together(error, seen)):
            error = InvalidInput(
                f"ranks of a pipeline differ in {differences}. Pass the same inputs on all of them, in the same modes"
            )
        self._group.raise_together(error)
        self._schedule = self._order.build(self._own_stages, self._group.group, self._device)
        self._scheduled_inputs = seen

    def _find_boundary(self, call: Call) -> Tensor:
        """Check the cut for the inputs of a micro-batch, once for each mode and kind of inputs. Returns the hidden
        states between stages, a meta tensor."""
        seen = (*describe_inputs(*call).items(), self.training)
        if seen not in self._boundaries:
            if len(self._boundaries) == _MAX_BOUNDARIES:
                self._boundaries.clear()
            self._boundaries[seen] = check_boundary(self._split, *call)
        return self._boundaries[seen]

    def _average_loss(self) -> Tensor:
        """Return the mean loss over micro-batches and data ranks. Collective over the mesh.

        Raises:
            InvalidInput: `loss_fn` raised on another rank. Its own error, if it raised on this one.
        """
        error = None if self._last_stage is None else self._last_stage.port.loss_error
        if self._group.is_true_on_any(error is not None):
            self._group.raise_together(error)
        losses = [] if self._last_stage is None else self._last_stage.port.losses
        return self._group.average_loss(torch.stack(losses).mean() if losses else None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise MoefxError(
            "a Pipeline can be neither pickled nor copied: its stages run in process groups of these processes. Save "
            "moefx.full_state_dict(pipe), or its state dict with torch.distributed.checkpoint, and load that into a "
            "new moefx.pipeline(model, mesh, ...)"
        )

    def train(self, mode: bool = True) -> Pipeline:
        for stage in self._own_stages:
            stage.model.train(mode)
        self._split.dry_run.skeleton.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipeline:
        for stage in self._own_stages:
            stage.model._apply(fn, recurse)
        return self

    def _drop_other_stages(self, _: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
        for name in self._names_elsewhere:
            state_dict.pop(prefix + name, None)

    def extra_repr(self) -> str:
        layers = " + ".join(map(str, self._split.counts))
        overlap = ""
        if self._order.kind.is_dual and self.overlaps_exchanges:
            overlap = ", {} of {} waits for exchanges covered in the last step".format(*self.wait_counts)
        return (
            f"schedule={self._order.name!r}, microbatches={self._order.microbatches}, {self._split.layers}: {layers} "
            f"({self.cut_basis}), stages here: {', '.join(map(str, self.stages))}{overlap}"
        )


def _describe_autocast(device_type: str) -> str:
    """Return the dtype of autocast on devices of a type, or "off"."""
    return str(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else "off"


def _list_own_modules(model: nn.Module, stages: list[Stage], split: StageSplit) -> list[tuple[str, nn.Module]]:
    """Return the layers and other modules of a rank's stages, in the order of the model, a module with several names
    under each of them. The stages get one module each for the modules that they share, so that values which are loaded
    reach all stages."""
    for stage in stages[1:]:
        for name in split.shared:
            replace_submodule(stage.model, name, stages[0].model.get_submodule(name))
    units = [(stages[0], name) for name in split.shared]
    units += [(stage, name) for stage in stages for name in split.list_units(stage.number)]
    own_modules = {model.get_submodule(name): stage.model.get_submodule(name) for stage, name in units}

    def visit(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        for key, child in module._modules.items():
            if child in own_modules:
                yield f"{path}{key}", own_modules[child]
            elif child is not None:
                yield from visit(child, f"{path}{key}.")

    return list(visit(model, ""))


def _list_parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _add_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under a dotted name, with empty modules around it."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            _register(root, step, nn.Module())
        root = root.get_submodule(step)
    _register(root, last, module)


def _register(parent: nn.Module, name: str, module: nn.Module) -> None:
    try:
        parent.add_module(name, module)
    except KeyError:
        raise InvalidInput(f"the model has a module named {name!r}, which is a name of Pipeline: rename it") from None
