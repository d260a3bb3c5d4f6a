"""Checks of a compiled model. Each raises `AssertionError` with numbers, or passes.

Models are compared in float64 if they support it, else in float32. The reference is a copy from before `compile`,
because compiled model and original share their parameters.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import moefx
from tests.models.case import Case, Inputs, list_tensors

SHAPES = ((2, 12), (1, 40), (3, 7), (1, 1))  # batch, sequence; the first shape is the example's


class _SinglePrecision(TorchDispatchMode):
    """Record whether a float64 model computes anything in float32 or bfloat16."""

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(t.dtype in (torch.float32, torch.bfloat16) for t in list_tensors(out)):
            self.seen = True
        return out


def choose_tolerance(case: Case, model: nn.Module, inputs: Inputs) -> float:
    """Return the relative tolerance of float64 sums, or of float32 if the model computes in it."""
    with torch.no_grad(), _SinglePrecision() as mode:
        case.call(copy.deepcopy(model), copy.deepcopy(inputs))
    return 2e-5 if mode.seen or case.dtype != torch.float64 else 1e-10


def compute_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference relative to the largest entry, or infinity if only one entry is finite."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(f"{list(a.shape)} {a.dtype} became {list(b.shape)} {b.dtype}")
    if a.numel() == 0:
        return 0.0
    if not a.is_floating_point():
        return float((a != b).any()) * float("inf") if (a != b).any() else 0.0
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.detach().double().nan_to_num(0, 0, 0), b.detach().double().nan_to_num(0, 0, 0)
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-2))


def assert_trees_close(label: str, expected: Any, actual: Any, tol: float) -> None:
    expected, actual = list_tensors(expected), list_tensors(actual)
    assert len(expected) == len(actual), f"{label}: {len(expected)} tensors became {len(actual)}"
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        try:
            gap = compute_distance(a, b)
        except AssertionError as error:
            raise AssertionError(f"{label}[{i}]: {error}") from None
        assert gap <= tol, f"{label}[{i}] {list(a.shape)}: relative difference {gap:.2g} > {tol:.0g}"


@dataclasses.dataclass
class State:
    """Parameters and buffers, which a forward may change in place, to restore between checks."""

    entries: dict[str, torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> State:
        named = [*model.named_parameters(), *model.named_buffers()]
        return cls({n: t.detach().clone() for n, t in named})

    def restore(self, model: nn.Module) -> None:
        with torch.no_grad():
            for name, t in [*model.named_parameters(), *model.named_buffers()]:
                t.copy_(self.entries[name])

    def check(self, model: nn.Module, label: str) -> None:
        for name, t in [*model.named_parameters(), *model.named_buffers()]:
            assert torch.equal(t, self.entries[name]) or t.isnan().any(), f"{label}: {name} changed"


def make_leaf_inputs(inputs: Inputs) -> tuple[Inputs, list[torch.Tensor]]:
    """Copy inputs so that float tensors require grad and are no leaves: the model may edit them in place."""
    leaves: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            leaves.append(value.detach().clone().requires_grad_())
            return leaves[-1] * 1
        return value.clone() if isinstance(value, torch.Tensor) else value

    if isinstance(inputs, dict):
        return {k: leaf(v) for k, v in inputs.items()}, leaves
    return tuple(leaf(v) for v in inputs), leaves


def train_step(case: Case, model: nn.Module, inputs: Inputs, lr: float = 0.1) -> dict[str, Any]:
    """Run one SGD step and return all observable results."""
    model.zero_grad(set_to_none=True)
    inputs, leaves = make_leaf_inputs(inputs)
    torch.manual_seed(1234)
    output = case.call(model, inputs)
    loss = case.loss_of(output)
    grads = [None] * len(leaves)
    loss.backward()
    grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
    # Experts without tokens may have no gradient or a zero gradient.
    weight_grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= lr * p.grad
    changed_inputs = [t.detach() for t in list_tensors(inputs)]
    rng = torch.get_rng_state() if case.rng else torch.zeros(0)
    return {
        "output": [t.detach() for t in list_tensors(output)],
        "loss": loss.detach(),
        "input gradient": grads,
        "input after": changed_inputs,
        "gradient": weight_grads,
        "state after the step": State.of(model).entries,
        "random state": rng,
    }


def compare_steps(
    case: Case, reference: nn.Module, compiled: nn.Module, inputs: Inputs, tol: float, label: str
) -> None:
    try:
        expected = train_step(case, reference, inputs)
    except (AssertionError, RuntimeError, ValueError):
        return  # the original does not support this shape (DeepSpeed needs more tokens than its minimal capacity)
    actual = train_step(case, compiled, inputs)
    for what in expected:
        if isinstance(expected[what], dict):
            assert list(expected[what]) == list(actual[what]), f"{label}: names of the {what} differ"
            for name in expected[what]:
                assert_trees_close(f"{label}: {what} of {name}", expected[what][name], actual[what][name], tol * 10)
        else:
            assert_trees_close(f"{label}: {what}", expected[what], actual[what], tol)


def record_block_calls(case: Case, model: nn.Module, names: list[str], inputs: Inputs) -> dict[str, tuple[tuple, dict]]:
    """Return the arguments of the first call of each named block in one forward."""
    modules, seen, handles = dict(model.named_modules()), {}, []

    def record(name):
        def hook(module, args, kwargs):
            seen.setdefault(name, copy.deepcopy((_detach(args), _detach(kwargs))))

        return hook

    for name in names:
        handles.append(modules[name].register_forward_pre_hook(record(name), with_kwargs=True))
    with torch.no_grad():
        case.call(model, copy.deepcopy(inputs))
    for handle in handles:
        handle.remove()
    return seen


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple):
        return tuple(map(_detach, value))
    if isinstance(value, dict):
        return {k: _detach(v) for k, v in value.items()}
    return value


def get_name(item: Any) -> str:
    return item if isinstance(item, str) else getattr(item, "name", str(item))


def list_rewritten(compiled: nn.Module) -> list[str]:
    return [get_name(b) for b in moefx.blocks(compiled)]


def check_rewritten(case: Case, compiled: nn.Module) -> str:
    """Check that every block was rewritten, at its own module, inside it, or at a module that contains it."""
    found, notes = list_rewritten(compiled), []
    for name in case.block_names:
        inside = [f for f in found if f.startswith(f"{name}." if name else "")]
        around = [f for f in found if name.startswith(f"{f}." if f else "")]
        assert name in found or inside or around, f"block {name!r} was not rewritten (rewritten: {found or 'none'})"
        if name not in found:
            notes.append(f"{name!r} as {(inside or around)[0]!r}")
    return ", ".join(notes[:2])


def check_argument_untouched(original: nn.Module, before: State, hooks: dict, modes: dict) -> None:
    before.check(original, "compile() changed its argument")
    assert modes == read_modes(original), "compile() changed the training flags of its argument"
    assert hooks == count_hooks(original), "compile() left hooks on its argument"
    instance_forwards = [n for n, m in original.named_modules() if "forward" in vars(m)]
    assert not instance_forwards, f"compile() replaced forward of its argument's {instance_forwards[0]!r}"


def read_modes(model: nn.Module) -> dict[str, bool]:
    return {n: m.training for n, m in model.named_modules()}


def count_hooks(model: nn.Module) -> dict[str, int]:
    kinds = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
    )
    return {f"{n}:{k}": len(getattr(m, k)) for n, m in model.named_modules() for k in kinds}


def check_shared(original: nn.Module, compiled: nn.Module) -> None:
    """Check that parameters and buffers are the original's: without a mesh, `compile` copies no weights."""
    for kind in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(original, kind)())
        for name, t in getattr(compiled, kind)():
            assert t is theirs[name], f"{name} is not shared with the original"


