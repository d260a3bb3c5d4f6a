"""Fuse gather, up-projections, pointwise part, down-projection, routing weight and sum into `expert_mlp`.

Any pointwise expression over slices of the up-projections and the routing weight becomes the op's `act`; no list of
activations is involved. Any expression over the down-projection and the weight becomes its `out`. Experts of another
form stay padding-free but unfused, and `explain` shows the reason.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx

from ..ir.ancestors import collect_ancestors
from ..ir.expressions.expert_body import ExpertBody, Gemm
from ..ir.expressions.expression_check import is_pointwise
from ..ir.graphs.block_graph import BlockGraph
from ..ir.node_values import get_argument, get_op_name, read_item
from ..ir.ops.token_routing import PftResult
from .pass_manager import graph_pass

aten = torch.ops.aten
ops = torch.ops.moefx


class _NotFusible(Exception):
    """The experts do not have the form GEMM -> pointwise -> GEMM; the message names the node."""


@dataclasses.dataclass
class _UpProjection:
    gemm: fx.Node
    value: fx.Node  # the GEMM with its bias
    bias: fx.Node | None


@graph_pass(level="fused")
def fuse(block: BlockGraph, plan: Any) -> BlockGraph:
    """Replace `combine(f(grouped_mm(g(grouped_mm(dispatch(x))))))` by one `expert_mlp(x)`."""
    block = block.copy()
    for combine in block.find(ops.combine.default):
        try:
            _Fusion(block.graph, combine).apply()
        except _NotFusible as why:
            combine.meta["unfused"] = str(why)
    _fuse_biases(block.graph)
    return block


def _fuse_biases(graph: fx.Graph) -> None:
    """Add biases of unfused experts inside the product, which rounds once like `linear`."""
    for bias in graph.find_nodes(op="call_function", target=ops.expert_rows.default):
        for add in [user for user in bias.users if user.target is aten.add.Tensor]:
            gemm = next((a for a in add.all_input_nodes if a.target is ops.grouped_mm.default), None)
            if gemm is None or len(gemm.users) > 1 or get_argument(gemm, "summand") is not None or add.kwargs:
                continue
            if len({_get_dtype(n) for n in (bias, add, gemm)}) > 1 or _get_shape(add) != _get_shape(gemm):
                continue
            with graph.inserting_before(add):
                product = graph.call_function(gemm.target, (*gemm.args, bias), gemm.kwargs)
            product.meta = {**gemm.meta, **{k: add.meta[k] for k in ("val", "letters") if k in add.meta}}
            add.replace_all_uses_with(product)
            graph.erase_node(add)
            graph.erase_node(gemm)


class _Fusion:
    """Fuses the experts before one `combine`: collects their steps into an `ExpertBody` and replaces them."""

    def __init__(self, graph: fx.Graph, combine: fx.Node):
        self.graph, self.combine = graph, combine
        self.rows: fx.Node = get_argument(combine, "rows")
        pft, _ = read_item(get_argument(combine, "expert_offsets"))
        self.weights = {n for n in pft.users if read_item(n)[1] == PftResult.COMBINE_WEIGHTS}
        self.up_projections: list[_UpProjection] = []
        self.parts: list[tuple[int, int | None, int | None, int]] = []
        self.scale: Any = None  # factor of the experts' input, an expression of the routing weight

    def apply(self) -> None:
        down, down_bias = self._find_gemm_below(self.rows)
        biased_down = self._get_biased_product(down, down_bias)
        out = self._build_expression(self.rows, {biased_down: "y"})
        act = self._build_expression(get_argument(down, "rows"), {}, parts=True)
        if not self.up_projections:
            raise _NotFusible("no up-projection before the last matrix product")
        if len(dtypes := {_get_dtype(gemm) for gemm in (*(u.gemm for u in self.up_projections), down)}) > 1:
            raise _NotFusible(f"the matrix products are in {' and '.join(sorted(map(str, dtypes)))}")
        x = self._find_input()
        if self.scale is not None:
            if any(up.bias is not None for up in self.up_projections):
                raise _NotFusible("the routing weight scales the input of a biased product")
            act = _scale_up_projections(act, self.scale)
        body = ExpertBody(
            up=tuple(self._build_gemm(u.gemm, u.bias) for u in self.up_projections),
            parts=tuple(self.parts),
            act=act,
            down=self._build_gemm(down, down_bias),
            out=out,
        )
        w = next(iter(self.weights), None) if body.uses_row_weight else None
        biases = [b for u in self.up_projections if u.bias is not None for b in self._match_layout(u.gemm, u.bias)]
        up = [t for u in self.up_projections for t in get_argument(u.gemm, "w")]
        down_biases = self._match_layout(down, down_bias) if down_bias is not None else []
        parameters, dtype = _remove_casts([up, biases, [*get_argument(down, "w")], down_biases], _get_dtype(down))
        layout = (get_argument(self.combine, name) for name in ("token_ids", "expert_offsets", "inverse"))
        # If only sums leave the experts, no provider needs a buffer of all rows.
        reduce = get_argument(self.combine, "combine_weights") is None and set(self.rows.users) == {self.combine}
        result = self.combine if reduce else self.rows
        with self.graph.inserting_before(self.combine):
            mlp = self.graph.call_function(
                ops.expert_mlp.default,
                (x, *layout, w, *parameters),
                {"body": body.to_json(), "keep": "h", **({"reduce": True} if reduce else {}), **dtype},
            )
            first = self.graph.call_function(operator.getitem, (mlp, 0))
        mlp.meta["source"] = down.meta.get("source", "")
        for meta in ("val", "letters"):
            if meta in result.meta:
                first.meta[meta] = result.meta[meta]
        result.replace_all_uses_with(first)
        _erase_unused(result)

    # ------------------------------------------------------------------ reading the graph
    def _find_gemm_below(self, node: fx.Node) -> tuple[fx.Node, fx.Node | None]:
        """Find the last grouped GEMM, through pointwise ops only, and its bias."""
        seen, stack, gemms = set(), [node], []
        while stack:
            n = stack.pop()
            if n in seen or not isinstance(n, fx.Node):
                continue
            seen.add(n)
            if n.target is ops.grouped_mm.default:
                gemms.append(n)
            elif _is_pointwise(n):
                stack.extend(n.all_input_nodes)
        if len(gemms) != 1:
            raise _NotFusible(
                f"{len(gemms)} matrix products end in the result"
                if gemms
                else f"{_label_node(node)} stands after the last matrix product"
            )
        return gemms[0], self._find_bias(gemms[0])

    def _find_bias(self, gemm: fx.Node) -> fx.Node | None:
        for user in gemm.users:
            other = [a for a in user.all_input_nodes if a is not gemm]
            if (
                user.target is aten.add.Tensor
                and len(gemm.users) == 1
                and len(other) == 1
                and other[0].target is ops.expert_rows.default
            ):
                return other[0]
        return None

    def _match_layout(self, gemm: fx.Node, bias: fx.Node) -> list[fx.Node]:
        """Return the biases in the layout of the weights: one stacked tensor, or one tensor per expert."""
        biases, num_weights = list(get_argument(bias, "v")), len(get_argument(gemm, "w"))
        if len(biases) == num_weights:
            return biases
        with self.graph.inserting_before(self.combine):
            if num_weights == 1:
                return [self.graph.call_function(aten.stack.default, (biases,))]
            return [self.graph.call_function(aten.select.int, (biases[0], 0, e)) for e in range(num_weights)]

    def _build_gemm(self, gemm: fx.Node, bias: fx.Node | None) -> Gemm:
        dtype = _get_dtype(self._get_biased_product(gemm, bias))
        bias_dtype = "" if dtype == _get_dtype(gemm) else str(dtype).removeprefix("torch.")
        num, transposed = len(get_argument(gemm, "w")), get_argument(gemm, "transposed")
        return Gemm(num, transposed, bias is not None, bias_dtype)

    def _get_biased_product(self, gemm: fx.Node, bias: fx.Node | None) -> fx.Node:
        return next(iter(gemm.users)) if bias is not None else gemm

    def _build_expression(self, node: Any, names: dict[fx.Node, str], parts: bool = False) -> Any:
        """Return the expression of `node` over known values, parts of up-projections and the weight."""
        if not isinstance(node, fx.Node):
            return node
        if node in names:
            return names[node]
        if (weight := self._match_weight(node)) is not None:
            return weight
        if parts and (part := self._match_part(node)) is not None:
            return part
        if not _is_pointwise(node):
            raise _NotFusible(f"{_label_node(node)} is not pointwise")
        if node.target is aten.detach.default:
            raise _NotFusible("a part of the experts is detached from the gradient")
        return _build_op_expression(node, [self._build_expression(a, names, parts) for a in node.args])

    def _match_weight(self, node: fx.Node) -> Any:
        """Return the expression of a column [B,1] over the routing weight alone, or None if it is no such column."""
        if node.target is not aten.unsqueeze.default or get_argument(node, "dim") not in (1, -1):
            return None
        column: fx.Node = get_argument(node, "self")
        if self.weights.isdisjoint(collect_ancestors(node)):
            raise _NotFusible(f"{_label_node(column)} is not pointwise")

        def build(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if value in self.weights:
                return "w"
            if not _is_pointwise(value) or value.target is aten.detach.default:
                raise _NotFusible(f"{_label_node(value)} stands between the routing weight and the rows")
            return _build_op_expression(value, [build(a) for a in value.args])

        return build(column)

    def _match_part(self, node: fx.Node) -> str | None:
        """Return `a0`, `a1`, ... for an up-projection or a slice of one, otherwise None."""
        start, stop, step, base = None, None, 1, node
        if node.target is aten.slice.Tensor and get_argument(node, "dim") in (1, -1):
            base, start, stop, step = (get_argument(node, name) for name in ("self", "start", "end", "step"))
        gemm = base if base.target is ops.grouped_mm.default else None
        bias = None
        if gemm is None and base.target is aten.add.Tensor:
            gemm = next((a for a in base.all_input_nodes if a.target is ops.grouped_mm.default), None)
            bias = self._find_bias(gemm) if gemm is not None else None
            if bias is None:
                return None
        if gemm is None:
            return None
        if self._get_biased_product(gemm, bias) is not base or (bias is None and self._find_bias(gemm) is not None):
            return None
        group = next((i for i, u in enumerate(self.up_projections) if u.gemm is gemm), None)
        if group is None:
            group = len(self.up_projections)
            self.up_projections.append(_UpProjection(gemm, base, bias))
        part = (group, start, stop, step)
        if part not in self.parts:
            self.parts.append(part)
        return f"a{self.parts.index(part)}"

    def _find_input(self) -> fx.Node:
        """Return the tokens that all up-projections gather, and set `scale`."""
        inputs = []
        for up in self.up_projections:
            rows, scale = get_argument(up.gemm, "rows"), None
            if rows.target is aten.mul.Tensor:
                weights = {a: self._match_weight(a) for a in rows.all_input_nodes}
                rows = next((a for a in weights if weights[a] is None), None)
                scale = next((w for w in weights.values() if w is not None), None)
                if rows is None or scale is None:
                    raise _NotFusible("the experts' input is scaled by a value other than the routing weight")
            inputs.append((rows, scale))
        if any(pair != inputs[0] for pair in inputs):
            raise _NotFusible("the up-projections have different inputs")
        rows, self.scale = inputs[0]
        if getattr(rows, "target", None) is aten._to_copy.default and self.scale is None:
            return self._cast_tokens(get_argument(rows, "self"), rows.kwargs)
        if getattr(rows, "target", None) is not ops.dispatch.default:
            raise _NotFusible(f"{_label_node(rows)} stands between the gather and the up-projection")
        return get_argument(rows, "x")

    def _cast_tokens(self, rows: Any, kwargs: Any) -> fx.Node:
        """Cast the tokens before the gather: once for each token, not once for each slot."""
        if getattr(rows, "target", None) is not ops.dispatch.default:
            raise _NotFusible(f"{_label_node(rows)} stands between the gather and the up-projection")
        tokens: fx.Node = get_argument(rows, "x")
        with self.graph.inserting_before(rows):
            cast = self.graph.call_function(aten._to_copy.default, (tokens,), dict(kwargs))
        cast.meta["letters"] = tokens.meta.get("letters", ("S", "D"))
        return cast


def _remove_casts(
    parameters: list[list[fx.Node]], dtype: torch.dtype | None
) -> tuple[list[list[fx.Node]], dict[str, torch.dtype]]:
    """Remove casts of parameters to the dtype of the products. Return the parameters, and that dtype as the op's
    argument if a parameter has another one.

    The op casts an expert's weights when it needs them. Casts ahead of the op, as under autocast, copy all weights in
    each call and keep the copies for the backward.
    """

    def is_cast(n: fx.Node) -> bool:
        return n.target is aten._to_copy.default and n.kwargs == {"dtype": dtype}

    groups = [[get_argument(n, "self") if is_cast(n) else n for n in group] for group in parameters]
    is_equal = all(_get_dtype(n) == dtype for group in groups for n in group)
    return groups, {} if is_equal or dtype is None else {"dtype": dtype}


def _get_dtype(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a node's fake value, or None."""
    return getattr(node.meta.get("val"), "dtype", None)


