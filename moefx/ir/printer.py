"""The printed form of a block's graph: one line per node, reads like the listing of a paper (design section
4).

Parameters stand where they are used, by their names in the block; a run of expert parameters is one range.
Results of one op are unpacked on its line, the index arrays of `build_pft` stay one value `pft`. To the right
stand dtype and shape in named letters, SAVE for what the backward keeps, and the user's source line where it
changes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from .block import BUILD_PFT, BlockGraph, dtype_text, output_value, target_name, value_text
from .body import ExpertBody
from .codegen import INFIX, is_getitem, unpacked
from .expression import pretty
from .names import AttributeRange, attribute_ranges

_NAME_WIDTH = 22  # longer names do not push the column
_CODE_WIDTH = 96  # longer lines do not push the comments
_ATEN_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "mm": "@", "matmul": "@", "bitwise_and": "&", "bitwise_or": "|",
}  # fmt: skip
_ARITHMETIC = {"add", "sub", "mul", "div", "neg", "clamp", "clamp_min", "clamp_max", "_to_copy"}
_PFT_WEIGHTS = "combine_weights"
_PFT_FIELDS = ("token_ids", "slot_ids", "expert_offsets", "inverse", _PFT_WEIGHTS)
# What the results of dialect ops are called when the pass that made the node gave no name of its own.
_RESULT_NAMES = {
    "build_pft": "pft",
    "dispatch": "rows",
    "grouped_mm": "h",
    "expert_mlp": "y",
    "combine": "out",
}
# How arguments of expert_mlp are labelled; "" stands without a name.
_ARGUMENT_LABELS = {"row_weights": "w", "up": "", "up_bias": "up_bias", "down": "", "down_bias": "down_bias"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One printed line: `name = code   # comment   source`. `node` is None for the `return` line."""

    name: str
    code: str
    comment: str
    source: str
    node: Node | None


def print_block(block: BlockGraph) -> str:
    """The whole block as text, with its header."""
    title = "   ".join(filter(None, (f"# {block.name or 'model'}", block.header)))
    return "\n".join([title, *format_lines(print_lines(block))])


def print_lines(block: BlockGraph) -> list[Line]:
    """One `Line` for each node that is not folded into another line."""
    return _Printer(block).lines()


def format_lines(lines: Sequence[Line]) -> list[str]:
    """Align names, code and comments; print a source only where it differs from the line above."""
    name_width = max([len(line.name) for line in lines if len(line.name) <= _NAME_WIDTH], default=0)
    code = [f"{line.name.ljust(name_width)} = {line.code}" if line.name else line.code for line in lines]
    code_width = max([len(text) for text in code if len(text) <= _CODE_WIDTH], default=0)
    comment_width = max([len(line.comment) for line in lines], default=0)
    result, source = [], ""
    for text, line in zip(code, lines, strict=True):
        shown = line.source if line.source != source else ""
        source = line.source or source
        comment = f"{line.comment.ljust(comment_width)}   {shown}".rstrip() if shown else line.comment
        result.append(f"{text.ljust(code_width)}  # {comment}".rstrip() if comment.strip() else text)
    return result


def body_text(body: str) -> str:
    """The pointwise part of an `ExpertBody` (its JSON): `silu(g)*u`, `relu(h)`; ` | y*w` is what follows the
    last GEMM."""
    expert = ExpertBody.from_json(body)
    if len(expert.parts) == 1:
        names = {"a0": "h"}
    elif len(expert.parts) == 2:
        gate = _gate(expert.act)
        names = {gate: "g", ("a1" if gate == "a0" else "a0"): "u"}
    else:
        names = {}
    text = pretty(_renamed(expert.act, names))
    return text if expert.out == "y" else f"{text} | {pretty(expert.out)}"


def attribute_name(node: Node) -> str:
    """The parameter's name in the block; a captured graph records it beside a target of its own."""
    return str(node.meta.get("fqn") or node.target)


def shown_path(path: str) -> str:
    """`experts.0.w` -> `experts[0].w`."""
    return re.sub(r"\.(\d+)(?=\.|$|\[)", r"[\1]", path)


