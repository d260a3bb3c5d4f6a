"""Run a copy of a model without side effects, and collect all results.

`make_sandbox` copies a model. The copy shares the parameters, or holds them in another precision, and owns its buffers
and Python state. Gradients come from `torch.autograd.grad`, so `.grad` does not change. Each output gets a fixed random
cotangent, or the user's loss is differentiated: with a sum, gradients such as those of a softmax would cancel.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import math
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.environment.worker_thread import check_interrupt
from ..capture.state.side_effects import keep_random_state
from ..ir.passed_objects import is_passed
from ..util.default_device import users_device
from ..util.model_copy import copy_model
from .input_layouts import Layout, apply_layout

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Key = tuple[str, str]  # (kind, name)
Call = Callable[..., Any]  # (module, *args, **kwargs) -> the module's output
SECOND_BACKWARD = " (second backward)"  # suffix of the names of its gradients


# ---- trees and copies -------------------------------------------------------------------------------------


def leaves(tree: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (path, tensor or number) of each leaf of containers, dataclasses and plain objects such as a key-value
    cache."""
    seen = set() if seen is None else seen
    if is_passed(tree):  # a passed object may imitate the class of a number
        return
    if isinstance(tree, (Tensor, bool, int, float)):
        yield path or "output", tree
        return
    if id(tree) in seen or isinstance(tree, (str, bytes, type, nn.Module)) or callable(tree):
        return
    seen.add(id(tree))
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    else:
        items = list(vars(tree).items()) if hasattr(tree, "__dict__") else []
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key), seen)