def check_same_shell(reference: nn.Module, compiled: nn.Module) -> None:
    """Check for equal classes, submodules, state_dict keys, shapes and dtypes, and load the original's checkpoint."""
    assert type(compiled) is type(reference), f"{type(reference).__name__} became {type(compiled).__name__}"
    expected, actual = reference.state_dict(), compiled.state_dict()
    assert list(expected) == list(actual), f"state_dict keys differ: {sorted(set(expected) ^ set(actual))[:3]}"
    for key, value in expected.items():
        assert value.shape == actual[key].shape, f"state_dict[{key!r}] differs"
        assert value.dtype == actual[key].dtype, f"state_dict[{key!r}] differs"
    tree = [(n, type(m)) for n, m in reference.named_modules()]
    assert tree == [(n, type(m)) for n, m in compiled.named_modules()], "the submodule tree differs"
    assert read_modes(reference) == read_modes(compiled), "the training flags differ"
    compiled.load_state_dict(expected)


ROUTER_NAME = re.compile(r"(^|[._])(gate|gating|router|switch|wg|classifier)$")


def check_router_hooks(case: Case, reference: nn.Module, compiled: nn.Module, inputs: Inputs, tol: float) -> None:
    """Check that forward hooks on router modules record equal tensors, for routers that the original calls."""

    def record(model: nn.Module, chosen: list[str]) -> list[tuple[str, list[torch.Tensor]]]:
        seen, handles, modules = [], [], dict(model.named_modules())
        for name in chosen:
            hook = lambda m, args, out, name=name: seen.append((name, list_tensors(out)))  # noqa: E731
            handles.append(modules[name].register_forward_hook(hook))
        torch.manual_seed(5)
        with torch.no_grad():
            case.call(model, copy.deepcopy(inputs))
        for handle in handles:
            handle.remove()
        return seen

    routers = [
        name
        for name, _ in reference.named_modules()
        if ROUTER_NAME.search(name) and any(name.startswith(b) for b in case.block_names)
    ]
    start = State.of(reference)
    expected = record(reference, routers)
    start.restore(reference)
    called = list(dict.fromkeys(name for name, _ in expected))
    actual = record(compiled, called)
    assert [n for n, _ in expected] == [n for n, _ in actual], (
        f"router hooks fired for {[n for n, _ in actual]}, not for {[n for n, _ in expected]}"
    )
    for (name, a), (_, b) in zip(expected, actual, strict=True):
        assert_trees_close(f"recorded by a hook on {name}", a, b, tol)


