"""Refusals of the lifter: name the cause if a capture has no cut, or no node that holds the selected experts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ...capture.tracing.capture_result import Capture
from ...capture.tracing.node_origins import find_float_decisions
from ...errors import Cause, Refused
from ...ir.node_values import get_op_name
from ..facts.graph_nodes import Line, depends_on_arguments, depends_on_call, is_random, line
from ..terms.sum_expansion import routed_axes
from ..terms.term import Term
from .expert_index import is_all_or_none, uses_all_experts
from .expert_owners import ExpertOwners, OwnerKey
from .parameter_uses import ParameterUses

NO_SECOND_EXPERT = "leave it as it is: only a block with several experts becomes faster"
ONE_EXPERT = "there is a single expert, which tokens either use or skip: no selection among several experts"
_JOINS = {"cat", "stack"}  # may join the results of experts
_EXPERT_SELECTION_OPS = {"argmax", "argsort", "max", "sort", "topk"}
_MASKED_OPS = {"masked_fill", "masked_scatter", "nonzero", "where"}


class NothingRouted(Refused):
    """Every expert's result is masked in this capture, or no expert runs in it.

    Args:
        cut: the sum that no result reaches, if there is one.
    """

    def __init__(self, capture: Capture, cut: fx.Node | None = None):
        has_integers = any(map(depends_on_call, capture.nodes))
        remedy = "an integer argument or buffer that turns all experts off is not followed" if has_integers else ""
        reason, source = (
            ("no expert's result reaches this sum", str(cut.meta["source"])) if cut else ("no expert runs", "")
        )
        super().__init__(reason, source=source, remedy=remedy)


def explain_no_cut(capture: Capture, expert_nodes: set[fx.Node], experts: set[str]) -> Refused:
    """Explain why no node sums all routed rows. `experts` are the FQNs of the experts' parameters."""
    written: dict[str, dict[str, fx.Node]] = {"attribute": {}, "buffer": {}}
    for effect in capture.effects:
        nodes = [n for n in pytree.tree_leaves(effect.node) if isinstance(n, fx.Node)]
        if effect.kind in written and not expert_nodes.isdisjoint(nodes):
            written[effect.kind][str(effect.target)] = nodes[0]
    if attributes := written["attribute"]:
        return Refused(
            "the experts set attributes in their forward, as pruning and weight-norm hooks do",
            culprits=tuple(attributes)[:3],
            source=str(next(iter(attributes.values())).meta["source"]),
            remedy="use torch.nn.utils.parametrize instead; for pruning, call prune.remove",
        )
    if buffers := written["buffer"]:
        return Refused(
            "the experts change buffers in their forward, as spectral_norm does in training",
            culprits=tuple(buffers)[:3],
            source=str(next(iter(buffers.values())).meta["source"]),
            remedy="change the buffers outside of the forward, or compile in eval mode",
            cause=Cause.NOT_TOGETHER,
        )
    users = (u for n in capture.nodes if n.op == "get_attr" and n.meta["fqn"] in experts for u in n.users)
    first = next(users, None)
    if first is None:
        return NothingRouted(capture)
    return Refused(
        "the experts' results do not come together in one tensor",
        culprits=tuple(sorted(experts)[:3]),
        source=str(first.meta["source"]),
        remedy="the routed sum must be one tensor before it is used further; if several gates share the experts, "
        "put each gate and its sum into a module of its own, and share the list of experts",
        cause=Cause.NOT_TOGETHER,
    )


def explain_layout(capture: Capture) -> Refused | None:
    """Explain that a sparse tensor hides the experts, if the capture has one."""
    for n in capture.nodes:
        val = n.meta.get("val")
        if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
            return Refused(
                f"the block computes with a {val.layout} tensor; moefx supports strided tensors only",
                culprits=(get_op_name(n),),
                source=str(n.meta["source"]),
                remedy="gather and add rows with index, index_add or a dense product instead",
            )
    return None


def explain_random(expert_nodes: set[fx.Node], cut: fx.Node) -> Refused | None:
    """Explain that the experts draw random numbers before the cut, if they do. This makes every cut fail."""
    for n in expert_nodes:
        if n.meta["index"] < cut.meta["index"] and is_random(n):
            return refuse_random(n)
    return None


def refuse_random(node: fx.Node) -> Refused:
    """Build the refusal of experts that draw random numbers."""
    return Refused(
        "the experts draw random numbers (dropout in training?): which row gets which numbers depends on the order of "
        "the experts",
        culprits=(get_op_name(node),),
        source=str(node.meta["source"]),
        remedy="set the experts' dropout to 0, or compile in eval mode",
    )


def explain_overwrite(cut: fx.Node) -> Refused:
    """Explain that one write puts several rows at one index."""
    return Refused(
        "one op writes several values to the same row: torch leaves open which one remains, and gradients flow to all "
        "of them",
        source=str(cut.meta["source"]),
        remedy="add them up: out.index_add_(0, rows, y), or out.index_put_((rows,), y, accumulate=True)",
    )


