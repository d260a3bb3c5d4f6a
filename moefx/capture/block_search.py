"""Find the modules that may be MoE blocks, and the arguments they are called with.

One abstract run of the whole model records every choice (a `topk`, `argmax`, `sort`, ... of floats) with the modules
that were running, innermost first: the block is one of these, and the lift decides which. Modules that hold
expert-like parameters are candidates too, for routers that choose without scores (hashes, given ids). A module that
was run once is not run again when it comes with the same shapes: sixty equal layers cost one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrize import is_parametrized

from ..ir.dataclass_fields import open_dataclasses
from ..ir.guards.code_closure import FUNCTION_TYPES
from .attention_check import has_attention
from .code_locations import find_user_source
from .concolic import capture_block
from .concrete_routing import Routing
from .inner_calls import CallChanges, InnerCall, StateSnapshot, iterate_objects, iterate_tensors
from .isolated_run import run_for_layouts
from .named_experts import modules_apart
from .raw_containers import copy_items, find_base_type, have_same_items
from .skipped_calls import SkipPlan, plan_skipped_calls
from .tensor_trees import has_values, is_float, suspend_modes
from .torch_functions import Functions
from .tracer import Tracer

CANNOT_RUN = "does not run on abstract tensors, so nothing is known of what it writes to", "let it run on meta tensors"
_CHOICES = {"topk", "max", "min", "argmax", "argmin", "sort", "argsort", "kthvalue", "multinomial"}


@dataclasses.dataclass
class SurveyedCall:
    """A module call of the abstract run: the first with its class and shapes.

    Attributes:
        inner: calls of its submodules that are given objects or containers.
    """

    name: str
    args: tuple
    kwargs: dict[str, Any]
    inputs: list[fx.Node] = dataclasses.field(default_factory=list)
    outputs: list[fx.Node] = dataclasses.field(default_factory=list)
    inner: list[InnerCall] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class BlockCandidates:
    """Candidate blocks of a model.

    Attributes:
        chains: for each place where something is chosen, names of modules to try, innermost first.
        calls: the recorded call of each module name (first of its kind).
        twins: names of modules that were not run because an equal one was: name -> name of the one that was.
        branches: names of candidates whose alike parts work side by side, not one after the other.
        structural: names of modules that hold expert-like parameters.
        attends: whether there is attention in it.
        objects: arguments of modules that hold tensors, or that are containers which the run wrote to, by id.
    """

    chains: list[list[str]]
    calls: dict[str, SurveyedCall]
    twins: dict[str, str]
    branches: set[str]
    structural: set[str]
    has_attention: bool
    objects: dict[int, Any] = dataclasses.field(default_factory=dict)

    def skip_calls(self, call: SurveyedCall, every: bool = False) -> SkipPlan | None:
        """The call with stand-ins for those of `objects`, or for `every` object, that it passes on to submodules; None
        if there are none."""
        if not self.objects and not every:
            return None
        seen = self.calls[self.twins[call.name]] if call.name in self.twins else call  # an equal one that was run
        return plan_skipped_calls(seen.args, seen.kwargs, None if every else self.objects, seen.inner)


def compute_signature(module: nn.Module) -> tuple:
    """Classes, shapes, and what else a capture would be of: modules that agree in it may share one."""
    return (
        tuple((n, _code_of(m), m.training) for n, m in module.named_modules()),
        tuple((n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in module.named_parameters()),
        tuple((n, tuple(t.shape), t.dtype, _numbers(t)) for n, t in module.named_buffers()),
    )


def _code_of(module: nn.Module) -> tuple:
    """The class, and methods of the module's own. A parametrized module has a class of its own, too."""
    cls = type(module)
    cls = cls.__mro__[1] if is_parametrized(module) else cls
    own = [(k, getattr(v, "__func__", v)) for k, v in vars(module).items() if isinstance(v, FUNCTION_TYPES)]
    return (cls, *((k, id(fn)) for k, fn in own))


