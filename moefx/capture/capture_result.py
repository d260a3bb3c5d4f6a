"""What a capture is: the graph of one run of a block, with what the run read, called and changed."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import fx
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode

from .code_locations import Source
from .symbolic_sizes import SizeLog

# Element by element a comparison comes out either way, an integer as it was or one more; choices are those among
# numbers of no meaning.
FORCE_MIXED = "mixed"
# What follows from integers alone, and looked like a constant: a number as it was, one more, or zero; another one of
# those to choose from; a truth either way.
FORCE_SPREAD = "spread"

aten = torch.ops.aten

# These look at the shape of their argument, never at its values.
SHAPE_ONLY = {
    getattr(aten, name).default
    for name in (
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty",
        "new_empty_strided",
    )
}


CONTRACTIONS = {F.linear, torch.einsum, torch.matmul, F.scaled_dot_product_attention} | {
    getattr(aten, name).default
    for name in (
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "mv",
        "dot",
        "_grouped_mm",
        "addbmm",
        "addmv",
    )
    if hasattr(aten, name)
}


def is_float(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def has_values(t: torch.Tensor) -> bool:
    """Whether its elements are known: not on the meta device, nor of a fake mode, as all that a module holds is while
    `torch.export` calls it."""
    return not (t.is_meta or isinstance(t, FakeTensor))


def suspend_modes() -> contextlib.AbstractContextManager[Any]:
    """Run ops without any dispatch mode. torch's own context costs as much as an op, also if there is no mode."""
    count = torch._C._len_torch_dispatch_stack()
    if _len_torch_dispatch_stack_pre_dispatch() or count > 1:
        return _disable_current_modes()
    return _BelowOneMode() if count else _NOTHING


class _BelowOneMode:
    def __enter__(self) -> None:
        self.mode: Any = _pop_mode()

    def __exit__(self, *_: Any) -> None:
        _push_mode(self.mode)


_NOTHING = contextlib.nullcontext()


_LITERALS = frozenset([type(None), bool, int, float, str, torch.dtype, torch.device])


