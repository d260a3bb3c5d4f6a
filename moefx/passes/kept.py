"""Re-emit what stays the user's own: router, shared experts, auxiliary losses, buffer updates.

The captures are walked side by side. Where they differ, they differ in a size, which becomes an expression over the
sizes of the inputs; anything else that differs was baked in by one routing and is refused. A submodule whose call lies
wholly outside of the experts is emitted as a call of that module, so its hooks fire and whatever is in it stays in
force.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.concolic import Call
from ..capture.inputs import Leaf
from ..errors import Refused
from ..ir.codegen import FUNCTIONS
from .capacity import Formula, find_formula
from .match.prove import Match

aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded


_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Div: operator.truediv, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
Spot = tuple  # (twins, "args" or "kwargs", index, ...): where a number stands in a node


def _step(spot: Spot | None, key: Any) -> Spot | None:
    return None if spot is None else (*spot, key)


class Twins(tuple):
    """The same node in every capture."""

    @property
    def first(self) -> fx.Node:
        return self[0]

    def __hash__(self) -> int:
        return hash(self[0])


class KeptGraph:
    """The graph under construction, and the way from captured nodes to its nodes.

    `cut` is filled in by the rewrite: `make_cut()` is called when the walk gets to the node where the routed paths
    meet.
    """

    def __init__(self, match: Match, make_cut: Callable[[], fx.Node]):
        self.match = match
        self.captures = [lifted.capture for lifted in match.lifted]
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}  # by node of the first capture
        self.make_cut = make_cut
        self.cut = Twins(lifted.cut for lifted in match.lifted)
        self.absorbed = match.lifted[0].absorbed
        self.fake_mode = self.captures[0].tracer.fake_mode
        self._sizes: dict[Any, fx.Node] = {}
        self.inputs: dict[int, fx.Node] = {}
        self.inlined: set[int] = (
            set()
        )  # starts of calls whose insides are needed, so that they cannot stay calls
        self.repeated: list[str] = []  # modules that are called, and of which values are computed again
        self._choose_calls()
        self.twins: dict[fx.Node, Twins] = {}
        self.device: fx.Node | None = None
        self.paths: list[int] = []

    def _choose_calls(self) -> None:
        self.calls = _kept_calls(self.match, self.inlined)
        self.call_of = {
            n: call
            for call in self.calls
            for n in _leaf_nodes(call[0].out)
            if n.meta["index"] >= call[0].start
        }

    # ------------------------------------------------------------------ inputs
    def add_inputs(self, names: Sequence[str]) -> None:
        """Placeholders for all tensor arguments of the block, in order."""
        for position, name in enumerate(names):
            node = self.graph.placeholder(name)
            self.inputs[position] = node
            twins = Twins(
                next(n for n in c.nodes if n.op == "placeholder" and n.meta["position"] == position)
                for c in self.captures
            )
            node.meta.update(self.describe(twins))
            self.made[twins.first] = node

    # ------------------------------------------------------------------ walking
    def plan(self, roots: Sequence[Twins]) -> list[Any]:
        """What must be emitted for these nodes, in program order: `Twins`, and kept calls as units."""
        while True:
            self.twins = {}
            plan = self._plan(roots)
            inside = [
                c for c in self.calls if any(_within(p, c) and p.first not in self.call_of for p in plan)
            ]
            # Values from inside a call are computed a second time beside it; a call that draws random numbers is taken
            # apart instead, so that they are drawn once.
            apart = [
                c for c in inside if any(is_random(n) for n in self.captures[0].nodes[c[0].start : c[0].stop])
            ]
            self.repeated = sorted({c[0].fqn for c in inside})
            if not apart:
                return plan
            self.inlined |= {c[0].start for c in apart}
            self._choose_calls()

    def inside_call(self, n: fx.Node) -> list[Call] | None:
        """The kept call that a node was computed in."""
        return next((c for c in self.calls if c[0].start <= n.meta["index"] < c[0].stop), None)

    def _plan(self, roots: Sequence[Twins]) -> list[Any]:
        needed: dict[int, Any] = {}
        stack: list[Twins] = list(roots)
        seen: set[fx.Node] = set()
        while stack:
            twins = stack.pop()
            n = twins.first
            if n in seen:
                if tuple(self.twins[n]) != tuple(twins):
                    raise _depends(
                        n, next(b for a, b in zip(self.twins[n], twins, strict=True) if a is not b)
                    )
                continue
            seen.add(n)
            self.twins[n] = twins
            if n.op == "placeholder":
                if any(t.op != "placeholder" or t.meta["position"] != n.meta["position"] for t in twins):
                    raise _depends(
                        n,
                        next(
                            t
                            for t in twins
                            if t.op != "placeholder" or t.meta["position"] != n.meta["position"]
                        ),
                    )
                continue
            call = self.call_of.get(n)
            if call is not None:
                self._same_result(twins, call)
                if id(call) not in {id(v) for v in needed.values() if isinstance(v, list)}:
                    needed[call[0].start * 2 - 1] = call
                    stack += self._pair_trees([(c.args, c.kwargs) for c in call])
                continue
            if any(t is c for t, c in zip(twins, self.cut, strict=True)):
                if tuple(twins) != tuple(self.cut):
                    raise _depends(n, next(t for t, c in zip(twins, self.cut, strict=True) if t is not c))
                needed[n.meta["index"] * 2] = twins
                continue
            if n in self.absorbed and n.op != "get_attr":
                raise Refused(
                    "a value from inside the experts is used outside of the routed sum",
                    culprits=(_label(n),),
                    source=str(n.meta["source"]),
                )
            needed[n.meta["index"] * 2] = twins
            stack += self._pair_arguments(twins)
        return [needed[i] for i in sorted(needed)]

    def _same_result(self, twins: Twins, call: list[Call]) -> None:
        """The nodes are one and the same result of the same call in every capture."""
        columns = zip(*[_leaf_nodes(c.out) for c in call], strict=True)
        if tuple(twins) not in {tuple(column) for column in columns}:
            raise _depends(twins[0], next(t for t in twins[1:] if t is not twins[0]))

    def _pair_arguments(self, twins: Twins) -> list[Twins]:
        first = twins.first
        for other in twins[1:]:
            if other.op != first.op or (first.op == "call_function" and _kind(other) != _kind(first)):
                raise _depends(first, other)
        return self._pair_trees([(n.args, n.kwargs) for n in twins])

    def _pair_trees(self, trees: list[Any]) -> list[Twins]:
        flats = [[a for a in pytree.tree_leaves(t) if isinstance(a, fx.Node)] for t in trees]
        if len({len(f) for f in flats}) != 1:
            raise Refused(
                "what runs outside of the experts depends on the routing (a different number of arguments)"
            )
        return [Twins(column) for column in zip(*flats, strict=True)]

    # ------------------------------------------------------------------ emitting
    def emit(self, plan: list[Any]) -> None:
        for item in plan:
            if isinstance(item, list):
                self._emit_call(item)
            elif item.first is self.cut.first:
                self.made[item.first] = self.make_cut()
            elif item.first not in self.made:
                self.made[item.first] = self._emit_node(item)

    def node(self, n: fx.Node) -> fx.Node:
        return self.made[n]

    def _emit_node(self, twins: Twins) -> fx.Node:
        n = twins.first
        if n.op == "get_attr":
            if len({t.meta["fqn"] for t in twins}) != 1:
                raise Refused(
                    "different parameters are used under different routings",
                    culprits=tuple(t.meta["fqn"] for t in twins),
                )
            if n.meta["kind"] == "constant":
                return self._literal(twins)
            out = self.graph.get_attr(n.meta["fqn"])
            out.meta.update(self.describe(twins))
            return out
        where = str(n.meta["source"])
        if "sparse" in _label(n):
            raise Refused("sparse tensors are not followed", culprits=(_label(n),), source=where)
        args = self.zip_value([t.args for t in twins], where, (twins, "args"))
        kwargs = self.zip_value([dict(t.kwargs) for t in twins], where, (twins, "kwargs"))
        kwargs.pop("pin_memory", None)
        kwargs.pop("layout", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = self.input_device()
        if "device" in kwargs and kwargs["device"] is None:
            kwargs.pop("device")
        if not n.all_input_nodes and "device" not in kwargs and _makes_tensor(n):
            kwargs["device"] = self.input_device()
        target = n.target if len({str(t.target) for t in twins}) == 1 else aten.reshape.default
        out = self.call(target, args, kwargs, self.describe(twins))
        val = n.meta.get("val")
        if not n.meta["grad"] and isinstance(val, FakeTensor) and n.all_input_nodes:
            out = self.call(aten.detach.default, (out,), {}, self.describe(twins))
        return out

    def _literal(self, twins: Twins) -> fx.Node:
        values = [c.constants[t.meta["fqn"]] for c, t in zip(self.captures, twins, strict=True)]
        value = values[0]
        if (
            value.is_meta
            or value.numel() > 4096
            or any(v.shape != value.shape or not torch.equal(v, value) for v in values[1:])
        ):
            raise Refused(
                "a tensor that is neither a parameter, a buffer nor an attribute of the block depends on the routing "
                "or is too large",
                source=str(twins.first.meta["source"]),
                remedy="register it as a buffer",
            )
        meta = self.describe(twins)
        return self.call(
            torch.tensor, (value.tolist(),), {"dtype": value.dtype, "device": self.input_device()}, meta
        )

    def _emit_call(self, call: list[Call]) -> None:
        first = call[0]
        where = f"module {first.fqn}"
        args = self.zip_value([c.args for c in call], where)
        kwargs = self.zip_value([c.kwargs for c in call], where)
        node = self.graph.call_module(first.fqn, tuple(args), kwargs)
        leaves = [_leaf_nodes(c.out) for c in call]
        if isinstance(first.out, fx.Node):
            twins = Twins(column[0] for column in leaves)
            node.meta.update(self.describe(twins))
            self._bind_call(twins, node)
            return
        node.meta["source"] = ""
        for path, leaf in _paths(first.out):
            twins = Twins(_follow(c.out, path) for c in call)
            if leaf not in self.call_of or self.call_of[leaf] is not call:
                continue
            part = node
            for key in path:
                if isinstance(key, str) and key.startswith("."):
                    part = self.call(getattr, (part, key[1:]), {}, {})
                else:
                    part = self.call(operator.getitem, (part, key), {}, {})
            part.meta.update(self.describe(twins))
            self._bind_call(twins, part)

    def _bind_call(self, twins: Twins, node: fx.Node) -> None:
        if not twins.first.meta["grad"] and isinstance(twins.first.meta.get("val"), FakeTensor):
            node = self.call(aten.detach.default, (node,), {}, dict(node.meta))
        self.made[twins.first] = node

    def call(self, target: Any, args: tuple, kwargs: dict[str, Any], meta: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta.update(meta)
        return node

    def input_device(self) -> fx.Node:
        if self.device is None:
            source = next(iter(self.inputs.values()))
            self.device = self.call(getattr, (source, "device"), {}, {})
        return self.device

    # ------------------------------------------------------------------ values that may differ
    def zip_value(self, values: Sequence[Any], where: str, spot: Spot | None = None) -> Any:
        first = values[0]
        if isinstance(first, fx.Node):
            return self.made[first]
        if isinstance(first, (list, tuple)):
            if any(len(v) != len(first) for v in values):
                raise Refused(
                    "what runs outside of the experts depends on the routing (a list of another length)",
                    source=where,
                )
            items = [
                self.zip_value(column, where, _step(spot, i))
                for i, column in enumerate(zip(*values, strict=True))
            ]
            return type(first)(items) if type(first) in (list, tuple) else items
        if isinstance(first, dict):
            return {k: self.zip_value([v[k] for v in values], where, _step(spot, k)) for k in first}
        if isinstance(first, slice):
            return slice(
                *[self.zip_value([getattr(v, a) for v in values], where) for a in ("start", "stop", "step")]
            )
        if isinstance(first, int) and not isinstance(first, bool):
            return self.size([int(v) for v in values], where, spot)
        if any(v is not first and v != first for v in values):
            raise Refused(
                f"a constant depends on the routing: {first!r} and {next(v for v in values if v != first)!r}",
                source=where,
            )
        return float(first) if isinstance(first, float) else first

    def size(self, values: list[int], where: str, spot: Spot | None = None) -> int | fx.Node:
        """An integer that may depend on the input sizes, as a number or as a node that computes it. `spot` is where it
        stands, to be looked up in further captures."""
        if len(set(values)) == 1:
            return values[0]
        if -1 in values:
            return -1  # the shape of a view, inferred at some of the sizes
        key = tuple(values)
        if key not in self._sizes:
            made = self._solve(values, spot)
            if made is None and (formula := self._by_probes(values, spot)) is not None:
                made = self.formula(formula)
            if made is None:
                raise Refused(
                    "a number depends on the routing, or on the sizes in a way that was not understood: "
                    f"{', '.join(map(str, values))} "
                    f"at sizes {', '.join(str(s) for s in self.match.sizes)}",
                    source=where,
                )
            self._sizes[key] = made
        return self._sizes[key]

    def _solve(self, values: list[int], spot: Spot | None) -> fx.Node | None:
        """As a function of the sizes of the inputs, or as the size of something that was computed."""
        found = self._by_dims(values, (_scaled,))
        if found is None and (formula := self._by_expression(values, spot)) is not None:
            found = self.formula(formula)
        return found or self._by_dims(values, (_divided, _affine)) or self._by_result(values)

    def _by_dims(self, values: list[int], laws: Sequence[Callable]) -> fx.Node | None:
        dims = self.match.arguments.dims
        for count in range(1, len(dims) + 1):
            for chosen in itertools.combinations(dims, count):
                products = [math.prod(s[d] for d in chosen) for s in self.match.sizes]
                for law in laws:
                    found = law(products, values)
                    if found is not None:
                        return self._law(chosen, *found)
        return None

    def _by_result(self, values: list[int]) -> fx.Node | None:
        for twins in self.twins.values():  # such as the rows that a mask left
            if twins.first not in self.made:
                continue
            shapes = [getattr(t.meta.get("val"), "shape", ()) for t in twins]
            for axis in range(min(map(len, shapes))):
                if [s[axis] for s in shapes] == values:
                    return self.call(aten.sym_size.int, (self.made[twins.first], axis), {}, {"letters": "n"})
        return None

    def _by_expression(self, values: list[int], spot: Spot | None) -> Formula | None:
        """A formula that the program was seen to compute."""
        if len(set(values)) < 3:
            return None
        points = list(zip(self.match.sizes, values, strict=True))
        return find_formula([*points, *(self._probed(spot) or ())], self.match.expressions, laws=False)

    def _by_probes(self, values: list[int], spot: Spot | None) -> Formula | None:
        """A formula for a number, read off more sizes than the proof needed."""
        more = self._probed(spot)
        if more is None:
            return None
        return find_formula([*zip(self.match.sizes, values, strict=True), *more], self.match.expressions)

    def _probed(self, spot: Spot | None) -> list[tuple[dict[str, int], int]] | None:
        """The number that stands at a place of the program, at more sizes."""
        if spot is None or len({t.meta["index"] for t in spot[0]}) != 1:
            return None
        points = []
        for sizes, capture in self.match.probe():
            index = spot[0].first.meta["index"]
            node = capture.nodes[index] if index < len(capture.nodes) else None
            if node is None or _kind(node) != _kind(spot[0].first):
                return None
            value: Any = getattr(node, spot[1])
            for step in spot[2:]:
                value = value[step]
            points.append((sizes, int(value)))
        return points

    def formula(self, formula: Formula) -> fx.Node:
        """The number that a formula gives, as a node."""
        if formula not in self._sizes:
            self._sizes[formula] = self._expression(ast.parse(formula.text, mode="eval").body)
        return self._sizes[formula]

    def _expression(self, e: ast.expr) -> Any:
        match e:
            case ast.Constant():
                return e.value
            case ast.Name():
                return self.dim(e.id)
            case ast.BinOp():
                return self._arith(_BINARY[type(e.op)], self._expression(e.left), self._expression(e.right))
            case ast.UnaryOp():
                return self._arith(operator.neg, self._expression(e.operand))
            case ast.Call():
                return self._arith(FUNCTIONS[e.func.id], *map(self._expression, e.args))  # type: ignore[attr-defined]
        raise AssertionError(ast.dump(e))

    def _law(self, dims: tuple[str, ...], times: int, over: int, plus: int) -> fx.Node:
        node = self.dim(dims[0])
        for d in dims[1:]:
            node = self._arith(operator.mul, node, self.dim(d))
        if times != 1:
            node = self._arith(operator.mul, node, times)
        if over != 1:
            node = self._arith(operator.floordiv, node, over)
        return self._arith(operator.add, node, plus) if plus else node

    def _arith(self, fn: Any, *args: Any) -> fx.Node:
        return self.call(fn, args, {}, {"letters": ""})

    def dim(self, name: str) -> fx.Node:
        """The size of a token axis, read off an input."""
        key = ("dim", name)
        if key not in self._sizes:
            for position, leaf in enumerate(self.match.arguments.tensors):
                if name in leaf.shape:
                    size = self.call(
                        aten.sym_size.int,
                        (self.inputs[position], leaf.shape.index(name)),
                        {},
                        {"letters": name},
                    )
                    self._sizes[key] = size
                    break
        return self._sizes[key]

    # ------------------------------------------------------------------ shapes in letters
    def describe(self, twins: Twins) -> dict[str, Any]:
        n = twins.first
        val = n.meta.get("val")
        meta: dict[str, Any] = {"source": str(n.meta["source"])} if n.op == "call_function" else {}
        if isinstance(val, torch.Tensor):
            meta["val"] = self.fake(val)
            shapes = [tuple(t.meta["val"].shape) for t in twins]
            if len({len(s) for s in shapes}) == 1:
                meta["letters"] = tuple(self.letter(list(column)) for column in zip(*shapes, strict=True))
        return meta

    def letter(self, sizes: list[int]) -> str:
        match = self.match
        if len(set(sizes)) > 1:
            tokens = [math.prod(lifted.tokens) for lifted in match.lifted]
            if sizes == tokens:
                return "S"
            if sizes == [t * match.slots for t in tokens]:
                return "S*K"
            for name in match.arguments.dims:
                if sizes == [s[name] for s in match.sizes]:
                    return {"B": "N", "S": "T"}.get(name, name)  # B and S are rows and tokens in the dialect
            return "n"
        named = (
            {match.slots: "K", match.num_experts: "E", match.arguments.width: "D"}
            if match.slots > 1
            else {match.num_experts: "E", match.arguments.width: "D"}
        )
        return named.get(sizes[0], str(sizes[0]))

    def fake(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value
        with self.fake_mode:
            return torch.empty(value.shape, dtype=value.dtype)


# ---------------------------------------------------------------------- sizes as functions of sizes
def _scaled(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    k, rest = divmod(values[0], base[0])
    return (
        (k, 1, 0) if rest == 0 and k and all(v == k * b for b, v in zip(base, values, strict=True)) else None
    )


def _divided(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    """`times * base // over`, for capacities such as `T * k // E`."""
    if not all(values) or len(set(values)) == 1:
        return None
    for over in range(2, 513):
        low = max(-(-v * over // b) for b, v in zip(base, values, strict=True))
        high = min(((v + 1) * over - 1) // b for b, v in zip(base, values, strict=True))
        for times in range(low, min(high, low) + 1):
            if math.gcd(times, over) == 1 and all(
                times * b // over == v for b, v in zip(base, values, strict=True)
            ):
                return (times, over, 0) if all(times * b % over == 0 for b in base) else None
    return None


def _affine(base: list[int], values: list[int]) -> tuple[int, int, int] | None:
    if len(set(base)) < 2:
        return None
    i = next(j for j, b in enumerate(base) if b != base[0])
    k, rest = divmod(values[i] - values[0], base[i] - base[0])
    plus = values[0] - k * base[0]
    fits = rest == 0 and k != 0 and len(set(base)) > 2 and abs(plus) <= 4
    return (
        (k, 1, plus) if fits and all(v == k * b + plus for b, v in zip(base, values, strict=True)) else None
    )


# ---------------------------------------------------------------------- module calls that stay
def _within(item: Any, call: list[Call]) -> bool:
    return (
        isinstance(item, Twins)
        and item.first.op == "call_function"
        and call[0].start <= item.first.meta["index"] < call[0].stop
    )


def _kept_calls(match: Match, inlined: set[int]) -> list[list[Call]]:
    """Outermost submodule calls with nothing absorbed in them, the same in every capture."""
    per_capture: list[dict[tuple[str, int], Call]] = []
    for lifted in match.lifted:
        routed = sorted(n.meta["index"] for n in lifted.absorbed if n.op != "get_attr")
        counts: dict[str, int] = {}
        found: dict[tuple[str, int], Call] = {}
        for call in sorted(lifted.capture.calls, key=lambda c: (c.start, -c.stop, c.depth)):
            key = (call.fqn, counts.get(call.fqn, 0))
            counts[call.fqn] = key[1] + 1
            if not any(
                call.start <= i < call.stop for i in _between(routed, call.start, call.stop)
            ) and _expressible(call):
                found[key] = call
        per_capture.append(found)
    out: list[list[Call]] = []
    covered = -1
    for key, call in sorted(
        per_capture[0].items(), key=lambda item: (item[1].start, -item[1].stop, item[1].depth)
    ):
        if call.start < covered or call.stop <= call.start or call.start in inlined:
            continue
        twins = [found.get(key) for found in per_capture]
        if all(t is not None for t in twins):
            out.append(twins)  # type: ignore[arg-type]
            covered = call.stop
    return out


def _between(sorted_indices: list[int], low: int, high: int) -> list[int]:
    import bisect

    return sorted_indices[bisect.bisect_left(sorted_indices, low) : bisect.bisect_left(sorted_indices, high)]


def _expressible(call: Call) -> bool:
    """Arguments and results are tensors and plain values in plain containers, and nothing is returned that went in."""
    plain = (fx.Node, int, float, bool, str, type(None), torch.dtype)
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    results = _leaf_nodes(call.out)
    return (
        all(isinstance(a, plain) for a in leaves)
        and bool(results)
        and all(type(k) in (int, str) for path, _ in _paths(call.out) for k in path)
        and all(n.meta["index"] >= call.start for n in results)
    )


def _leaf_nodes(tree: Any) -> list[fx.Node]:
    return [n for n in pytree.tree_leaves(tree) if isinstance(n, fx.Node)]


def _paths(tree: Any) -> list[tuple[tuple[Any, ...], fx.Node]]:
    if isinstance(tree, fx.Node):
        return [((), tree)]
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return [((None,), n) for n in _leaf_nodes(tree)]
    return [((key, *path), leaf) for key, value in items for path, leaf in _paths(value)]


def _follow(tree: Any, path: tuple[Any, ...]) -> fx.Node:
    for key in path:
        tree = tree[key]
    return tree


def _makes_tensor(n: fx.Node) -> bool:
    schema = getattr(n.target, "_schema", None)
    return schema is not None and any(a.name == "device" for a in schema.arguments)


def _label(n: fx.Node) -> str:
    packet = getattr(n.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(n.target, "__name__", str(n.target))


def _depends(here: fx.Node, there: fx.Node) -> Refused:
    return Refused(
        "what runs outside of the experts depends on the routing or the sizes: "
        f"{_label(here)} here, {_label(there)} there",
        source=str(there.meta["source"]),
    )


_VIEWS = {str(op) for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default)}


def _kind(n: fx.Node) -> str:
    """The op; which kind of view a reshape comes out as depends on the strides, and so on the sizes."""
    return "reshape" if str(n.target) in _VIEWS else str(n.target)


def is_random(n: fx.Node) -> bool:
    return _RANDOM in getattr(n.target, "tags", ())


__all__ = ["KeptGraph", "Leaf", "Twins", "is_random"]