@dataclasses.dataclass(frozen=True)
class UnexplainedIndex:
    """A cut for which no integer node holds the selected experts.

    Attributes:
        expert_nodes: nodes that are computed from the experts' parameters.
        summands: the summands with expert parameters, by token.
    """

    uses: ParameterUses
    owners: ExpertOwners
    expert_nodes: set[fx.Node]
    cut: fx.Node
    summands: list[list[Term]]

    def explain(self) -> Refused:
        """Return the refusal of the first cause that applies."""
        causes = (
            self._explain_one_module, self._explain_one_expert, self._explain_all_experts,
            self._explain_partial_choices, self._explain_several_gates, self._explain_repeated_sums,
            self._explain_separate_masks,
            self._explain_element_move, self._explain_shared_choices, self._explain_mixed_results,
            self._explain_separate_selections,
        )  # fmt: skip
        for cause in causes:
            if (refusal := cause()) is not None:
                return refusal
        return Refused(
            "no integer tensor with one entry per token and slot explains which experts were used",
            source=self._source,
            remedy="the experts of a token must follow from that token's own choice (token choice), "
            "not from the other tokens",
            cause=Cause.UNEXPLAINED_INDEX,
        )

    @property
    def _source(self) -> str:
        return str(self.cut.meta["source"])

    @property
    def _capture(self) -> Capture:
        return self.uses.capture

    def _explain_one_module(self) -> Refused | None:
        """Explain that a list holds the module of an expert twice, so that two numbers select it."""
        for path, modules in self.uses.block.named_modules():
            if not isinstance(modules, nn.ModuleList) or not 1 < len({*map(id, modules)}) < len(modules):
                continue
            if not any(fqn.startswith(f"{path}.") for fqn in self.owners.experts):
                continue
            numbers = {id(m): i for i, m in enumerate(dict.fromkeys(modules))}
            return Refused(
                f"{path} holds {len(numbers)} modules as {len(modules)} experts: two of them share all parameters",
                culprits=(path,),
                source=self._source,
                remedy="keep each module once, and map the selected experts by a buffer: ids = self.table[ids], with "
                f"table = torch.tensor({[numbers[id(m)] for m in modules]})",
            )
        return None

    def _explain_one_expert(self) -> Refused | None:
        if not is_all_or_none(self.owners, self.summands):
            return None
        return Refused(ONE_EXPERT, source=self._source, remedy=NO_SECOND_EXPERT)

    def _explain_all_experts(self) -> Refused | None:
        if not uses_all_experts(self.owners, self.summands):
            return None
        return Refused(
            "every expert is applied to every token: gates without a selection leave nothing to skip",
            source=self._source,
            remedy="select experts per token, for example with topk",
        )

    def _explain_mixed_results(self) -> Refused | None:
        """Explain that a summand contains the results of several experts, such as their maximum."""
        for summand in (summand for summands in self.summands for summand in summands):
            if len(experts := sorted(self.owners.find_experts(summand))) > 1:
                return Refused(
                    f"a token's results of experts {experts[0]} and {experts[1]} are combined by something else than "
                    "a sum, one expert reads the result of the other, or they share a parameter",
                    source=self._source,
                    remedy="compute each expert from the token's own row with its own parameters, and add up the "
                    "results, each times its routing weight",
                    cause=Cause.UNEXPLAINED_INDEX,
                )
        return None

    def _explain_partial_choices(self) -> Refused | None:
        """Explain that a line runs several times, and each time selects experts for a part of the tokens."""
        tokens = math.prod(self.cut.meta["val"].shape[:-1])
        runs: dict[Line, list[fx.Node]] = defaultdict(list)
        for n in self._capture.nodes:
            val = n.meta.get("val")
            if not isinstance(val, torch.Tensor) or isinstance(val, FakeTensor) or n in self.expert_nodes:
                continue
            if val.dtype is torch.int64 and val.dim() and find_float_decisions(n):
                runs[line(n)].append(n)
        for parts in runs.values():
            if len(parts) > 1 and sum(len(n.meta["val"]) for n in parts) == tokens == self._capture.sizes.tokens:
                return Refused(
                    f"the tokens are split into {len(parts)} chunks with a separate selection each",
                    culprits=tuple(
                        dict.fromkeys(get_op_name(decision) for n in parts for decision in find_float_decisions(n))
                    ),
                    source=str(parts[0].meta["source"]),
                    remedy="select for all tokens at once, or move the code of one chunk into a module; "
                    "torch.compile(model, backend='moefx') rewrites each chunk separately",
                )
        return None

    def _explain_several_gates(self) -> Refused | None:
        """Explain that each module with expert parameters is called several times, for as many selections."""
        modules = {fqn.rpartition(".")[0] for fqn in self.owners.experts}
        calls = Counter(call.fqn for call in self._capture.calls if call.fqn in modules)
        selections = Counter(get_op_name(n) for n in self._capture.nodes if get_op_name(n) in _EXPERT_SELECTION_OPS)
        if not modules:
            return None
        times = min(*(calls[module] for module in modules), max(selections.values(), default=0))
        if times < 2:
            return None
        return Refused(
            f"the same experts are applied {times} times, with {times} separate selections",
            source=self._source,
            remedy="put each selection and its sum into a module of its own, and share the list of experts",
        )

    def _explain_repeated_sums(self) -> Refused | None:
        """Explain that each token adds the results of each of its experts several times."""
        uses = {n for parts in self.summands for n in Counter(map(self.owners.find_key, parts)).values()}
        if len(uses) != 1 or (times := uses.pop()) < 2:
            return None
        return Refused(
            f"each token's experts are applied to it {times} times, for {times} sums",
            source=self._source,
            remedy="apply them once, and add up the routing weights of the sums: mix(x, w1 + w2, ids)",
        )

    def _explain_separate_selections(self) -> Refused | None:
        """Explain that several selections choose among the experts, each for all tokens."""
        tokens = math.prod(self.cut.meta["val"].shape[:-1])
        selections = [
            n
            for n in self._capture.nodes
            if get_op_name(n) in _EXPERT_SELECTION_OPS
            and n not in self.expert_nodes
            and math.prod(n.all_input_nodes[0].meta["val"].shape[:-1]) == tokens
        ]
        if len(selections) < 2:
            return None
        return Refused(
            f"the experts of a token follow from {len(selections)} separate selections",
            culprits=tuple(dict.fromkeys(map(get_op_name, selections))),
            source=str(selections[0].meta["source"]),
            remedy="select for all tokens at once, ids = torch.where(is_image[:, None], image_ids, text_ids), or put "
            "each selection and its sum into a module of its own",
            cause=Cause.UNEXPLAINED_INDEX,
        )

    def _explain_element_move(self) -> Refused | None:
        """Explain that an op on rows of some tokens moves elements along their last axis."""

        def varies_within_rows(n: fx.Node) -> bool:
            if not isinstance(n.meta.get("val"), FakeTensor) or not n.meta["val"].dim():
                return False
            term = self.uses.semantics.get_term(n)
            return len(term.shape) - 1 in routed_axes(self.uses.terms, term)

        # if single elements move, some expert parameters are not recognised, and `expert_nodes` lacks their users
        for n in (n for n in self._capture.nodes if n in self.expert_nodes or n.meta.get("ragged")):
            inputs = n.all_input_nodes
            if (
                not inputs
                or get_op_name(n) in _JOINS
                or not varies_within_rows(n)
                or any(map(varies_within_rows, inputs))
            ):
                continue
            name = get_op_name(n.args[0] if get_op_name(n) == "getitem" else n)  # type: ignore[arg-type]
            return Refused(
                f"the experts move single elements within a row: {name} along the last axis is not supported",
                culprits=(name,),
                source=str(n.meta["source"]),
                remedy="compute with whole rows, by matrix products and element-wise operations",
                cause=Cause.SINGLE_ELEMENTS,
            )
        return None

    def _explain_shared_choices(self) -> Refused | None:
        """Explain that several experts always have the same tokens."""
        tokens: dict[OwnerKey, set[int]] = defaultdict(set)
        for t, parts in enumerate(self.summands):
            for part in parts:
                tokens[self.owners.find_key(part)].add(t)
        sizes = Counter(frozenset(used) for used in tokens.values()).values()
        if len(sizes) < 2 or min(sizes) < 2:
            return None
        return Refused(
            f"{min(sizes)} mixtures of different experts share one selection",
            source=self._source,
            remedy="give each mixture its own module and selection, or concatenate the hidden units of the experts "
            "that share one",
        )

    def _explain_separate_masks(self) -> Refused | None:
        """Explain that each expert has a mask of its own: a comparison of floats on one line, or an argument."""
        tokens = tuple(self.cut.meta["val"].shape[:-1])
        by_line: dict[Line | None, list[fx.Node]] = defaultdict(list)
        for n in self._capture.nodes:
            val = n.meta.get("val")
            if n in self.expert_nodes or not isinstance(val, torch.Tensor) or val.dtype is not torch.bool:
                continue
            if tuple(val.shape) not in (tokens, (math.prod(tokens),)):
                continue
            if find_float_decisions(n):
                by_line[line(n)].append(n)
            elif depends_on_arguments(n) and any(get_op_name(user) in _MASKED_OPS for user in n.users):
                by_line[None].append(n)
        masks = next((masks for masks in by_line.values() if len(masks) > 1), None)
        if masks is None:
            return None
        first = masks[0]
        is_used_argument = first.op == "placeholder" and first.users
        source = str((next(iter(first.users)) if is_used_argument else first).meta["source"])
        if find_float_decisions(first):
            return Refused(
                f"each expert's tokens follow from a comparison of its own ({len(masks)} on this line)",
                source=source,
                remedy="compare the scores of all experts at once, as in mask = scores > 0, and use mask[:, e]",
            )
        return Refused(
            f"each expert's tokens follow from a mask of its own ({len(masks)} masks)",
            source=source,
            remedy="make one mask for all experts, mask = torch.stack(masks, -1), and add each expert's results "
            "for its tokens: here = mask[..., e]; out[here] += expert(x[here])",
        )