def map_tensors(tree: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """`tree_map_only(Tensor)` for the plain containers that op arguments are made of; several times faster."""
    kind = type(tree)
    if kind in _LITERALS:
        return tree
    if kind is tuple or kind is list:
        return kind([map_tensors(x, fn) for x in tree])
    if isinstance(tree, torch.Tensor):
        return fn(tree)
    if kind is dict:
        return {k: map_tensors(v, fn) for k, v in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # past a constructor that looks at its arguments
        return tuple.__new__(type(tree), [map_tensors(x, fn) for x in tree])
    if isinstance(tree, (tuple, list, dict)):
        return pytree.tree_map_only(torch.Tensor, fn, tree)
    return tree


def collect_tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(tree, found.append)
    return found


@dataclasses.dataclass
class SubmoduleCall:
    """One call of a submodule of the block: which nodes went in, came out, and ran inside."""

    fqn: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    start: int
    stop: int
    depth: int
    autocast: torch.dtype | None = None


@dataclasses.dataclass
class Effect:
    """What the block changed besides returning a value.

    Attributes:
        kind: "buffer", "input", "attribute" (set to a tensor, or to a container of tensors), "state" (set to anything
            else), "record" (something that is not the block's) or "draw" (numbers of a generator of Python's).
        node: the new value; of an attribute that is a container, that container with nodes for its tensors.
    """

    kind: str
    target: Any
    node: Any


def find_float_decisions(node: fx.Node) -> list[fx.Node]:
    """What in the program turned abstract floats into the integers or the boolean of a node: a cast, or a choice among
    them; of a boolean the comparisons that it is made of."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or is_float(val) or node.op != "call_function":
        return []
    if val.dtype is torch.bool:
        return _comparisons(node)
    made_by = node.args[0] if node.target is operator.getitem else node
    assert isinstance(made_by, fx.Node)
    return [made_by] if any(is_abstract(a) for a in made_by.all_input_nodes) else []


def is_nan_check(node: fx.Node) -> bool:
    """Whether a boolean tells only whether floats are finite, which says nothing of experts."""
    made_of = find_float_decisions(node)
    return bool(made_of) and all(getattr(n.target, "__name__", "").partition(".")[0] in _NAN_CHECKS for n in made_of)


def is_abstract(node: fx.Node) -> bool:
    """Whether a value is a float that no routing determines."""
    return isinstance(node.meta.get("val"), FakeTensor) and not node.meta.get("known")


def fold_ancestors(
    node: fx.Node,
    name: str,
    of: Callable[[fx.Node, list[Any]], Any],
    inputs_of: Callable[[fx.Node], list[fx.Node]] = lambda n: n.all_input_nodes,
) -> Any:
    """What `of` says of a node. It is asked of each node that this one follows from, once, with what it said of the
    node's inputs; `meta` keeps that under `name`."""
    stack = [node]
    while stack:
        n = stack[-1]
        if name not in n.meta:
            inputs = inputs_of(n)
            if waiting := [a for a in inputs if name not in a.meta]:
                stack += waiting
                continue
            n.meta[name] = of(n, [a.meta[name] for a in inputs])
        stack.pop()
    return node.meta[name]


def hash_computation(target: Any, args: Any, kwargs: Any) -> int:
    """A number for what an op computes: the same where the same is computed of the same again."""

    def of(n: fx.Node, _: list[Any]) -> int:
        is_input = n.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        return hash(n.name) if is_input else _question(n.target, n.args, n.kwargs)

    for n in pytree.tree_leaves((args, kwargs)):
        if isinstance(n, fx.Node):
            fold_ancestors(n, "question", of)
    return _question(target, args, kwargs)


def _question(target: Any, args: Any, kwargs: Any) -> int:
    return hash((str(target), repr(map_arg((args, kwargs), lambda n: n.meta["question"]))))  # type: ignore[arg-type]


def _comparisons(node: fx.Node) -> list[fx.Node]:
    """The comparisons that a boolean is made of, if these are of abstract floats (a threshold, a check for NaN) or of
    what was counted of such, not of what was chosen by them."""
    stack, seen, found, floats = [node], set(), [], False
    of_floats = any(map(is_abstract, node.all_input_nodes))
    while stack:
        n = stack.pop()
        if n in seen or n.target in SHAPE_ONLY:
            continue
        seen.add(n)
        name = getattr(n.target, "__name__", "").partition(".")[0]
        if name in CHOICES:
            return [node] if of_floats else []
        if name in COMPARISONS:
            found.append(n)
        for a in n.all_input_nodes:
            if is_abstract(a):
                floats = True
            else:
                stack.append(a)
    return found if floats else []


_NAN_CHECKS = {"isnan", "isinf", "isfinite", "isneginf", "isposinf"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "signbit", *_NAN_CHECKS}
# Of these the truth of a float is that it is not 0.
TRUTHS = {"logical_not", "logical_and", "logical_or", "logical_xor", "any", "all", "nonzero", "count_nonzero"}
CHOICES = {
    "topk", "max", "min", "argmax", "argmin", "sort", "argsort", "kthvalue", "multinomial", "nonzero", "scatter",
    "_unique2", "unique_dim", "unique_consecutive", "median", "nanmedian", "mode", "cummax", "cummin", "aminmax",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class HostRead:
    """A boolean or a float that Python read from a tensor: a branch may hang on it, which capture followed one way.
    `calls`: where, and from where that was called, the innermost first. `of`: what a number was computed from, if it is
    not `node` itself."""

    call_stack: tuple[Source, ...]
    value: bool | float | str
    node: fx.Node | None  # None: the length of something
    comparison: tuple[str, Any] | None = None  # the comparison, where `node` is a number
    origins: frozenset[fx.Node] = frozenset()

    @property
    def source(self) -> Source:
        return self.call_stack[0] if self.call_stack else Source("?", 0, 0)


@dataclasses.dataclass(frozen=True)
class LimitedOutcome:
    """Force a boolean that Python reads a limited number of times. A loop such as `while places < n: places *= 2` would
    otherwise never end.

    Attributes:
        value: the forced outcome.
        times: number of reads to force.
        others: force only comparisons with these numbers; empty: all comparisons.
    """

    value: bool
    num_reads: int
    compared_with: frozenset[int | float] = frozenset()


@dataclasses.dataclass
class Capture:
    """A captured block. `graph` is functional; every node's `meta` has

    `val` (a fake float or a real integer tensor), `known` (depends on routing integers and constants only), `grad`
    (grad mode), `autocast` (its dtype, None where off), `source`, `index` (position in program order).
    """

    graph: fx.Graph
    out: Any
    calls: list[SubmoduleCall]
    effects: list[Effect]
    reads: list[HostRead]
    sizes: SizeLog
    nodes: list[fx.Node]
    constants: dict[str, torch.Tensor]
    tracer: Any  # what ran it: see `tracer`
    modes_read: set[str]
    computed: dict[Any, Any] = dataclasses.field(default_factory=dict)  # what was computed of it, by name

    def concrete_value(self, node: fx.Node) -> torch.Tensor:
        return self.tracer.shadow(node)

    def compute_once(self, name: Any, compute: Callable[[], Any]) -> Any:
        """Compute something about this capture the first time that it is asked for under this name."""
        if name not in self.computed:
            self.computed[name] = compute()
        return self.computed[name]
