"""Emit reads of expert parameters: views to the used parts, and stacks in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ...matching.terms.parameter_slices import ParameterSlice, get_tensor
from .op_emission import OpEmitter

aten = torch.ops.aten


class ExpertWeights:
    """Emits the used parts of parameters: of one parameter, or of all experts of a group."""

    def __init__(self, emitter: OpEmitter, block: nn.Module):
        self.emitter, self.block = emitter, block

    def emit_one(self, part: ParameterSlice) -> fx.Node:
        return self._apply_steps(self._emit_parameter(part.fqn), part.steps, 0)

    def _emit_parameter(self, fqn: str) -> fx.Node:
        parameter = get_tensor(self.block, fqn)
        node = self.emitter.residual.graph.get_attr(fqn)
        with self.emitter.residual.fake_mode:
            node.meta["val"] = torch.empty(parameter.shape, dtype=parameter.dtype)
        return node

    def _apply_steps(self, node: fx.Node, steps: tuple[tuple, ...], offset: int) -> fx.Node:
        """Apply the view steps of a slice to one parameter (`offset=0`) or to a stack of parameters (`offset=1`)."""
        for op, *arguments in steps:
            shape: Any = arguments[0] if arguments else ()
            if op in ("select", "squeeze"):
                for axis, i in sorted(arguments[1], reverse=True):
                    node = self.emitter.call(aten.select.int, (node, axis + offset, i))
            elif op == "slice":
                _, dim, start, stop, step = arguments
                node = self.emitter.call(aten.slice.Tensor, (node, dim + offset, start, stop, step))
            elif op == "reshape":
                node = self.emitter.call(aten.reshape.default, (node, [*[-1] * offset, *shape]))
            elif op == "permute":
                node = self.emitter.call(
                    aten.permute.default, (node, [*range(offset), *[d + offset for d in arguments[1]]])
                )
            elif op == "expand":
                node = self.emitter.call(aten.expand.default, (node, [*[-1] * offset, *shape]))
            elif op == "cast":
                node = self.emitter.call(aten._to_copy.default, (node,), {"dtype": getattr(torch, shape)})
            elif op == "detach":
                node = self.emitter.call(aten.detach.default, (node,))
        return node

    def are_stacked(self, parts: list[ParameterSlice]) -> bool:
        """Return whether one tensor holds the parameters of all experts."""
        return len({p.fqn for p in parts}) == 1

    def emit_all(self, parts: list[ParameterSlice]) -> fx.Node | list[fx.Node]:
        """Emit the parameters of all experts of a group: a stacked tensor if the user has one, otherwise E nodes."""
        stack = self._emit_stack(parts)
        return stack if stack is not None else [self.emit_one(p) for p in parts]

    def _emit_stack(self, parts: list[ParameterSlice]) -> fx.Node | None:
        first = parts[0]
        if any(p.fqn != first.fqn or len(p.steps) != len(first.steps) for p in parts):
            return None
        varying = [k for k in range(len(first.steps)) if any(p.steps[k] != first.steps[k] for p in parts)]
        if len(varying) != 1:
            return None
        k = varying[0]
        op, *arguments = first.steps[k]
        before = self._apply_steps(self._emit_parameter(first.fqn), first.steps[:k], 0)
        if op == "select":
            axis = arguments[1][0][0]
            numbers = [p.steps[k][2][0] for p in parts]
            other_indices = {p.steps[k][2][1:] for p in parts}
            if [a for a, _ in numbers] != [axis] * len(parts) or len(other_indices) != 1:
                return None
            order = [i for _, i in numbers]
            node = before if axis == 0 else self.emitter.call(aten.movedim.int, (before, axis, 0))
            if order == list(range(order[0], order[0] + len(order))):
                node = self._slice(node, 0, order[0], len(order))
            else:
                index = self.emitter.call(
                    torch.tensor,
                    (order,),
                    {"device": self.emitter.residual.emit_input_device()},
                    fake=torch.int64,
                    shape=(len(order),),
                )
                node = self.emitter.call(aten.index_select.default, (node, 0, index))
            for a, i in sorted(other_indices.pop(), reverse=True):
                node = self.emitter.call(aten.select.int, (node, a + (1 if a < axis else 0), i))
        elif op == "slice":
            _, dim, start, stop, step = arguments
            starts = [p.steps[k][3] for p in parts]
            if step != 1 or any(p.steps[k][4] - p.steps[k][3] != stop - start for p in parts):
                return None
            slices = self._emit_strided_slices(before, dim, starts, stop - start)
            if slices is None:
                return None
            node = slices
        else:
            return None
        return self._apply_steps(node, first.steps[k + 1 :], 1)

    def _emit_strided_slices(self, node: fx.Node, dim: int, starts: list[int], width: int) -> fx.Node | None:
        """Emit slices of an axis, at these starts, as a stack without a copy; None if they are not evenly spaced."""
        size = list(node.meta["val"].shape)
        spacing = starts[1] - starts[0] if len(starts) > 1 else width
        first, begin = divmod(starts[0], max(1, spacing))
        even = starts == [starts[0] + i * spacing for i in range(len(starts))]
        if not even or size[dim] % spacing or begin + width > spacing:
            return None
        node = self.emitter.call(aten.reshape.default, (node, [*size[:dim], -1, spacing, *size[dim + 1 :]]))
        node = self._slice(self._slice(node, dim, first, len(starts)), dim + 1, begin, width)
        return node if dim == 0 else self.emitter.call(aten.movedim.int, (node, dim, 0))

    def _slice(self, node: fx.Node, dim: int, start: int, length: int) -> fx.Node:
        if length == node.meta["val"].shape[dim]:
            return node
        return self.emitter.call(aten.slice.Tensor, (node, dim, start, start + length))