def _numbers(t: torch.Tensor) -> int | None:
    """Integers and booleans are followed by their values."""
    if is_float(t) or not has_values(t):
        return None
    return hash(tuple(t.detach().cpu().flatten().tolist())) if t.numel() <= _MOST_NUMBERS else id(t)


_MOST_NUMBERS = 1 << 16
_MOST_OPAQUE = 64


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


class Opaque:
    """Modules that run, but not on abstract tensors, such as linear layers in four bits.

    Attributes:
        results: of such a call, by the module's signature and the shapes of the arguments, with meta tensors.
        failed: the innermost call that raised in the last run.
    """

    def __init__(self) -> None:
        self.results: dict[tuple, Any] = {}
        self.failed: tuple[tuple, nn.Module, tuple, dict[str, Any]] | None = None

    def run_failed(self) -> bool:
        """Run the module that failed, for its results. Returns whether this made a difference."""
        if self.failed is None:
            return False
        key, module, args, kwargs = self.failed
        if key in self.results or len(self.results) == _MOST_OPAQUE:
            return False
        try:
            self.results[key] = run_for_layouts(module, args, kwargs)
        except Exception:  # the user's own, and the caller has it already
            return False
        return True


def search_blocks(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> BlockCandidates:
    """Run `model` once on abstract floats. A module that does not run on these is run alone, on random numbers of the
    same shapes, and its results are taken as given. Raises what the model raises."""
    opaque = Opaque()
    while True:
        try:
            return _find(model, args, kwargs, True, opaque)
        except Exception:  # a module that was not run again may have left something that its parent reads
            try:
                return _find(model, args, kwargs, False, opaque)
            except Exception:
                if not opaque.run_failed():
                    raise


def _find(model: nn.Module, args: tuple, kwargs: dict[str, Any], share: bool, opaque: Opaque) -> BlockCandidates:
    """`share`: do not run a module again that is called as an equal one was."""
    opaque.failed = None
    calls: dict[str, SurveyedCall] = {}
    twins: dict[str, str] = {}
    first: dict[tuple, tuple[str, Any]] = {}
    stack: list[SurveyedCall] = []
    choices: list[tuple[str, int]] = []
    names = {id(m): n for n, m in model.named_modules()}
    signatures = {id(m): compute_signature(m) for m in model.modules()}
    passed: dict[int, tuple[Any, Any]] = {}  # objects among arguments, and what containers held at first
    objects: dict[int, Any] = {}

    changes: dict[str, CallChanges] = {}  # of modules that were run

    def note_inner(tracer: Tracer, seen: SurveyedCall, out: Any, done: CallChanges) -> None:
        given = list(iterate_objects(seen.args, seen.kwargs))
        # asked here, because the capture puts back what it has written to
        objects.update({id(thing): thing for thing in given if _is_written(*passed[id(thing)])})
        if given:
            for outer in stack:
                name = seen.name.removeprefix(f"{outer.name}." if outer.name else "")
                outer.inner.append(InnerCall(tracer, name, seen.args, seen.kwargs, out, done))

    def around(tracer: Tracer, original: Callable) -> Callable:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(module))
            if name is None or tracer.whole_op_depth or not tracer.is_own_thread():
                return original(module, *args, **kwargs)
            for thing in iterate_objects(args, kwargs):
                passed.setdefault(id(thing), (thing, copy_items(thing) if find_base_type(thing) is not None else None))
            if name == "":
                seen = calls.setdefault("", SurveyedCall("", args, kwargs))
                stack.append(seen)
                try:
                    out = original(module, *args, **kwargs)
                finally:
                    stack.pop()
                for inner in seen.inner:
                    inner.note_overwritten(tracer)
                return out
            leaves = [_meta(x) for x in pytree.tree_leaves((args, kwargs))]
            key = (signatures[id(module)], tuple(leaves))
            known = first.get(key) if share and any(True for _ in module.children()) else None
            seen = SurveyedCall(name, args, kwargs, _nodes(tracer, (args, kwargs)))
            calls.setdefault(name, seen)
            if known is not None and known[0] != name and (again := _fresh(tracer, known[1], seen.inputs)) is not None:
                twins[name] = known[0]
                seen.outputs = _nodes(tracer, again)
                note_inner(tracer, seen, again, changes.get(known[0], CallChanges()))
                return again
            if key in opaque.results:
                out = _fresh(tracer, opaque.results[key], seen.inputs)
                seen.outputs = _nodes(tracer, out)
                note_inner(tracer, seen, out, CallChanges(missed=CANNOT_RUN))
                return out
            stack.append(seen)
            is_given = any(True for _ in iterate_objects(args, kwargs))
            before = StateSnapshot(tracer, model, module, args, kwargs) if is_given else None
            try:
                out = original(module, *args, **kwargs)
            except Exception:
                opaque.failed = opaque.failed or (key, module, args, kwargs)
                raise
            finally:
                stack.pop()
            for inner in seen.inner:
                inner.note_overwritten(tracer)
            seen.outputs = _nodes(tracer, out)
            if before is not None:
                changes[name] = before.find_changes(out)
            note_inner(tracer, seen, out, changes.get(name, CallChanges()))
            first.setdefault(key, (name, out))
            return out

        return call

    def chosen(position: int) -> None:
        if stack:
            choices.append((stack[-1].name, position))

    with _observing(around, chosen):
        nodes = capture_block(model, _abstract(args), _abstract(kwargs), Routing("diverse", 0)).nodes

    alike = {n: signatures[id(m)] for n, m in model.named_modules()}
    chosen_in = dict.fromkeys(name for name, position in choices if _index_is_used(nodes, position))
    chains = [_chain(name, alike, calls) for name in chosen_in]
    covered = {n for chain in chains for n in chain}
    branches = set()
    structural = _structural(model)
    made_by = {n: name for name in twins for n in calls[name].outputs}
    structural |= {name: [] for name in modules_apart(nodes, made_by, structural.keys() | covered)}
    for name, parts in structural.items():
        if name in calls and name not in covered:
            chains.append(_chain(name, alike, calls))
            if _side_by_side([calls[p] for p in parts if p in calls]):
                branches.add(name)
    return BlockCandidates(
        [c for c in chains if c], calls, twins, branches, set(structural), has_attention(nodes), objects
    )


