"""Find the modules of a model that may be MoE blocks, and the arguments of their calls.

One abstract run of the model records each selection (a `topk`, `argmax`, `sort`, ... of floats) with the modules around
it. One of these modules is the block; the lift decides which. Modules with expert-like parameters are candidates, too,
for routers that choose without scores (hashes, given ids). Modules that are equal and get equal shapes run once, so
sixty equal layers cost one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...ir.dataclass_fields import open_dataclasses
from ...util.tensor_trees import has_values, is_float, suspend_modes
from ..concolic import capture_block
from ..environment.code_locations import find_user_source, is_internal_error
from ..state.inner_calls import CallChanges, InnerCall, StateSnapshot, iterate_objects, iterate_tensors
from ..state.raw_containers import copy_items, find_base_type, have_same_items
from ..tracing.concrete_routing import Routing
from ..tracing.op_sets import SELECTION_OPS
from ..tracing.tracer import Tracer
from .attention_check import has_attention
from .isolated_run import run_for_layouts
from .memory_traffic import count_traffic
from .module_structure import compute_signature, find_expert_like
from .named_experts import find_named_experts
from .skipped_calls import SkipPlan, plan_skipped_calls

UNKNOWN_WRITES = "does not run on abstract tensors, so its writes are unknown", "let it run on meta tensors"
_MAX_OPAQUE = 64  # results of modules that run on real tensors only
_MAX_ENCLOSING = 4  # modules around a selection that are tried as a block


@dataclasses.dataclass
class SurveyedCall:
    """The first call of a module in the abstract run.

    Attributes:
        inner: calls of its submodules that get objects or containers.
        positions: of its nodes in the run.
    """

    name: str
    args: tuple
    kwargs: dict[str, Any]
    inputs: list[fx.Node] = dataclasses.field(default_factory=list)
    outputs: list[fx.Node] = dataclasses.field(default_factory=list)
    inner: list[InnerCall] = dataclasses.field(default_factory=list)
    positions: range = range(0)

    def is_passed_on_by(self, outer: SurveyedCall) -> bool:
        """Return whether `outer` only passes its arguments to this call and returns its results, as nn.Sequential may.

        The two modules then compute the same.
        """
        own_values, outer_values = (pytree.tree_leaves((call.args, call.kwargs)) for call in (self, outer))
        return (
            bool(self.positions)
            and self.positions == outer.positions
            and self.outputs == outer.outputs
            and len(own_values) == len(outer_values)
            and all(a is b for a, b in zip(own_values, outer_values, strict=True))
        )


@dataclasses.dataclass
class BlockCandidates:
    """Candidate blocks of a model.

    Attributes:
        enclosing_modules: for each selection, the paths of modules to try, innermost first.
        calls: the first call of each module, by path.
        equal_modules: modules that did not run because an equal one had: path -> path of that module.
        branches: candidates with equal parts that work in parallel, not in sequence.
        structural: modules with expert-like parameters.
        has_attention: whether the model has attention.
        traffic: the bytes that element-wise operations of each module's call read and write.
        objects: arguments of modules that hold tensors, or that are containers which the run wrote to, by id.
    """

    enclosing_modules: list[list[str]]
    calls: dict[str, SurveyedCall]
    equal_modules: dict[str, str]
    branches: set[str]
    structural: set[str]
    has_attention: bool
    traffic: dict[str, float] = dataclasses.field(default_factory=dict)
    objects: dict[int, Any] = dataclasses.field(default_factory=dict)

    def skip_calls(self, call: SurveyedCall, all_objects: bool = False) -> SkipPlan | None:
        """Return a call with stand-ins for the objects that it passes to submodules; None if it passes none.

        Args:
            all_objects: replace all objects, not only those in `objects`.
        """
        if not self.objects and not all_objects:
            return None
        equal = self.equal_modules.get(call.name)  # the equal module that ran instead
        run = call if equal is None else self.calls[equal]
        return plan_skipped_calls(run.args, run.kwargs, None if all_objects else self.objects, run.inner)


def _describe_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.dtype)
    return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__


class _FailedCall(NamedTuple):
    """A call of a module that raised. `key`: see `OpaqueModules.results`."""

    key: tuple
    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]


class OpaqueModules:
    """Modules that run on real tensors only, such as linear layers in four bits.

    Attributes:
        results: their results as meta tensors, by the module's signature and the shapes of its arguments.
        failed: the innermost call that raised in the last run.
    """

    def __init__(self) -> None:
        self.results: dict[tuple, Any] = {}
        self.failed: _FailedCall | None = None

    def run_failed(self) -> bool:
        """Run the failed module on real tensors. Return whether this gave results that were missing."""
        failed = self.failed
        if failed is None or failed.key in self.results or len(self.results) == _MAX_OPAQUE:
            return False
        try:
            self.results[failed.key] = run_for_layouts(failed.module, failed.args, failed.kwargs)
        except Exception:  # an error of the user's code, which the caller has already
            return False
        return True


def search_blocks(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> BlockCandidates:
    """Run `model` on abstract floats, and return its candidate blocks.

    A module that does not run on abstract floats runs on random numbers of the same shapes, and the model again.

    Raises:
        Exception: an error of the model.
    """
    opaque = OpaqueModules()
    while True:
        try:
            return _SearchRun(model, opaque, reuses_results=True).run(args, kwargs)
        except Exception as error:
            if is_internal_error(error):
                raise
        try:  # the parent may read something that an equal module leaves when it runs
            return _SearchRun(model, opaque, reuses_results=False).run(args, kwargs)
        except Exception:
            if not opaque.run_failed():
                raise


class _SearchRun:
    """One abstract run of a model, and its `CaptureObserver`.

    Args:
        reuses_results: run equal modules with equal arguments once.
    """

    def __init__(self, model: nn.Module, opaque: OpaqueModules, reuses_results: bool):
        self.model, self.opaque, self.reuses_results = model, opaque, reuses_results
        opaque.failed = None
        self.paths = {id(m): n for n, m in model.named_modules()}
        self.signatures = {id(m): compute_signature(m) for m in model.modules()}
        self.calls: dict[str, SurveyedCall] = {}
        self.equal_modules: dict[str, str] = {}
        self.objects: dict[int, Any] = {}
        self._first: dict[tuple, tuple[str, Any]] = {}  # path and result of the first module with a key
        self._running: list[SurveyedCall] = []  # outermost first
        self._selections: list[tuple[str, int]] = []  # path of the module, index of the first node
        self._passed: dict[int, tuple[Any, Any]] = {}  # arguments that are objects, with the first items of containers
        self._changes: dict[str, CallChanges] = {}  # of modules that ran

    def run(self, args: tuple, kwargs: dict[str, Any]) -> BlockCandidates:
        routing = Routing("diverse", 0)
        nodes = capture_block(self.model, _make_abstract(args), _make_abstract(kwargs), routing, observer=self).nodes
        signatures = {n: self.signatures[id(m)] for n, m in self.model.named_modules()}
        selecting = dict.fromkeys(name for name, position in self._selections if _is_index_used(nodes, position))
        enclosing = [_list_enclosing(name, signatures, self.calls) for name in selecting]
        covered_names = {name for modules in enclosing for name in modules}
        branches = set[str]()
        structural = find_expert_like(self.model)
        makers = {node: name for name in self.equal_modules for node in self.calls[name].outputs}
        structural |= {name: [] for name in find_named_experts(nodes, makers, structural.keys() | covered_names)}
        for name, parts in structural.items():
            if name in self.calls and name not in covered_names:
                enclosing.append(_list_enclosing(name, signatures, self.calls))
                if _are_parallel([self.calls[p] for p in parts if p in self.calls]):
                    branches.add(name)
        return BlockCandidates(
            enclosing_modules=[modules for modules in enclosing if modules],
            calls=self.calls,
            equal_modules=self.equal_modules,
            branches=branches,
            structural=set(structural),
            has_attention=has_attention(nodes),
            traffic=count_traffic(nodes, {name: call.positions for name, call in self.calls.items()}),
            objects=self.objects,
        )

    def wrap_call(self, tracer: Tracer, original: Callable) -> Callable:
        """Return a call of a module that notes it, and returns known results without a run."""

        def run_or_reuse(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            name = self.paths.get(id(module))
            if name is None or tracer.whole_op_depth or not tracer.is_own_thread():
                return original(module, *args, **kwargs)
            self._note_objects(args, kwargs)
            if name == "":
                call = self.calls.setdefault("", SurveyedCall("", args, kwargs))
                out = self._run_inside(tracer, call, original, module, args, kwargs)
                call.outputs = _find_nodes(tracer, out)
                return out
            leaves = [_describe_argument(x) for x in pytree.tree_leaves((args, kwargs))]
            key = (self.signatures[id(module)], tuple(leaves))
            call = SurveyedCall(name, args, kwargs, _find_nodes(tracer, (args, kwargs)))
            self.calls.setdefault(name, call)
            equal, known_result = self._first.get(key, (name, None))
            if self.reuses_results and equal != name and any(True for _ in module.children()):
                out = _make_fresh(tracer, known_result, call.inputs)
                if out is not None:
                    self.equal_modules[name] = equal
                    self._log_results(tracer, call, out, self._changes.get(equal, CallChanges()))
                    return out
            if key in self.opaque.results:
                out = _make_fresh(tracer, self.opaque.results[key], call.inputs)
                self._log_results(tracer, call, out, CallChanges(missed=UNKNOWN_WRITES))
                return out
            has_objects = any(True for _ in iterate_objects(args, kwargs))
            before = StateSnapshot(tracer, self.model, module, args, kwargs) if has_objects else None
            try:
                out = self._run_inside(tracer, call, original, module, args, kwargs)
            except Exception:
                self.opaque.failed = self.opaque.failed or _FailedCall(key, module, args, kwargs)
                raise
            if before is not None:
                self._changes[name] = before.find_changes(out)
            self._log_results(tracer, call, out, self._changes.get(name, CallChanges()))
            self._first.setdefault(key, (name, out))
            return out

        return run_or_reuse

    def _note_objects(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the objects among the arguments of a call, and the items of containers before their first call."""
        for argument in iterate_objects(args, kwargs):
            items = copy_items(argument) if find_base_type(argument) is not None else None
            self._passed.setdefault(id(argument), (argument, items))

    def _run_inside(
        self, tracer: Tracer, call: SurveyedCall, original: Callable, module: nn.Module, args: tuple, kwargs: Any
    ) -> Any:
        """Run a module, with its call on the stack of running ones."""
        self._running.append(call)
        first = len(tracer.nodes)
        try:
            out = original(module, *args, **kwargs)
        finally:
            self._running.pop()
        call.positions = range(first, len(tracer.nodes))
        for inner in call.inner:
            inner.log_overwritten(tracer)
        return out

    def _log_results(self, tracer: Tracer, call: SurveyedCall, out: Any, changes: CallChanges) -> None:
        """Log the results of a call. If it got objects, add it to the inner calls of the running modules."""
        call.outputs = _find_nodes(tracer, out)
        passed_objects = list(iterate_objects(call.args, call.kwargs))
        # compare now, as the capture restores its writes
        self.objects.update(
            {id(argument): argument for argument in passed_objects if _is_written(*self._passed[id(argument)])}
        )
        if passed_objects:
            for outer in self._running:
                name = call.name.removeprefix(f"{outer.name}." if outer.name else "")
                outer.inner.append(InnerCall(tracer, name, call.args, call.kwargs, out, changes))

    def log_op(self, func: Any, args: tuple, position: int) -> None:
        """Log an op that selects, and the module that runs it."""
        if not self._running or func.overloadpacket.__name__ not in SELECTION_OPS:
            return
        if isinstance(args[0], FakeTensor) and args[0].dim():
            self._selections.append((self._running[-1].name, position))