def change_tensors(tree: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Return a copy of `tree` with each tensor replaced by `change(path, tensor)`. Aliases stay aliases."""
    memo: dict[int, Any] = {}
    for name, t in leaves(tree):
        if isinstance(t, Tensor) and id(t) not in memo:
            memo[id(t)] = change(name, t)
    return copy.deepcopy(tree, memo)


def copy_detached(tree: Any) -> Any:
    """Return a copy of `tree` with detached clones of its tensors."""
    return change_tensors(tree, lambda _, t: t.detach().clone())


Parameters = Callable[[nn.Parameter], nn.Parameter]


class Casts:
    """Casts parameters to another precision, once for all sandboxes. `dtype=None` keeps their precision."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, p: nn.Parameter) -> nn.Parameter:
        if self.dtype is None or not p.is_floating_point() or p.dtype == self.dtype:
            return p
        if p not in self._made:
            self._made[p] = nn.Parameter(p.detach().to(self.dtype), requires_grad=p.requires_grad)
        return self._made[p]


def make_sandbox(module: nn.Module, parameters: Parameters, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of a module that can run without side effects on the original.

    Args:
        parameters: maps each parameter to the copy's parameter.
        dtype: dtype of floating-point buffers; None for their own.
    """
    box, _ = copy_model(module)
    modules = list(box.modules())
    memo: dict[int, Any] = {id(m): m for m in modules}
    registered = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
    copied = _find_copied_parameters(registered.values())
    for key, p in registered.items():
        memo[key] = _rewrap_parameter(parameters(p), key in copied)
    for b in box.buffers():
        memo[id(b)] = b.detach().to(dtype if b.is_floating_point() else None, copy=True)
    for sub in modules:
        for held in (sub._parameters, sub._buffers):
            if held:
                held.update({name: memo[id(t)] for name, t in held.items() if t is not None})
        for name, value in vars(sub).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if isinstance(value, Tensor) or (isinstance(value, (list, tuple, dict)) and value):
                tensors = [t for _, t in leaves(value) if isinstance(t, Tensor)]
                for t in tensors:  # deepcopy refuses non-leaf tensors, such as a recorded auxiliary loss
                    memo.setdefault(id(t), t.detach().clone())
                if tensors:
                    vars(sub)[name] = copy.deepcopy(value, memo)
    return box


def _find_copied_parameters(parameters: Iterable[nn.Parameter]) -> set[int]:
    """Return the smallest parameters, by `id`, whose values each sandbox copies.

    A forward may change parameters in place, for example normalise the rows of its router.
    """
    copied, total = set(), 0
    for size, key in sorted((p.numel(), id(p)) for p in parameters):
        total += size
        if total > _MAX_COPIED:
            break
        copied.add(key)
    return copied


def _rewrap_parameter(p: nn.Parameter, copied: bool) -> nn.Parameter:
    """Return a new parameter with copied or shared values, so that assigning its `.data` does not change the
    original."""
    if type(p) is not nn.Parameter:
        return p
    return nn.Parameter(p.detach().clone() if copied else p.detach(), requires_grad=p.requires_grad)


_MAX_COPIED = 1 << 22  # elements


@contextlib.contextmanager
def random_state(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Seed every generator that a model may use, and restore all of them afterwards."""
    numpy = sys.modules.get("numpy")
    accelerators = _select_accelerators(devices)
    kind = accelerators[0].type if accelerators else "cuda"
    with keep_random_state(), torch.random.fork_rng(devices=accelerators, device_type=kind):
        torch.default_generator.manual_seed(seed)
        for device in accelerators:  # `torch.manual_seed` would also seed devices that are not restored
            module = torch.get_device_module(device)
            with module.device(device):
                module.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed)
        yield


# ---- one run ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """All results of one call: `values[kind, name]`. A gradient is None if autograd did not reach it."""

    values: dict[Key, Tensor | None]
    changed: set[Key]  # buffers and state that the call changed
    cotangents: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Settings of a run.

    Attributes:
        seed: seed of the model's random numbers and of the cotangents.
        grads: enable gradients and run the backward.
        loss: the user's `loss(output) -> scalar`; None differentiates every output.
        max_gradient_numel: skip gradients of parameters with more elements, to save memory.
        has_second_backward: also run a second backward with cotangents of stride 0, as `out.sum().backward()` makes.
        backward: False runs only the forward, still under `grads`.
        layout: memory layout of the inputs, see `input_layouts`.
        training: train or eval mode for all modules; None keeps their modes.
        inference: run in `torch.inference_mode`.
    """

    seed: int = 0
    grads: bool = True
    loss: Callable[[Any], Tensor] | None = None
    max_gradient_numel: float = math.inf
    has_second_backward: bool = False
    backward: bool = True
    layout: Layout = ""
    training: bool | None = None
    inference: bool = False


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def call_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a block without its forward pre-hooks, which already ran when its arguments were recorded."""
    return module.forward(*args, **kwargs)


def execute(
    module: nn.Module,
    inputs: Inputs,
    options: RunOptions,
    *,
    call: Call = call_module,
    mode: contextlib.AbstractContextManager | None = None,
    cast: Callable[[Tensor], Tensor] = lambda t: t,
    cotangents: dict[str, Tensor] | None = None,
) -> Run:
    """Call a sandbox once and collect the results.

    Args:
        mode: context of the run, such as a dispatch mode.
        cast: applied to floating-point inputs.
        cotangents: cotangents of the first run, so that all runs differentiate the same function.
    """
    check_interrupt()
    if options.training is not None:
        module.train(options.training)
    everything = (*module.parameters(), *(value for _, value in leaves(inputs)))
    devices = {t.device for t in everything if isinstance(t, Tensor)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(options.grads))
        # Keep the backward on this thread: a recomputation in it must run under the mode too.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        args, kwargs = inputs
        named, sources, versions = _copy_inputs(inputs, options, cast)
        before = _read_state(module)
        stack.enter_context(random_state(options.seed, devices))
        drawn = _hash_generators(devices)
        stack.enter_context(mode or contextlib.nullcontext())
        if options.inference:  # inputs are made outside, so they have version counters that reveal writes
            stack.enter_context(torch.inference_mode())

        with users_device():
            out = call(module, *(named[i] for i in range(len(args))), **{key: named[key] for key in kwargs})
        heads = {name: t if isinstance(t, Tensor) else _number_to_tensor(t) for name, t in leaves(out)}
        if options.loss is not None:
            with users_device():
                heads["loss"] = options.loss(out)
        values: dict[Key, Tensor | None] = {}
        values |= {("output", name): t.detach().clone() for name, t in heads.items()}
        for name, (t, version) in versions.items():
            if t._version != version:
                values["state", f"input {name}"] = t.detach().clone()
        if options.grads:
            values |= {("output", f"{n}.requires_grad"): torch.tensor(t.requires_grad) for n, t in heads.items()}
            if options.loss is not None:
                heads = {"loss": heads["loss"]}
            targets = {("grad_input", name): t for name, t in sources.items()}
            targets |= {
                ("grad_param", name): p
                for name, p in module.named_parameters()
                if p.requires_grad and p.numel() <= options.max_gradient_numel
            }
            if options.backward:
                cotangents = _add_gradients(heads, targets, options, cotangents or {}, values)
        if (now := _hash_generators(devices)) != drawn:
            values["state", "random numbers drawn"] = torch.tensor(now)
    after = _read_state(module)
    changed = {key for key, t in after.items() if key not in before or not _is_equal(t, before[key])}
    changed |= {key for key in values if key[0] == "state"}
    return Run(values | after, changed, cotangents or {})


def _copy_inputs(
    inputs: Inputs, options: RunOptions, cast: Callable[[Tensor], Tensor]
) -> tuple[dict[Any, Any], dict[str, Tensor], dict[str, tuple[Tensor, int]]]:
    """Copy the inputs of a run.

    Returns:
        The copies by position or keyword, the leaves to differentiate by name, and the tensors given to the module with
        their versions.
    """
    sources: dict[str, Tensor] = {}
    versions: dict[str, tuple[Tensor, int]] = {}

    def copy_tensor(name: str, t: Tensor) -> Tensor:
        t = cast(t.detach().clone()) if t.is_floating_point() else t.clone()
        if options.grads and t.is_floating_point():
            sources[name] = t.requires_grad_()
            t = t.clone()  # the code may update its input in place, which a leaf does not allow
        t = apply_layout(t, options.layout)
        versions[name] = t, t._version
        return t

    args, kwargs = inputs
    return change_tensors({**dict(enumerate(args)), **kwargs}, copy_tensor), sources, versions


def _number_to_tensor(number: float) -> Tensor:
    """Return a number that a model returns or stores, as a tensor. Independent of the default dtype."""
    return torch.tensor(number, dtype=torch.float32 if type(number) is float else None)


def _hash_generators(devices: Iterable[torch.device]) -> int:
    """Return a digest of the states of all generators, to detect a different number of draws."""
    states = [torch.get_rng_state()]
    states += [torch.get_device_module(d).get_rng_state(d) for d in _select_accelerators(devices)]
    drawn = b"".join(bytes(s.tolist()) for s in states) + repr(random.getstate()).encode()
    if numpy := sys.modules.get("numpy"):
        state = numpy.random.get_state(legacy=False)
        values = (*state.pop("state").values(), *state.values())
        drawn += b"".join(value.tobytes() if hasattr(value, "tobytes") else repr(value).encode() for value in values)
    return zlib.crc32(drawn)


def _select_accelerators(devices: Iterable[torch.device]) -> list[torch.device]:
    return sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)