def check_router_logits(case: Case, reference: nn.Module, compiled: nn.Module, inputs: Inputs, tol: float) -> None:
    """Check `output_router_logits=True` of transformers models, which records through hooks."""
    if not isinstance(inputs, dict) or not hasattr(getattr(reference, "config", None), "output_router_logits"):
        return

    def logits(model: nn.Module) -> Any:
        torch.manual_seed(5)
        with torch.no_grad():
            return getattr(case.call(model, {**inputs, "output_router_logits": True}), "router_logits", None)

    try:
        expected = logits(reference)
    except AttributeError as own:  # JetMoe of transformers 4.57 reads an attribute that it never sets
        with pytest.raises(AttributeError, match=re.escape(str(own))):
            logits(compiled)
        return
    assert_trees_close("router_logits", expected, logits(compiled), tol)


def check_fullgraph(case: Case, reference: nn.Module, compiled: nn.Module, inputs: Inputs, tol: float) -> None:
    """Check that one rewritten block of each class compiles to one graph, for other batch shapes and routings too."""
    modules, originals = dict(compiled.named_modules()), dict(reference.named_modules())
    names = list({type(modules[n]): n for n in reversed(list_rewritten(compiled))}.values())
    several = [
        record_block_calls(case, reference, names, i) for i in (inputs, case.fresh(3, 7, 5), case.fresh(1, 40, 6))
    ]
    for name in names:
        torch._dynamo.reset()
        call = torch.compile(modules[name], fullgraph=True, backend="aot_eager")
        for args, kwargs in (calls[name] for calls in several if name in calls):
            torch.manual_seed(3)
            actual = call(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            torch.manual_seed(3)
            expected = originals[name](*copy.deepcopy(args), **copy.deepcopy(kwargs))
            assert_trees_close(f"torch.compile of {name!r}", expected, actual, tol)
    torch._dynamo.reset()