def _is_written(argument: Any, before: Any) -> bool:
    """Return whether a container has changed, or an object holds tensors, which a module may have written to."""
    if before is not None and not have_same_items(copy_items(argument), before):
        return True
    return type(argument) not in (list, dict) and any(True for _ in iterate_tensors(argument))


def _make_abstract(tree: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().to("meta") if is_float(t) else t.detach().cpu(), tree
    )


def _find_nodes(tracer: Tracer, tree: Any) -> list[fx.Node]:
    """Return the nodes of all tensors in arguments or results. Look into dataclasses, too."""
    nodes: list[fx.Node] = []

    def add_node(tensor: torch.Tensor) -> torch.Tensor:
        nodes.append(tracer.node_of(tensor))
        return tensor

    with suspend_modes(), torch.DisableTorchFunction():
        open_dataclasses(tree, add_node)
    return nodes


def _are_parallel(calls: list[SurveyedCall]) -> bool:
    """Return whether the second of some calls does not use the result of the first."""
    if len(calls) < 2:
        return False
    ancestors, stack = set[fx.Node](), list(calls[1].inputs)
    while stack:
        node = stack.pop()
        if node not in ancestors:
            ancestors.add(node)
            stack += [*node.all_input_nodes, *node.meta.get("again", ())]  # of a reused result: see `_make_fresh`
    return ancestors.isdisjoint(calls[0].outputs)


