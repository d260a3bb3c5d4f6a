"""`SpreadAccelerator`: accelerate's `Accelerator`, for spread models too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn

from ..distribution.spread_models import clip_grad_norm_, full_state_dict
from ..errors import InvalidInput
from ..runtime.ranks.data_parallel_wrappers import allow_accelerate
from ..runtime.ranks.replaced_parameters import reshard
from .sharded_state import load_model, load_optimizers, save_model, save_optimizers
from .spread_training import check_optimizers, check_trainable, find_spread_model

_MODEL, _OPTIMIZER = "sharded_model", "sharded_optimizer"  # folders that `save_state` writes


class SpreadAccelerator(Accelerator):
    """An `Accelerator` that trains models on which `moefx.parallelize` was called. Other models are prepared as always.

    A spread model is not wrapped: it reduces its gradients itself. `accumulate` and `no_sync` leave out communication.
    `clip_grad_norm_` takes the norm over all ranks. `save_state` writes each rank's parts, and `load_state` loads them
    over this mesh or another one. `get_state_dict` returns all experts, on the main process. Hooks that the user
    registers for `save_state` and `load_state` get no models, because `Accelerator` would save one rank's part.

        model = moefx.parallelize(moefx.compile(model, mesh=mesh), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator = moefx.integrations.SpreadAccelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    @classmethod
    def adopt(cls, accelerator: Accelerator) -> None:
        """Make an existing accelerator a `SpreadAccelerator`, in place."""
        kind = type(accelerator)
        if not issubclass(kind, cls):
            accelerator.__class__ = cls if kind is Accelerator else type(kind.__name__, (cls, kind), {})

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers.

        Raises:
            InvalidInput: a spread model cannot be trained so; the message says why and what to do.
        """
        models = [obj for obj in args if find_spread_model(obj) is not None]
        if models and self.distributed_type not in (
            DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.DEEPSPEED
        ):  # fmt: skip
            raise InvalidInput(
                f"accelerate is set up for {self.distributed_type.value}, but moefx has sharded "
                f"{type(models[0]).__name__} already: leave the parallelism to moefx, in the arguments of "
                "TrainingArguments or Accelerator and in the file of `accelerate config`"
            )
        result = super().prepare(*args, device_placement=device_placement)
        check_optimizers([_unwrap(obj) for obj in args if isinstance(obj, torch.optim.Optimizer)], self._models)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model, see `prepare`. A spread model gets autocast and `torch.compile`, and no wrapper."""
        if find_spread_model(model) is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        reshard(model)
        if not evaluation_mode:
            check_trainable(model, self.num_processes, self.mixed_precision)
        if not self.even_batches and self.num_processes > 1:
            raise InvalidInput(
                "even_batches=False: a rank with fewer batches would not take part in the last exchanges of experts, "
                "and the others would wait for it. Leave even_batches at True"
            )
        with allow_accelerate(model):
            return super().prepare_model(model, device_placement, evaluation_mode=True)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Leave out the reduction of gradients inside the context."""
        if find_spread_model(model) is None:
            with super().no_sync(model):
                yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clip the gradients of a model by their norm over all ranks.

        Raises:
            InvalidInput: `parameters` are some parameters of a spread model, whose norm no rank knows.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        for model in self._models:
            spread = find_spread_model(model)
            own = {id(p) for p in model.parameters() if p.requires_grad} if spread is not None else set()
            if spread is not None and given == own:
                self.unscale_gradients()
                return clip_grad_norm_(spread, max_norm, norm_type)
            if given & own:
                raise InvalidInput(
                    f"clip_grad_norm_ was given {len(given)} parameters, and {type(spread).__name__} has {len(own)}. "
                    "Pass model.parameters() of one spread model"
                )
        return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[arg-type]

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Return the original's state dict: that of a spread model on the main process, {} on others. Collective."""
        spread = find_spread_model(model)
        return super().get_state_dict(model, unwrap) if spread is None else full_state_dict(spread, cpu=True, rank=0)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Save models, optimizers, schedulers and the states of random numbers. Collective."""
        with self._hide_spread_model(self.register_save_state_pre_hook) as (spread, optimizers, folders):
            location = super().save_state(output_dir, *args, **kwargs)
        for model in spread:
            save_model(model, Path(folders[0]) / _MODEL)
            save_optimizers(model, optimizers, Path(folders[0]) / _OPTIMIZER)
        return location

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` saved, over this mesh or another one. Collective."""
        with self._hide_spread_model(self.register_load_state_pre_hook) as (spread, optimizers, folders):
            super().load_state(input_dir, *args, **kwargs)
        for model in spread:
            load_model(model, Path(folders[0]) / _MODEL)
            load_optimizers(model, optimizers, Path(folders[0]) / _OPTIMIZER)

    @contextlib.contextmanager
    def _hide_spread_model(self, register_hook: Any) -> Iterator[tuple[list[nn.Module], list[Any], list[Any]]]:
        """Hide a spread model and its optimizers from `Accelerator`, which would save one rank's part.

        Yields:
            The spread model if there is one, its optimizers, and a list that receives the folder.
        """
        spread = list(filter(None, map(find_spread_model, self._models)))
        if not spread:
            yield [], [], []
            return
        if len({id(model) for model in self._models}) > 1:  # a model may be prepared again, for evaluation
            raise InvalidInput(
                f"save_state and load_state take one model if it is spread over ranks, and {len(self._models)} are "
                "prepared: save the others yourself, or use an accelerator of their own"
            )
        models, optimizers, folders = self._models, self._optimizers, []
        handle = register_hook(lambda *arguments: folders.append(arguments[-1]))
        self._models, self._optimizers = [], []
        try:
            yield spread, [_unwrap(optimizer) for optimizer in optimizers], folders
        finally:
            self._models, self._optimizers = models, optimizers
            handle.remove()


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def unwrap_optimizers(optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers inside of accelerate's wrappers."""
    return [_unwrap(optimizer) for optimizer in optimizers]
