"""Print a block's graph like a paper's listing, with one line per node.

Parameters appear at their uses under their names in the block; runs of expert parameters are ranges. Results of one op
are unpacked on its line, except that the index arrays of `build_pft` stay one value `pft`. On the right are dtype and
shape in named letters, SAVE if the backward keeps the value, and the user's source line when it changes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ..node_values import BUILD_PFT, format_dtype, format_target, format_value, get_argument
from .display_names import choose_display_names, format_attribute_path, format_body, format_ranges, get_attribute_name
from .graph_codegen import INFIX, is_getitem, list_results

if TYPE_CHECKING:
    from .block_graph import BlockGraph

_NAME_WIDTH = 22  # longer names do not push the column
_CODE_WIDTH = 96  # longer lines do not push the comments
_ATEN_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">",
    "ge": ">=", "mm": "@", "matmul": "@", "bitwise_and": "&", "bitwise_or": "|",
}  # fmt: skip
_PFT_WEIGHTS = "combine_weights"
_PFT_FIELDS = ("token_ids", "slot_ids", "expert_offsets", "inverse", _PFT_WEIGHTS)
# Ops whose results are printed as one value, and the names of its fields.
_BUNDLES = {
    BUILD_PFT: _PFT_FIELDS,
    "moefx::plan_dispatch": ("token_ids", "slot_ids", "rank_offsets", "inverse"),
    "moefx::exchange_counts": ("", "heard"),
    "moefx::all_to_all_rows": ("", "ticket"),
    "moefx::all_to_all_back": ("", "ticket"),
    "moefx::scatter_sums": ("", "ticket"),
}
_SPLIT_FIELDS = ("far", "near")
_BUNDLES_OF_PARTS = {"moefx::all_to_all_back": (*_SPLIT_FIELDS, "ticket", "ticket")}
# Arguments that are not printed, since other arguments imply them.
_HIDDEN_ARGUMENTS = {
    "all_to_all_rows": ("num_slots", "dedup"),
    "all_to_all_back": ("tickets",),
    "wait_rows": ("tickets", "splits", "tokens", "choices", "place", "num_slots", "dedup", "groups"),
    "shard_tokens": ("rank", "size"),
    "unshard_tokens": ("num_tokens", "rank", "size"),
    "wait_sums": ("ticket", "splits", "group"),
    "exchange_counts": ("num_slots", "dedup", "fingerprint", "samples"),
    "pack_rows": ("num_slots", "dedup"),
    "agree_length": ("fingerprint", "host_group"),
    "gather_tokens": ("size",),
    "wait_gathered": ("tickets", "choices", "place", "size", "group"),
    "scatter_sums": ("size",),
    "wait_scattered": ("ticket", "place", "size", "group"),
    "pull_tokens": ("size", "experts_per_rank"),
    "pull_sums": ("local_experts", "size", "experts_per_rank"),
    "read_counts": ("heard", "levels", "near", "fingerprint", "timeout", "group"),
}
# Labels of arguments of expert_mlp if it has more than the two weights.
_MLP_LABELS = {"row_weights": "w", "up": "up", "up_bias": "up_bias", "down": "down", "down_bias": "down_bias",
               "later": "later"}  # fmt: skip
_MLP_TAIL = ("keep", "reduce")  # printed after the body


@dataclasses.dataclass(frozen=True)
class Line:
    """One printed line: `name = code   # comment   source`. `node` is None for the `return` line."""

    name: str
    code: str
    comment: str
    source: str
    node: Node | None


def print_block(block: BlockGraph) -> str:
    """Return the whole block as text, with its header."""
    title = "   ".join(filter(None, (f"# {block.name or 'model'}", block.header)))
    return "\n".join([title, *format_lines(print_lines(block))])


def print_lines(block: BlockGraph) -> list[Line]:
    """Return one `Line` for each node that is not folded into another line."""
    return _Printer(block).lines()


def format_lines(lines: Sequence[Line]) -> list[str]:
    """Align names, code and comments; print a source only where it differs from the line above."""
    name_width = max([len(line.name) for line in lines if len(line.name) <= _NAME_WIDTH], default=0)
    code = [f"{line.name.ljust(name_width)} = {line.code}" if line.name else line.code for line in lines]
    code_width = max([len(text) for text in code if len(text) <= _CODE_WIDTH], default=0)
    comment_width = max([len(line.comment) for line in lines], default=0)
    result, source = [], ""
    for text, line in zip(code, lines, strict=True):
        line_source = line.source if line.source != source else ""
        source = line.source or source
        comment = f"{line.comment.ljust(comment_width)}   {line_source}".rstrip() if line_source else line.comment
        result.append(f"{text.ljust(code_width)}  # {comment}".rstrip() if comment.strip() else text)
    return result


class _Printer:
    def __init__(self, block: BlockGraph):
        self.block = block
        self.names = choose_display_names(block.graph)
        self.fields: dict[Node, tuple[Node, str]] = {}  # result of a bundle -> (the op's node, field name)
        self.folded: set[Node] = set()
        self.expert_steps: dict[Node, list[Node]] = {}  # a step of the first expert -> the same step of each expert
        self._fold_nodes()
        self._fold_experts()

    def lines(self) -> list[Line]:
        visible_nodes = [n for n in self.block.graph.nodes if n not in self.folded]
        return [self._line(node) for node in visible_nodes]

    # -- folding -----------------------------------------------------------------------------------

    def _fold_nodes(self) -> None:
        for node in self.block.graph.nodes:
            letters = node.meta.get("letters")
            if node.op == "get_attr" or (isinstance(letters, str) and node.op == "call_function"):
                self.folded.add(node)
            if node.op == "call_method" and node.target == "to_local":
                self.folded.add(node)
            if node.op == "call_function" and (named := _BUNDLES.get(format_target(node))):
                fields: tuple[str, ...] = named
                if len(node.users) > len(fields):
                    fields = _BUNDLES_OF_PARTS.get(format_target(node)) or fields
                for user in node.users:
                    if is_getitem(user) and user.args[0] is node:
                        self.fields[user] = (node, fields[user.args[1]])
                        self.folded.add(user)
            elif results := self._results(node):
                self.folded.update(user for user in results if user is not None)

    def _fold_experts(self) -> None:
        """Fold steps that every expert applies to its own parameters, so that they are printed once."""
        steps: dict[str, list[Node]] = {}
        for node in self.block.graph.nodes:
            if "each" in node.meta:
                steps.setdefault(node.meta["each"][0], []).append(node)
        for nodes in steps.values():
            if len(nodes) == nodes[0].meta["each"][2]:
                self.expert_steps[nodes[0]] = nodes
                self.folded.update(nodes[1:])

    def _results(self, node: Node) -> list[Node | None] | None:
        """Return the unpacked results for the left side of the line, without unused ones at the end."""
        results = list_results(node)
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
        if source.startswith("?"):  # no frame of user code
            source = ""
        if node.op == "placeholder":
            return Line(self.names[node], "input", format_value(node), source, node)
        if node.op == "output":
            return Line("", f"return {self._value(self.block.returned)}", "", source, None)
        results: Sequence[Node | None] | None = [node] if format_target(node) in _BUNDLES else self._results(node)
        comment = [self._comment(node, results)]
        nodes = [node, *(r for r in results or () if r is not None)]
        if any(n.meta.get("save") for n in nodes):
            comment.append("SAVE")
        names = ""
        if results:
            names = ", ".join(self._node(r) if r else "_" for r in results)
        elif node.users:
            names = self._node(node)
        return Line(names, self._call(node), "   ".join(filter(None, comment)), source, node)

    def _comment(self, node: Node, results: Sequence[Node | None] | None) -> str:
        if format_target(node) == BUILD_PFT:
            drops = any(get_argument(node, name) is not None for name in ("keep", "capacity"))
            if (num_rows := get_argument(node, "num_rows")) is not None:
                return f"B = {self._value(num_rows)}, and up to 1/64 more"
            return "B = S*K, valid up to expert_offsets[E]" if drops else "B = S*K"
        if format_target(node) in _BUNDLES:
            return ""
        if format_target(node) == "moefx::weights_later":
            return "the backward makes their gradients here"
        if results:
            return " ".join(filter(None, (format_value(r) for r in results if r is not None)))
        return format_value(node)

    # -- expressions -------------------------------------------------------------------------------

    def _call(self, node: Node) -> str:
        target, args = node.target, list(node.args)
        if node.op == "call_module":
            return f"{format_attribute_path(str(target))}({self._arguments(args, node.kwargs)})"
        if node.op == "call_method":
            return f"{self._value(args[0])}.{target}({self._arguments(args[1:], node.kwargs)})"
        if target is operator.getitem:
            index = args[1] if type(args[1]) is tuple and args[1] else (args[1],)
            return f"{self._value(args[0])}[{', '.join(map(self._value, index))}]"
        if target in INFIX and len(args) == 2:
            return self._infix(args, INFIX[target])
        if isinstance(target, torch._ops.OpOverload):
            return self._op(node, target, args)
        return f"{format_target(node)}({self._arguments(args, node.kwargs)})"

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
                arguments = self._arguments(args[1:], node.kwargs)
                return f"{self._value(args[0])}.{name}({arguments})"
        return f"{name}({self._op_arguments(node, target, args)})"

    def _op_arguments(self, node: Node, target: torch._ops.OpOverload, args: list[Any]) -> str:
        """Format arguments by position until one is left out, then by name. Defaults, None and empty lists are left
        out."""
        kwargs = node.kwargs
        schema = target._schema.arguments
        values: list[tuple[Any, Any]] = [
            (a, args[i] if i < len(args) else kwargs.get(a.name, a.default_value)) for i, a in enumerate(schema)
        ]
        dialect = target.namespace == "moefx"
        if dialect:
            hidden = _HIDDEN_ARGUMENTS.get(target._schema.name.partition("::")[2], ())
            values = self._without_pft_fields([v for v in values if v[0].name not in hidden])
        names = {argument.name for argument, value in values if not _is_left_out(argument, value)}
        labelled = bool(names & {"row_weights", "up_bias", "down_bias"})
        texts, tail, skipped = [], [], False
        for argument, value in values:
            if _is_left_out(argument, value):
                skipped = True
            elif argument.name == "body" and dialect:
                tail.insert(0, format_body(str(value)))
            elif argument.name in _MLP_TAIL and argument.kwarg_only:
                tail.append(f"{argument.name}={self._value(value)}")
            else:
                label = argument.name if skipped or argument.kwarg_only else ""
                if dialect and argument.name in ("group", "groups") and "axis" in node.meta:
                    label, value = "axis", node.meta["axis"]
                if dialect and argument.name in (*_PFT_FIELDS[:4], "rank_offsets"):
                    label = ""
                elif dialect and argument.name in _MLP_LABELS:
                    label = _MLP_LABELS[argument.name] if labelled else ""
                text = self._list(value) if isinstance(value, (list, tuple)) and dialect else self._value(value)
                texts.append(f"{label}={text}" if label else text)
        return ", ".join(texts) + (f"; {', '.join(tail)}" if tail else "")

    def _without_pft_fields(self, values: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Replace the first index array of a PFT among the arguments by `pft`, and drop its other arrays."""
        result, passed_pfts = [], set()
        for argument, value in values:
            pft, field = self.fields.get(value, (None, "")) if isinstance(value, Node) else (None, "")
            is_separate = field in _SPLIT_FIELDS or (field == _PFT_WEIGHTS and argument.name != "row_weights")
            if pft is None or is_separate:
                result.append((argument, value))
            elif field != _PFT_WEIGHTS and pft not in passed_pfts:
                passed_pfts.add(pft)
                result.append((argument, pft))
            # The PFT's own weights are no printed row weights: the body shows where `w` is applied.
        return result

    def _arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([self._value(a) for a in args] + [f"{k}={self._value(v)}" for k, v in kwargs.items()])

    def _infix(self, args: Sequence[Any], symbol: str) -> str:
        left, right = map(self._operand, args)
        return f"{left} {symbol} {right}"

    def _operand(self, value: Any) -> str:
        text = self._value(value)
        return f"({text})" if value in self.folded and " " in text else text  # computed sizes are inline

    def _list(self, values: Sequence[Any]) -> str:
        """Format a list of tensors, with expert parameters as ranges. A single range has no brackets."""
        if not all(isinstance(v, Node) and v.op == "get_attr" for v in values):
            return self._value(list(values))
        runs = format_ranges([get_attribute_name(v) for v in values])
        if len(runs) > 4:
            runs = [*runs[:2], f"... {len(runs) - 3} more", runs[-1]]
        return runs[0] if len(runs) == 1 else f"[{', '.join(runs)}]"

    def _value(self, value: Any) -> str:
        if isinstance(value, Node):
            return self._node(value)
        if isinstance(value, (list, tuple)):
            if len(value) > 1 and all(isinstance(v, Node) and v.op == "get_attr" for v in value):
                return self._list(value)
            if value and self.expert_steps.get(value[0]) == list(value):
                return self._node(value[0])
            items = ", ".join(map(self._value, value))
            if len(value) == 1 and isinstance(value[0], Node) and value[0] in self.fields:
                return items
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._value(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            start = None if value.start == 0 else value.start
            parts = ["" if v is None else self._value(v) for v in (start, value.stop, value.step)]
            return ":".join(parts if parts[2] else parts[:2])
        if isinstance(value, torch.dtype):
            return format_dtype(value)
        if isinstance(value, str):
            return f'"{value}"'
        if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e6:
            return repr(value)
        return "..." if value is ... else str(value)

    def _node(self, node: Node) -> str:
        if node in self.expert_steps:
            steps = self.expert_steps[node]
            if node.op == "get_attr":
                paths = [get_attribute_name(n) for n in steps]
                return format_ranges(paths)[0] if len(set(paths)) > 1 else format_attribute_path(paths[0])
            return f"{self.names[node]}[0..{len(steps) - 1}]"
        if node.op == "get_attr":
            return format_attribute_path(get_attribute_name(node))
        if node in self.fields:
            pft, field = self.fields[node]
            return f"{self.names[pft]}.{field}" if field else self.names[pft]
        if node.op == "call_method" and node in self.folded:
            return f"{self._node(node.args[0])}.local"  # type: ignore[arg-type]
        letters = node.meta.get("letters")
        if node in self.folded and isinstance(letters, str):
            return self._axis(node) or letters or self._size(node)
        return self.names[node]

    def _size(self, size: Node) -> str:
        """Format a computed size as a Python expression."""
        if size.target in _ARITHMETIC and len(size.args) == 2:
            return self._infix(size.args, _ARITHMETIC[size.target])
        name = getattr(size.target, "__name__", str(size.target)).removeprefix("_sym_")
        return f"{name}({', '.join(map(self._value, size.args))})"

    def _axis(self, size: Node) -> str:
        """Return the letter of the input's axis whose size this node reads, or ""."""
        source, axis = (*size.args, None, None)[:2]
        letters = source.meta.get("letters") if isinstance(source, Node) and source.op == "placeholder" else None
        if isinstance(letters, tuple) and isinstance(axis, int) and axis < len(letters):
            return str(letters[axis])
        return ""


_ARITHMETIC = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%",
    operator.truediv: "/", operator.pow: "**", operator.lshift: "<<", operator.rshift: ">>",
}  # fmt: skip


def _is_left_out(argument: Any, value: Any) -> bool:
    if value is None or (isinstance(value, (list, tuple)) and not len(value)):
        return True
    if argument.name == "places" and list(value) == list(range(len(value))):
        return True  # the experts in their order
    # The checkpoint policy is always printed.
    return argument.name != "keep" and not isinstance(value, Node) and value == argument.default_value