def _make_fresh(tracer: Tracer, out: Any, inputs: list[fx.Node]) -> Any:
    """Return new abstract tensors in the layout of an earlier result; None if the result has other objects."""
    leaves = pytree.tree_leaves(out)
    is_abstract = [isinstance(x, FakeTensor) or not has_values(x) for x in leaves if isinstance(x, torch.Tensor)]
    plain = [x for x in leaves if not isinstance(x, torch.Tensor)]
    if not is_abstract or not all(is_abstract) or not all(isinstance(x, (int, float, type(None))) for x in plain):
        return None
    source = find_user_source()

    def fresh(t: torch.Tensor) -> torch.Tensor:
        placeholder = tracer.graph.placeholder(f"again{len(tracer.nodes)}")
        placeholder.meta.update(index=len(tracer.nodes), source=source, grad=True, from_integers=False, again=inputs)
        tracer.nodes.append(placeholder)
        with suspend_modes(), torch.DisableTorchFunction():
            fake = tracer.to_fake(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"))
        placeholder.meta["val"] = fake
        tracer.track(fake, placeholder)
        return fake

    with torch.DisableTorchFunction():
        return pytree.tree_map_only(torch.Tensor, fresh, out)


def _is_index_used(nodes: list[fx.Node], position: int) -> bool:
    """Return whether the indices of a selection are used. A softmax, for example, uses only the values of a `max`."""
    selection = next((n for n in nodes[position : position + 4] if n.op == "call_function"), None)
    if selection is None:
        return True
    parts = [u for u in selection.users if u.target is operator.getitem]
    return not parts or any(u.args[1] == 1 and u.users for u in parts)


def _list_enclosing(name: str, signatures: dict[str, tuple], calls: dict[str, SurveyedCall]) -> list[str]:
    """Return a module and its called parents, up to a parent that contains several modules equal to it."""
    signature, enclosing = signatures[name], []
    while True:
        inside = f"{name}." if name else ""
        if enclosing and sum(1 for n, s in signatures.items() if s == signature and n.startswith(inside)) > 1:
            return enclosing
        if name in calls:
            enclosing.append(name)
        if not name or len(enclosing) == _MAX_ENCLOSING:
            return enclosing
        name = name.rpartition(".")[0]
