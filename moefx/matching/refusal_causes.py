"""Explain a refusal by a cause elsewhere in the program: a random order, experts that mix positions, a count limit."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..capture.environment.code_locations import suppress_program_errors
from ..capture.sizes.routed_numbers import is_emptiness_test
from ..capture.tracing.capture_result import Capture
from ..capture.tracing.concrete_routing import Routing
from ..errors import Cause, MoefxError, Refused
from ..ir.node_values import get_op_name
from ..util.tensor_trees import is_float
from .facts.graph_nodes import depends_on_routing, find_buffers
from .facts.host_comparisons import find_comparison
from .facts.op_classes import CONTRACTIONS_OF_ROWS, ORDERED, RANDOM_INTEGERS, RECURRENCES
from .interventions.forced_outcome import DECIDE_OUTSIDE, READ_NO_TABLE, refuse_limit
from .lift.canonical_form import CanonicalForm
from .terms.parameter_slices import ParameterSlice

if TYPE_CHECKING:
    from .proof.proof_state import ProofState

_PERMUTING_SEED = 2  # its routing permutes the values of integer buffers


def explain_refusal(capture: Capture, positions: int | None) -> Refused | None:
    """Return a refusal that names the cause, or None.

    Args:
        positions: length of the sequences in this capture, or None if there is one token axis.
    """
    if (drawn := _find_random_order(capture)) is not None:
        return Refused(
            f"tokens or choices are taken in a random order: {drawn.meta['source'].text}",
            culprits=(get_op_name(drawn),), source=str(drawn.meta["source"]),
            remedy="take them as they come; to drop some at random, multiply the routing weights by a random mask: "
            "weights * (torch.rand_like(weights) >= rate)",
        )  # fmt: skip
    if positions is not None and (mixing := _find_mixing(capture, positions)) is not None:
        return Refused(
            "each sample chooses experts for all of its positions, and the experts compute with several positions at "
            "once: only experts that treat positions one by one are followed",
            culprits=(get_op_name(mixing),), source=str(mixing.meta["source"]),
            remedy="for experts that take the whole series of one channel, make rows of the channels, "
            "x.transpose(1, 2).flatten(0, 1), and repeat each sample's choice for them, "
            "ids.repeat_interleave(channels, 0); experts that convolve or attend along the series stay as they are",
            cause=Cause.MIXED_POSITIONS,
        )  # fmt: skip
    if (convolution := _find_convolution(capture)) is not None:
        kernel = "x".join(map(str, convolution.args[1].meta["val"].shape[2:]))  # type: ignore[union-attr]
        return Refused(
            f"the experts are convolutions that compute a token from its neighbours ({kernel}): only experts that "
            "treat tokens one by one are followed",
            culprits=(get_op_name(convolution),), source=str(convolution.meta["source"]),
            remedy="convolve before the experts are chosen, and give them rows of the pixels, "
            "x.movedim(1, -1).flatten(0, -2)",
            cause=Cause.CONVOLUTIONS,
        )  # fmt: skip
    return None


def explain_limit(capture: Capture) -> Refused | None:
    """Return a refusal that names the comparison of a token count that decides whether an expert runs, or None."""
    for read in capture.reads:
        comparison = find_comparison(read)
        if comparison is None or not comparison.depends_on_routing or comparison.op not in ORDERED:
            continue
        if type(comparison.other) in (int, float) and not is_emptiness_test(comparison.op, comparison.other):
            return refuse_limit(read.source)
    return None


def explain_branch(proof: ProofState) -> Refused | None:
    """Return a refusal that names the buffer whose value disables the selection of experts, or None."""
    diagnosed = proof.evidence.diagnosed_capture
    if diagnosed is None or proof.evidence.forms:
        return None
    routing, sizes = diagnosed.routing.restart(), diagnosed.sizes.dims
    for read in diagnosed.reads:
        if type(read.value) is bool and (buffers := find_buffers(read)):
            with suppress_program_errors(MoefxError):
                proof.capture_and_lift(routing, sizes, {read.call_stack: not read.value})
                return Refused(
                    f"the buffer {', '.join(buffers)} decides whether experts are chosen, and none are with its value: "
                    f"{read.source.text}",
                    source=str(read.source),
                    remedy=DECIDE_OUTSIDE,
                )
    return None


def explain_table(proof: ProofState) -> Refused | None:
    """Return a refusal that names the integer buffers by which Python code chooses the modules of the experts, or None.

    One routing is captured with the values of the buffers, and with these permuted: an expert then uses the parameters
    of another one.
    """
    diagnosed = proof.evidence.diagnosed_capture
    tables = [
        name for name, t in proof.block.named_buffers() if not is_float(t) and t.dtype is not torch.bool and t.dim()
    ]
    if diagnosed is None or not tables:
        return None
    forms: list[CanonicalForm] = []
    for keep_values in (True, False):
        with suppress_program_errors(MoefxError):
            routing = Routing("diverse", seed=_PERMUTING_SEED, keep_values=keep_values)
            captured = proof.capture(routing, diagnosed.sizes.dims)
            forms.append(proof.lift(captured, follows_evidence=False))
    if len(forms) < 2 or not _use_other_parameters(*forms):
        return None
    return Refused(
        f"Python reads a buffer to choose which module runs for an expert's tokens ({', '.join(tables)})",
        culprits=tuple(tables),
        source=str(forms[0].cut.meta["source"]),
        remedy=READ_NO_TABLE,
    )


def _use_other_parameters(a: CanonicalForm, b: CanonicalForm) -> bool:
    """Return whether two captures select by other nodes, or an expert of both uses other parameters."""
    parts_a, parts_b = _collect_parameters(a), _collect_parameters(b)
    differs = any(parts_a[e] != parts_b[e] for e in parts_a.keys() & parts_b.keys())
    return differs or a.expert_index.position != b.expert_index.position


def _collect_parameters(form: CanonicalForm) -> dict[int, set[ParameterSlice]]:
    parts: dict[int, set[ParameterSlice]] = defaultdict(set)
    for table in (table for group in form.groups for table in group.tables):
        for e, part in table.items():
            parts[e].add(part)
    return parts


def _find_random_order(capture: Capture) -> fx.Node | None:
    """Find an op that draws integers by which rows are read or written."""
    for n in capture.nodes:
        if get_op_name(n) in RANDOM_INTEGERS and not any(
            a.meta.get("from_integers") is False for a in n.all_input_nodes
        ):
            users, seen = [n], {n}
            while users:
                for user in users.pop().users:
                    if get_op_name(user).startswith(("index", "gather", "scatter", "embedding")):
                        return n
                    if user not in seen:
                        seen.add(user)
                        users.append(user)
    return None


def _find_mixing(capture: Capture, positions: int) -> fx.Node | None:
    """Find an op that computes with several positions of the samples of an expert, if each sample selects experts."""
    if not any(map(functools.partial(_is_per_sample, capture.sizes.tokens, positions), capture.nodes)):
        return None
    for n in capture.nodes:
        data = n.all_input_nodes[0] if n.op == "call_function" and n.all_input_nodes else None
        val: Any = data.meta.get("val") if data is not None else None
        if data is None or not data.meta.get("ragged") or not isinstance(val, torch.Tensor) or val.dim() < 2:
            continue
        name, shape = get_op_name(n), val.shape
        if (
            (name in CONTRACTIONS_OF_ROWS and shape[-1] == positions)
            or (name == "convolution" and positions in shape[2:] and max(n.args[1].meta["val"].shape[2:]) > 1)  # type: ignore
            or ("scaled_dot_product" in name and shape[-2] == positions)
            or (name in RECURRENCES and positions in shape[:2])
        ):
            return n
    return None


def _find_convolution(capture: Capture) -> fx.Node | None:
    """Find one of several parallel convolutions with kernels above one element: on one input, or on routed rows."""
    first: dict[fx.Node | None, fx.Node] = {}  # by input; None for routed rows
    for n in capture.nodes:
        if get_op_name(n) == "convolution" and max(n.args[1].meta["val"].shape[2:]) > 1:  # type: ignore[union-attr]
            data = n.args[0]
            key = None if data.meta.get("ragged") else data  # type: ignore[union-attr]
            if key in first:
                return first[key]
            first[key] = n  # type: ignore[index]
    return None


def _is_per_sample(tokens: int, positions: int, node: fx.Node) -> bool:
    """Return whether a node holds one integer, or a few, per sample."""
    val: Any = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.is_floating_point() or val.dtype == torch.bool:
        return False
    has_sample_axis = val.dim() in (1, 2) and val.shape[0] * positions == tokens
    return has_sample_axis and depends_on_routing(node) and tuple(val.shape[1:]) != (positions,)


__all__ = ["explain_branch", "explain_limit", "explain_refusal"]
