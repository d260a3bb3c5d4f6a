"""Check, without running a layer, that a model may be cut between its layers, and find the shapes at the cuts.

The dry run calls the user's forward on a skeleton: layers record their calls and return new zeros, modules with
parameters outside of the layers return zeros. It runs on the CPU, and finds everything that a stage would compute
from values that it does not have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import InvalidInput, MoefxError
from ..util.model_copy import copy_model
from ..util.user_code import forward_line, user_line
from .stage_modules import AbsentModule, SkippedLayer, find_hidden, select_output

FIRST, LAST = "first", "last"


@dataclasses.dataclass
class DryRunState:
    """The calls of a dry run so far.

    Attributes:
        num_layers: layers of the model.
        line: where the forward of the model begins.
        calls: number of calls of layers.
        hidden: input of the first layer.
        previous: output of the last layer that was called, and its version.
        owners: for each called module outside of the layers, `FIRST` if it was called before the first layer, else
            `LAST`.
    """

    num_layers: int
    line: str
    calls: int = 0
    hidden: Tensor | None = None
    previous: tuple[Any, int] | None = None
    owners: dict[str, str] = dataclasses.field(default_factory=dict)

    def record_layer(self, index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Check the call of a layer, and return its result."""
        hidden, others = find_hidden(args, kwargs)
        if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            received = hidden.dtype if isinstance(hidden, Tensor) else type(hidden).__name__
            raise self.refuse(f"{name} receives {received} first, not hidden states", "pass them as the first argument")
        if index != self.calls:
            raise self.refuse(f"{name} runs as number {self.calls}", "run each layer once, in the order of their list")
        if self.previous is not None:
            before, version = self.previous
            if hidden is not before or hidden._version != version:
                raise self.refuse(
                    f"the model computes between the layer before and {name}, so {name} does not receive the "
                    "layer's output as it is",
                    "move the computation into the layers, which return one tensor",
                )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(others)):
            raise self.refuse(
                f"{name} receives a second tensor that depends on parameters outside of the layers, whose gradient "
                "would be lost between stages",
                "compute it in each layer",
            )
        if index == 0:
            self.hidden = hidden.detach()
        result = torch.zeros(hidden.shape, dtype=hidden.dtype)
        self.previous, self.calls = (result, result._version), self.calls + 1
        return result

    def record_module(self, name: str, tensors: list[Tensor]) -> None:
        """Check the call of a module outside of the layers."""
        if 0 < self.calls < self.num_layers:
            raise self.refuse(f"{name} runs between the layers", "move it into them")
        owner = FIRST if self.calls == 0 else LAST
        if self.owners.setdefault(name, owner) != owner:
            raise self.refuse(f"{name} runs before the first and after the last layer", "use two modules")
        if owner == LAST and any(tensor.requires_grad for tensor in tensors):
            raise self.refuse(
                f"{name} runs after the layers on a tensor from before them, which the last stage does not have",
                "let it depend on the hidden states only",
            )

    def refuse(self, reason: str, remedy: str) -> InvalidInput:
        return InvalidInput(f"the model cannot be cut into stages: {reason} ({self.line}). To pipeline it, {remedy}")


class RecordedLayer(SkippedLayer):
    _moefx_read_error = MoefxError  # `hasattr` must not hide it

    def __init__(self, layer: nn.Module, index: int, name: str, state: DryRunState):
        super().__init__(layer, name)
        self._moefx_call = (state, index, name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        state, index, name = self._moefx_call
        return state.record_layer(index, name, args, kwargs)


class RecordedModule(AbsentModule):
    _moefx_read_error = MoefxError

    def __init__(self, module: nn.Module, name: str, state: DryRunState):
        super().__init__(module, name, port=None)
        self._moefx_call = (state, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state, name = self._moefx_call
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        state.record_module(name, tensors)
        return super().forward(*args, **kwargs)

    def _moefx_make_result(self, shaped: Tensor, device: torch.device) -> Tensor:
        zero = torch.zeros((), dtype=shaped.dtype, device=device)
        if self._moefx_call[0].calls:  # the head, whose results are large
            return zero.expand(shaped.shape)
        # It requires a gradient, so whatever depends on it does. A copy, because models may write to it in place.
        return zero.requires_grad_(shaped.is_floating_point()).expand(shaped.shape).clone()


class DryRun:
    """A model's skeleton, and its runs.

    Args:
        layers: name of the container of the layers.
        outer: names of the modules with parameters outside of the layers.
    """

    def __init__(self, model: nn.Module, layers: str, outer: list[str]):
        self.skeleton, _ = copy_model(model)
        container = self.skeleton.get_submodule(layers)
        line = forward_line(model.get_submodule(layers.rpartition(".")[0]))
        self.state = DryRunState(len(list(container.children())), line)
        for index, (key, layer) in enumerate(list(container.named_children())):
            setattr(container, key, RecordedLayer(layer, index, f"{layers}.{key}", self.state))
        for name in outer:
            module = self.skeleton.get_submodule(name)
            replace_submodule(self.skeleton, name, RecordedModule(module, name, self.state))
        for module in self.skeleton.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = torch.zeros_like(buffer, device="cpu") if buffer.is_meta else buffer.cpu()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, str]]:
        """Run the forward on the inputs of a micro-batch.

        Returns:
            The hidden states between layers, a meta tensor, and for each module outside of the layers that was called,
            `FIRST` or `LAST`: the stage that it belongs to.

        Raises:
            InvalidInput: the model cannot be cut, or does not run on these inputs.
        """
        state = self.state
        state.calls, state.hidden, state.previous, state.owners = 0, None, None, {}
        args, kwargs = tree_map_only(Tensor, _move_to_cpu, (args, kwargs))
        wants_logits = kwargs.get("output_router_logits")
        if (
            getattr(getattr(self.skeleton, "config", None), "output_router_logits", False)
            if wants_logits is None
            else wants_logits
        ):
            raise InvalidInput(
                "output_router_logits=True asks for a loss of the router logits of all layers, and a stage has those "
                "of its own layers only: set model.config.output_router_logits = False, or train without a pipeline "
                "axis"
            )
        try:
            with torch.enable_grad():
                output = select_output(self.skeleton(*args, **kwargs))
        except InvalidInput:
            raise
        except Exception as error:
            reason = f"its forward does not run when its layers only pass hidden states on: {error}"
            state.line = user_line(error) or state.line
            raise state.refuse(reason, "let the forward use the layers' outputs only") from error
        if state.calls < state.num_layers or state.hidden is None:
            raise state.refuse(f"{state.calls} of {state.num_layers} layers run", "run each layer once, in order")
        if output.requires_grad:
            raise state.refuse(
                "its output depends on a tensor from before the layers, which the last stage does not have",
                "compute it from the hidden states only",
            )
        hidden = torch.empty(state.hidden.shape, dtype=state.hidden.dtype, device="meta")
        return hidden, dict(state.owners)


def replace_submodule(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, module)


def _move_to_cpu(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()
