"""Placeholders for modules of other stages, and the forward of a stage.

A stage is a copy of the user's model in which only the stage's own layers remain. Its forward is the user's own: it
runs on the inputs of the micro-batch, so masks and positions are computed as in the whole model. The layer before the
stage's first one returns the hidden states that the stage before has sent, and the layer after its last one ends the
forward. Modules outside of the layers that belong to another stage return zeros of the right shape.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import InvalidInput, MoefxError

_PLAIN = (bool, int, float, str, type(None))
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments of the model


class StageEnd(BaseException):
    """Ends the user's forward after the last layer of a stage. `except Exception` in a model does not catch it."""

    def __init__(self, hidden: Tensor):
        self.hidden = hidden


@dataclasses.dataclass(eq=False)
class StagePort:
    """State of a step that the placeholders of a stage read.

    Attributes:
        stage: number of the stage.
        is_last: whether it is the last stage.
        inputs: arguments of the model, by micro-batch.
        targets: targets by micro-batch, or None if no loss is computed.
        losses: losses of micro-batches so far.
        loss_error: the error of `loss_fn` in this step, if it raised. Other ranks wait for this one, so the step goes
            on with a loss of 0, and raises at its end.
        microbatch: the current micro-batch.
        boundary: hidden states between stages, a meta tensor.
        received: hidden states of the current micro-batch from the stage before.
        is_running: whether the stage's forward runs. Otherwise placeholders pass their input on.
        device: where the stage runs.
    """

    stage: int
    is_last: bool
    loss_fn: Callable[[Tensor, Any], Tensor]
    num_microbatches: int
    inputs: list[Call] = dataclasses.field(default_factory=list)
    targets: list[Any] | None = None
    losses: list[Tensor] = dataclasses.field(default_factory=list)
    loss_error: Exception | None = None
    microbatch: int = 0
    boundary: Tensor | None = None
    received: Tensor | None = None
    is_running: bool = False
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> StagePort:
        return self

    def make_hidden(self, device: torch.device | str, requires_grad: bool = False) -> Tensor:
        """Return room for the hidden states of a micro-batch between two stages."""
        if self.boundary is None:
            raise AssertionError("the shape between stages is not known before the first step")
        return torch.empty_like(self.boundary, device=device, requires_grad=requires_grad)


def find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return the hidden states among a layer's arguments, the first positional argument or the first tensor by
    keyword, and all other arguments."""
    if args:
        return args[0], [*args[1:], *kwargs.values()]
    name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
    return (None if name is None else kwargs[name]), [value for key, value in kwargs.items() if key != name]


class Placeholder(nn.Module):
    """Stands for a module of another stage. It has the module's mode, numbers and texts, such as the kind of attention
    of a layer, that the user's forward may read. Its own state is in private attributes, which hide none of these.

    Args:
        module: the module, or a placeholder of it.
        name: its name in the model.
    """

    _moefx_read_error: type[Exception] = AttributeError

    def __init__(self, module: nn.Module, name: str):
        super().__init__()
        if not isinstance(module, Placeholder):
            registered = (*module._parameters, *module._buffers, *module._modules)
            vars(self)["_moefx_origin"] = Origin(name, type(module), frozenset({*vars(module), *registered}))
        for attribute, value in vars(module).items():
            if attribute == "training" or (attribute not in vars(self) and isinstance(value, (*_PLAIN, Origin))):
                vars(self)[attribute] = value

    def __getattr__(self, attribute: str) -> Any:
        origin = vars(self).get("_moefx_origin")
        if origin is None or attribute.startswith("__"):
            return super().__getattr__(attribute)
        value = getattr(origin.cls, attribute, origin)
        if isinstance(value, _PLAIN):
            return value
        if value is origin and attribute not in origin.attributes:
            raise AttributeError(f"{origin.cls.__name__!r} object has no attribute {attribute!r}")
        raise self._moefx_read_error(_describe_read(f"{origin.name}.{attribute}"))


@dataclasses.dataclass(frozen=True)
class Origin:
    """The module that a placeholder stands for: its name in the model, its class, and the names of its attributes."""

    name: str
    cls: type
    attributes: frozenset[str]


class SkippedLayer(Placeholder):
    """Placeholder of a layer of another stage. Returns the hidden states unchanged."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return find_hidden(args, kwargs)[0]


class EntryLayer(SkippedLayer):
    """Placeholder of the layer before a stage's first one. Returns the hidden states that the stage has received."""

    def __init__(self, layer: nn.Module, name: str, port: StagePort):
        super().__init__(layer, name)
        self._moefx_port = port

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received = self._moefx_port.received
        # A copy, because layers may write to their input in place, and the received tensor is a leaf.
        return super().forward(*args, **kwargs) if received is None else received.clone()


class EndLayer(SkippedLayer):
    """Placeholder of the layer after a stage's last one. Ends the forward."""

    def __init__(self, layer: nn.Module, name: str, port: StagePort):
        super().__init__(layer, name)
        self._moefx_port = port

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, _ = find_hidden(args, kwargs)
        port = self._moefx_port
        if not port.is_running:
            return hidden
        expected = port.boundary
        if not isinstance(hidden, Tensor) or expected is None:
            raise InvalidInput(f"the last layer of stage {port.stage} returned {type(hidden).__name__}, not a tensor")
        if hidden.shape != expected.shape or hidden.dtype != expected.dtype:
            raise InvalidInput(
                f"the last layer of stage {port.stage} returned {list(hidden.shape)} in {hidden.dtype}, and the "
                f"first layer of the model takes {list(expected.shape)} in {expected.dtype}: a pipeline needs hidden "
                "states of one shape and dtype between all layers"
            )
        raise StageEnd(hidden)