def range_texts(names: Sequence[str]) -> list[str]:
    """Parameter names for people: runs as ranges, ranges over the same experts as one."""
    runs = attribute_ranges(names)
    text = _braces(runs)
    return [text] if text else [shown_path(str(run)) for run in runs]


class _Printer:
    def __init__(self, block: BlockGraph):
        self.block = block
        self.names: dict[Node, str] = {}
        self.fields: dict[Node, tuple[Node, int]] = {}  # results of a build_pft: (its node, position)
        self.folded: set[Node] = set()
        self._name_nodes()

    def lines(self) -> list[Line]:
        shown = [n for n in self.block.graph.nodes if n not in self.folded]
        return [self._line(node) for node in shown]

    # -- names -------------------------------------------------------------------------------------

    def _name_nodes(self) -> None:
        taken = {node.name for node in self.block.graph.nodes}
        for node in self.block.graph.nodes:
            name = node.name
            if plain := _plain_name(node):
                name = _unused(plain, taken)
                taken.add(name)
            self.names[node] = name
            letters = node.meta.get("letters")
            if node.op == "get_attr" or (isinstance(letters, str) and node.op == "call_function"):
                self.folded.add(node)
            if node.op == "call_function" and target_name(node) == BUILD_PFT:
                for user in node.users:
                    if is_getitem(user) and user.args[0] is node:
                        self.fields[user] = (node, user.args[1])
                        self.folded.add(user)
            elif results := self._results(node):
                self.folded.update(user for user in results if user is not None)

    def _results(self, node: Node) -> list[Node | None] | None:
        """What stands on the left of the line: the unpacked results, without unused ones at the end."""
        results = unpacked(node)
        if results is None and node.users and all(is_getitem(u) and u.args[0] is node for u in node.users):
            by_index = {u.args[1]: u for u in node.users if isinstance(u.args[1], int)}
            if len(by_index) == len(node.users) and min(by_index) >= 0:
                results = [by_index.get(i) for i in range(max(by_index) + 1)]
        while results and results[-1] is None:
            results.pop()
        return results

    # -- lines -------------------------------------------------------------------------------------

    def _line(self, node: Node) -> Line:
        source = str(node.meta.get("source") or "")
        if node.op == "placeholder":
            return Line(self.names[node], "input", value_text(node), source, node)
        if node.op == "output":
            return Line("", f"return {self._value(output_value(self.block))}", "", source, None)
        results: Sequence[Node | None] | None = (
            [node] if target_name(node) == BUILD_PFT else self._results(node)
        )
        comment = [self._comment(node, results)]
        kept = [node, *(r for r in results or () if r is not None)]
        if any(n.meta.get("save") for n in kept):
            comment.append("SAVE")
        names = ""
        if results:
            names = ", ".join(self._result_name(node, r, len(results)) for r in results)
        elif node.users:
            names = self.names[node]
        return Line(names, self._call(node), "   ".join(filter(None, comment)), source, node)

    def _result_name(self, node: Node, result: Node | None, count: int) -> str:
        if result is None:
            return "_"
        if count == 1 and re.fullmatch(r"getitem(_\d+)?", result.name):
            # The only result that is used takes the op's name: `y = expert_mlp(...)`, not `getitem_7 = ...`.
            self.names[result] = self.names[node]
        return self.names[result]

    def _comment(self, node: Node, results: Sequence[Node | None] | None) -> str:
        if target_name(node) == BUILD_PFT:
            drops = node.kwargs.get("capacity") is not None or any(a is not None for a in node.args[2:])
            return "B = S*K, valid up to expert_offsets[E]" if drops else "B = S*K"
        if results:
            return " ".join(filter(None, (value_text(r) for r in results if r is not None)))
        return value_text(node)

    # -- expressions -------------------------------------------------------------------------------

    def _call(self, node: Node) -> str:
        target, args = node.target, list(node.args)
        if node.op == "call_module":
            return f"{shown_path(str(target))}({self._arguments(args, node.kwargs)})"
        if node.op == "call_method":
            return f"{self._value(args[0])}.{target}({self._arguments(args[1:], node.kwargs)})"
        if target is operator.getitem:
            return f"{self._value(args[0])}[{self._value(args[1])}]"
        if target in INFIX and len(args) == 2:
            return self._infix(args, INFIX[target])
        if isinstance(target, torch._ops.OpOverload):
            return self._op(node, target, args)
        return f"{target_name(node)}({self._arguments(args, node.kwargs)})"

    def _op(self, node: Node, target: torch._ops.OpOverload, args: list[Any]) -> str:
        name = target._schema.name.partition("::")[2]
        if target.namespace == "aten":
            if name in _ATEN_INFIX and len(args) == 2 and not node.kwargs:
                return self._infix(args, _ATEN_INFIX[name])
            if name == "_to_copy" and set(node.kwargs) == {"dtype"}:
                return f"{self._value(args[0])}.to({self._value(node.kwargs['dtype'])})"
            if name == "sym_size" and len(args) == 2:
                return f"{self._value(args[0])}.shape[{args[1]}]"
            if name == "_softmax":
                name, args = "softmax", args[:2]
            elif name.endswith("_") and not name.startswith("_"):
                rest = self._arguments(args[1:], node.kwargs)
                return f"{self._value(args[0])}.{name}({rest})"
        return f"{name}({self._op_arguments(target, args, node.kwargs)})"

    def _op_arguments(self, target: torch._ops.OpOverload, args: list[Any], kwargs: dict[str, Any]) -> str:
        """Arguments by position while nothing is left out; defaults, None and empty lists are left out."""
        schema = target._schema.arguments
        values: list[tuple[Any, Any]] = [
            (a, args[i] if i < len(args) else kwargs.get(a.name, a.default_value))
            for i, a in enumerate(schema)
        ]
        dialect = target.namespace == "moefx"
        if dialect:
            values = self._without_pft_fields(values)
        texts, tail, skipped = [], [], False
        for argument, value in values:
            if _left_out(argument, value):
                skipped = True
            elif argument.name == "body" and dialect:
                tail.insert(0, body_text(str(value)))
            elif argument.name == "keep" and argument.kwarg_only:
                tail.append(f"keep={self._value(value)}")
            else:
                label = argument.name if skipped or argument.kwarg_only else ""
                if dialect:
                    label = (
                        "" if argument.name in _PFT_FIELDS[:4] else _ARGUMENT_LABELS.get(argument.name, label)
                    )
                text = (
                    self._list(value) if isinstance(value, (list, tuple)) and dialect else self._value(value)
                )
                texts.append(f"{label}={text}" if label else text)
        return ", ".join(texts) + (f"; {', '.join(tail)}" if tail else "")

    def _without_pft_fields(self, values: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Put `pft` for the first of its index arrays among the arguments of a dialect op and drop the
        others."""
        result, passed = [], set()
        for argument, value in values:
            pft, index = self.fields.get(value, (None, 0)) if isinstance(value, Node) else (None, 0)
            if pft is None or (_PFT_FIELDS[index] == _PFT_WEIGHTS and argument.name != "row_weights"):
                result.append((argument, value))
            elif _PFT_FIELDS[index] != _PFT_WEIGHTS and pft not in passed:
                passed.add(pft)
                result.append((argument, pft))
            # The PFT's own weights as row weights are left out: the body says where `w` is applied.
        return result

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join(
            [self._value(a) for a in args] + [f"{k}={self._value(v)}" for k, v in kwargs.items()]
        )

    def _infix(self, args: Sequence[Any], symbol: str) -> str:
        left, right = map(self._value, args)
        return f"{left} {symbol} {right}"

    def _list(self, values: Sequence[Any]) -> str:
        """A list of tensors: expert parameters as ranges; one element or one range stands without
        brackets."""
        if not all(isinstance(v, Node) and v.op == "get_attr" for v in values):
            return self._value(list(values))
        runs = range_texts([attribute_name(v) for v in values])
        if len(runs) > 4:
            runs = [*runs[:2], f"... {len(runs) - 3} more", runs[-1]]
        return runs[0] if len(runs) == 1 else f"[{', '.join(runs)}]"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            if len(value) > 1 and all(isinstance(v, Node) and v.op == "get_attr" for v in value):
                return self._list(value)
            items = ", ".join(map(self._value, value))
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            parts = ["" if v is None else self._value(v) for v in (value.start, value.stop, value.step)]
            return ":".join(parts if parts[2] else parts[:2])
        if isinstance(value, torch.dtype):
            return dtype_text(value)
        if isinstance(value, str):
            return f'"{value}"'
        if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e6:
            return repr(value)
        return "..." if value is ... else str(value)

    def _node(self, node: Node) -> str:
        if node.op == "get_attr":
            return shown_path(attribute_name(node))
        if node in self.fields:
            pft, index = self.fields[node]
            return f"{self.names[pft]}.{_PFT_FIELDS[index]}"
        letters = node.meta.get("letters")
        if node in self.folded and isinstance(letters, str):
            return letters
        return self.names[node]


def _braces(runs: Sequence[AttributeRange | str]) -> str:
    """Ranges over the same experts as one: `experts[0..63].{gate, up}.weight`; "" where there is none."""
    first = runs[0] if runs else ""
    if len(runs) < 2 or not isinstance(first, AttributeRange):
        return ""
    parts = [
        run.after.split(".")
        for run in runs
        if isinstance(run, AttributeRange)
        and (run.before, run.start, run.stop) == (first.before, first.start, first.stop)
    ]
    if len(parts) != len(runs) or len({len(p) for p in parts}) != 1:
        return ""
    differ = [i for i in range(len(parts[0])) if len({p[i] for p in parts}) > 1]
    if len(differ) != 1:
        return ""
    choices = f"{{{', '.join(p[differ[0]] for p in parts)}}}"
    after = ".".join([*parts[0][: differ[0]], choices, *parts[0][differ[0] + 1 :]])
    return shown_path(str(AttributeRange(first.before, after, first.start, first.stop)))


def _left_out(argument: Any, value: Any) -> bool:
    if value is None or (isinstance(value, (list, tuple)) and not len(value)):
        return True
    # The save policy is a decision of ours that readers look for, default or not.
    return argument.name != "keep" and not isinstance(value, Node) and value == argument.default_value


def _unused(name: str, taken: set[str]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number, candidate = number + 1, f"{name}_{number}"
    return candidate


def _plain_name(node: Node) -> str:
    """A name to show instead of the one that FX derived from the overload (`mul_tensor_1`); "" keeps the
    node's own."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    name = node.target._schema.name.partition("::")[2]
    overload = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", node.target._overloadname).lower()
    derived = re.fullmatch(rf"{name}(_{overload})?(_\d+)?", node.name)
    return _RESULT_NAMES.get(name, name.strip("_")) if derived else ""


def _gate(act: Any) -> str:
    """Which of two variables is the gate: the one that stands inside a function, not just in arithmetic."""
    inside = _inside_functions(act, False)
    return "a1" if "a1" in inside and "a0" not in inside else "a0"


def _inside_functions(expr: Any, inside: bool) -> set[str]:
    if isinstance(expr, str):
        return {expr} if inside else set()
    if not isinstance(expr, (tuple, list)) or not expr:
        return set()
    inside = inside or str(expr[0]).partition(".")[0] not in _ARITHMETIC
    return set().union(*(_inside_functions(e, inside) for e in expr[1:]))


def _renamed(expr: Any, names: dict[str, str]) -> Any:
    if isinstance(expr, str):
        return names.get(expr, expr)
    if isinstance(expr, (tuple, list)) and expr:
        head = expr[0] if isinstance(expr[0], str) and expr[0] not in names else _renamed(expr[0], names)
        return (head, *(e if isinstance(e, dict) else _renamed(e, names) for e in expr[1:]))
    return expr