def _add_gradients(
    heads: dict[str, Tensor],
    targets: dict[Key, Tensor],
    options: RunOptions,
    known: dict[str, Tensor],
    values: dict[Key, Tensor | None],
) -> dict[str, Tensor]:
    """Add the gradients of `targets` to `values`, and return the cotangents of `heads`."""
    heads = {name: t for name, t in heads.items() if t.requires_grad}
    cotangents = {}
    for i, (name, t) in enumerate(heads.items()):
        fits = name in known and known[name].shape == t.shape
        cotangents[name] = known[name] if fits else _make_cotangent(t, options.seed + i)
    values |= dict.fromkeys(targets)
    if options.has_second_backward:
        values |= dict.fromkeys((kind, name + SECOND_BACKWARD) for kind, name in targets)
    if heads and targets:
        weights = [cotangents[name].to(t) for name, t in heads.items()]
        differentiate = functools.partial(
            torch.autograd.grad, list(heads.values()), list(targets.values()), allow_unused=True
        )
        values |= zip(targets, differentiate(weights, retain_graph=options.has_second_backward), strict=True)
        if options.has_second_backward:
            second = differentiate([_make_expanded_cotangent(t) for t in heads.values()])
            values |= {(kind, name + SECOND_BACKWARD): t for (kind, name), t in zip(targets, second, strict=True)}
    return cotangents


def _make_expanded_cotangent(t: Tensor) -> Tensor:
    """Return a constant cotangent with stride 0 in all dimensions, as the backward of `sum` makes."""
    num_rows = max(t.numel() // max(t.shape[-1], 1), 1) if t.ndim else 1
    return t.new_full((), 1 / math.sqrt(num_rows)).expand(t.shape)


def _make_cotangent(t: Tensor, seed: int) -> Tensor:
    if t.ndim == 0:
        return torch.ones_like(t)
    generator = torch.Generator().manual_seed(seed)
    num_rows = max(t.numel() // max(t.shape[-1], 1), 1)
    return (torch.randn(t.shape, generator=generator, dtype=torch.float32) / math.sqrt(num_rows)).to(t)


def _read_state(module: nn.Module) -> dict[Key, Tensor]:
    """Read buffers, and tensors and numbers in plain attributes of modules, such as a recorded auxiliary loss."""
    state: dict[Key, Tensor] = {("buffer", n): b.detach().clone() for n, b in module.named_buffers()}
    for prefix, sub in module.named_modules():
        for name, value in vars(sub).items():
            if type(value) in _CONTAINERS or name == "training":
                continue
            if isinstance(value, (Tensor, int, float)):
                value = value.detach().clone() if isinstance(value, Tensor) else _shared_tensor(value)
                state["state", f"{prefix}.{name}" if prefix else name] = value
    return state


_CONTAINERS = {dict, collections.OrderedDict, set, type(None), str}  # most attributes of a module


@functools.lru_cache(maxsize=4096, typed=True)
def _shared_tensor(number: float) -> Tensor:
    """Return a cached, read-only `_number_to_tensor`: modules of one kind store the same few numbers."""
    return _number_to_tensor(number)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