def _is_written(thing: Any, before: Any) -> bool:
    """Whether a container is not as it was, or an object holds tensors, which it may have written to."""
    if before is not None and not have_same_items(copy_items(thing), before):
        return True
    return type(thing) not in (list, dict) and any(True for _ in iterate_tensors(thing))


def _abstract(tree: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().to("meta") if is_float(t) else t.detach().cpu(), tree
    )


@contextlib.contextmanager
def _observing(around: Callable, chosen: Callable) -> Iterator[None]:
    """Hook the tracer that `capture` makes: its module calls and its float-to-integer boundaries."""
    from . import concolic

    recording, record = concolic.record_calls, Tracer.record

    @contextlib.contextmanager
    def observed(tracer: Tracer, names: dict[int, str], functions: Functions) -> Iterator[None]:
        with recording(tracer, {}, functions):
            inner = nn.Module.__call__
            nn.Module.__call__ = around(tracer, inner)  # type: ignore[method-assign]
            try:
                yield
            finally:
                nn.Module.__call__ = inner  # type: ignore[method-assign]

    def noted(self: Tracer, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        name = func.overloadpacket.__name__
        if name in _CHOICES and isinstance(args[0], FakeTensor) and args[0].dim():
            chosen(len(self.nodes))
        return record(self, func, args, kwargs)

    concolic.record_calls, Tracer.record = observed, noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        concolic.record_calls, Tracer.record = recording, record  # type: ignore[method-assign]


def _nodes(tracer: Tracer, tree: Any) -> list[fx.Node]:
    with suspend_modes(), torch.DisableTorchFunction():
        found: list[fx.Node] = []
        open_dataclasses(tree, lambda t: (found.append(tracer.node_of(t)), t)[1])
        return found


def _side_by_side(calls: list[SurveyedCall]) -> bool:
    """Whether the second of these calls does not build on the result of the first."""
    if len(calls) < 2:
        return False
    seen, stack = set(), list(calls[1].inputs)
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            stack += [*n.all_input_nodes, *n.meta.get("again", ())]
    return not seen & set(calls[0].outputs)


def _fresh(tracer: Tracer, out: Any, inputs: list[fx.Node]) -> Any:
    """New abstract tensors in the shape of an earlier result; None if the result holds something else."""
    leaves = pytree.tree_leaves(out)
    is_abstract = [isinstance(x, FakeTensor) or not has_values(x) for x in leaves if isinstance(x, torch.Tensor)]
    plain = [x for x in leaves if not isinstance(x, torch.Tensor)]
    if not is_abstract or not all(is_abstract) or not all(isinstance(x, (int, float, type(None))) for x in plain):
        return None
    source = find_user_source()

    def fresh(t: torch.Tensor) -> torch.Tensor:
        twin = tracer.graph.placeholder(f"again{len(tracer.nodes)}")
        twin.meta.update(index=len(tracer.nodes), source=source, grad=True, known=False, again=inputs)
        tracer.nodes.append(twin)
        with suspend_modes(), torch.DisableTorchFunction():
            fake = tracer.to_fake(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
        twin.meta["val"] = fake
        tracer.track(fake, twin)
        return fake

    with torch.DisableTorchFunction():
        return pytree.tree_map_only(torch.Tensor, fresh, out)


def _index_is_used(nodes: list[fx.Node], position: int) -> bool:
    """Whether a choice is one: a `max` whose values alone are used (in a softmax, say) is not."""
    choice = next((n for n in nodes[position : position + 4] if n.op == "call_function"), None)
    if choice is None:
        return True
    parts = [u for u in choice.users if u.target is operator.getitem]
    return not parts or any(u.args[1] == 1 and u.users for u in parts)


def _chain(name: str, alike: dict[str, tuple], calls: dict[str, SurveyedCall]) -> list[str]:
    """The module and its parents that were called, up to where the same choice is made more than once."""
    like, chain = alike[name], []
    while True:
        inside = f"{name}." if name else ""
        if sum(1 for n, s in alike.items() if s == like and n.startswith(inside)) > 1 and chain:
            return chain
        if name in calls:
            chain.append(name)
        if not name or len(chain) == 4:
            return chain
        name = name.rpartition(".")[0]


def _shapes(module: nn.Module) -> tuple:
    return tuple((n, tuple(p.shape)) for n, p in module.named_parameters())


def _structural(model: nn.Module) -> dict[str, list[str]]:
    """Innermost modules with several equal children that hold matrices, or with a stack of matrices, and the names of
    these children."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        children = list(module.children())
        alike = (
            len(children) > 1
            and len({_shapes(c) for c in children}) == 1
            and any(p.dim() >= 2 for p in children[0].parameters())
        )
        if alike and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            found.setdefault(name.rpartition(".")[0], [f"{name}.{part}" for part, _ in module.named_children()])
        holds = isinstance(module, (nn.ParameterList, nn.ParameterDict))  # for its parent, and is never called
        layer = type(module).__module__.startswith("torch.nn.modules.") and not holds  # a convolution, say
        if not layer and any(p.dim() >= 3 and p.shape[0] > 1 for p in module._parameters.values() if p is not None):
            found.setdefault(name.rpartition(".")[0] if holds else name, [])
    return {
        n: parts
        for n, parts in found.items()
        if not any(o != n and (o.startswith(n + ".") if n else True) for o in found)
    }