def _get_shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)


def _scale_up_projections(expr: Any, weight: Any) -> Any:
    """Multiply each up-projection in an expression by `weight`, an expression of the routing weight."""
    if isinstance(expr, str) and expr.startswith("a") and expr[1:].isdigit():
        return ["mul.Tensor", expr, weight]
    return [expr[0], *(_scale_up_projections(e, weight) for e in expr[1:])] if isinstance(expr, list) else expr


def _build_op_expression(node: fx.Node, args: list[Any]) -> Any:
    """Return the expression of a pointwise node with these argument expressions."""
    kwargs = {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in node.kwargs.items()}
    return [_format_op(node), *args, *([kwargs] if kwargs else [])]


def _is_pointwise(n: fx.Node) -> bool:
    return n.target in (aten._to_copy.default, aten.detach.default) or is_pointwise(n.target)


def _format_op(n: fx.Node) -> str:
    assert isinstance(n.target, torch._ops.OpOverload)
    packet, overload = n.target.overloadpacket.__name__, n.target._overloadname
    return packet if overload == "default" else f"{packet}.{overload}"


def _label_node(n: fx.Node) -> str:
    return get_op_name(read_item(n)[0] if n.target is operator.getitem else n)  # a result of `max`


def _erase_unused(node: fx.Node) -> None:
    stack = [node]
    while stack:
        n = stack.pop()
        if (
            not n.users
            and n.op in ("call_function", "get_attr")
            and n.graph is not None
            and not getattr(n, "_erased", False)
        ):
            inputs = n.all_input_nodes
            n.graph.erase_node(n)
            stack.extend(inputs)