class AbsentModule(Placeholder):
    """Placeholder of a module of another stage outside of the layers. Returns zeros in the shapes of its results.

    Args:
        module: the module. A copy without storage is kept, out of sight of `parameters()`.
        name: its name in the model.
        port: the port of the stage; None for a dry run, on the CPU.
    """

    def __init__(self, module: nn.Module, name: str, port: StagePort | None):
        super().__init__(module, name)
        vars(self).update(_moefx_meta_module=copy_to_meta(module), _moefx_port=port)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = tensors[0].device if tensors else self._moefx_device
        with torch.no_grad():
            args, kwargs = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), (args, kwargs))
            result = vars(self)["_moefx_meta_module"](*args, **kwargs)
        return tree_map_only(Tensor, lambda t: self._moefx_make_result(t, device), result)

    @property
    def _moefx_device(self) -> torch.device:
        port: StagePort | None = vars(self)["_moefx_port"]
        return torch.device("cpu") if port is None else port.device

    def _moefx_make_result(self, shaped: Tensor, device: torch.device) -> Tensor:
        return torch.zeros(shaped.shape, dtype=shaped.dtype, device=device)

    def train(self, mode: bool = True) -> AbsentModule:
        vars(self)["_moefx_meta_module"].train(mode)
        return super().train(mode)

    def __getattr__(self, attribute: str) -> Any:
        meta_module = vars(self).get("_moefx_meta_module")
        for registered in () if meta_module is None else (meta_module._parameters, meta_module._buffers):
            if (tensor := registered.get(attribute)) is not None:
                name = f"{vars(self)['_moefx_origin'].name}.{attribute}"
                return AbsentTensor(name, tensor.shape, tensor.dtype, self._moefx_device)
        return super().__getattr__(attribute)


@dataclasses.dataclass(frozen=True)
class AbsentTensor:
    """A parameter or buffer of another stage, without its values."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(_describe_read(f"{self.name}.{attribute}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(leaf.name for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        raise MoefxError(_describe_read(f"the values of {name}"))


def _describe_read(subject: str) -> str:
    return (
        f"the model reads {subject}, which may be in another stage of the pipeline. Of modules that run before or "
        "after the layers it may read numbers, texts, and the shape, dtype and device of parameters; of layers, "
        "numbers and texts"
    )


class StageForward:
    """The forward of a stage's model: runs the user's forward on the current micro-batch.

    Takes the hidden states of the stage before, or nothing in the first stage. Returns the hidden states for the next
    stage. The last stage returns its share of the loss, [1]. Without targets it returns the model's output.
    """

    def __init__(self, model: nn.Module, port: StagePort):
        self.original, self.port = model.forward, port

    def __call__(self, *received: Tensor) -> Tensor:
        port = self.port
        args, kwargs = port.inputs[port.microbatch]
        port.received, port.is_running = (received[0] if received else None), True
        try:
            output = self.original(*args, **kwargs)
        except StageEnd as end:
            return end.hidden.contiguous()
        finally:
            port.received, port.is_running = None, False
        output = select_output(output)
        if port.targets is None:
            return output
        try:
            loss = self._compute_loss(output, port.targets[port.microbatch])
        except Exception as error:
            port.loss_error = port.loss_error or error
            loss = output.double().sum() * 0  # depends on the output: the backward runs all exchanges
        port.losses.append(loss.detach().reshape(()))
        return loss.double().reshape(1) / port.num_microbatches  # torch is told the dtype before the first step

    def _compute_loss(self, output: Tensor, target: Any) -> Tensor:
        loss = self.port.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidInput(f"loss_fn(output, target) returned {kind}, expected a tensor of one number: its mean")
        return loss


def select_output(output: Any) -> Tensor:
    """Return the tensor that `loss_fn` takes: the model's output, or its field `logits`.

    Raises:
        InvalidInput: the output has no such tensor, or the model has computed a loss itself.
    """
    if isinstance(output, Tensor):
        return output
    fields = dict(output.items()) if hasattr(output, "items") else {}
    for name in ("loss", "aux_loss", "router_logits"):
        if fields.get(name) is not None:
            raise InvalidInput(
                f"the model's output has {name!r}, which a stage of a pipeline computes from its own layers only: "
                "leave labels and output_router_logits out, and pass labels as step(..., target=labels) to your loss_fn"
            )
    if not isinstance(fields.get("logits"), Tensor):
        raise InvalidInput(
            f"the model returned {type(output).__name__}: a pipeline takes models that return a tensor, or an output "
            "with a field 'logits'"
        )
    return fields["logits"]


def copy_to_meta(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device."""
    memo: dict[int, Any] = {}
    for tensor in iterate_tensors(module):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if is_parameter else empty
    return copy.deepcopy(module, memo)


def iterate_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
