"""Causes of a refusal that lie before the place where the match failed: random orders, experts that mix positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...capture.captured import Capture
from ...errors import Refused
from .nodes import op_name
from .routed import chooses_for_sequences

MIXING = (
    "each sample chooses experts for all of its positions, and the experts compute with several positions at once: "
    "only experts that treat positions one by one are followed"
)
_RANDOM_ORDERS = {"randperm", "randint", "multinomial"}
_PRODUCTS = {"addmm", "bmm", "linear", "matmul", "mm"}
_RECURRENCES = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
_ATTENTION = {"scaled_dot_product_attention"}


def explain(capture: Capture, positions: int | None) -> Refused | None:
    """A refusal that names the cause, if there is one of these.

    Args:
        positions: how many a sequence has in this capture; None if there is one token axis.
    """
    if (drawn := _random_order(capture)) is not None:
        return Refused(
            f"tokens or choices are picked in a random order, and that order decides what counts: "
            f"{drawn.meta['source'].text}",
            culprits=(op_name(drawn),), source=str(drawn.meta["source"]),
            remedy="to drop at random, multiply the routing weights by a random mask: "
            "weights * (torch.rand_like(weights) >= rate)",
        )  # fmt: skip
    if positions is not None and (mixing := _mixing(capture, positions)) is not None:
        return Refused(
            MIXING,
            culprits=(op_name(mixing),), source=str(mixing.meta["source"]),
            remedy="for experts that take the whole series of one channel, make rows of the channels, "
            "x.transpose(1, 2).flatten(0, 1), and repeat each sample's choice for them, "
            "ids.repeat_interleave(channels, 0); experts that convolve or attend along the series stay as they are",
        )  # fmt: skip
    return None


def _random_order(capture: Capture) -> fx.Node | None:
    """What draws integers that rows are taken by, or put in places by."""
    for n in capture.nodes:
        if op_name(n) in _RANDOM_ORDERS and not any(a.meta.get("known") is False for a in n.all_input_nodes):
            users, seen = [n], {n}
            while users:
                for user in users.pop().users:
                    if op_name(user).startswith(("index", "gather", "scatter", "embedding")):
                        return n
                    if user not in seen:
                        seen.add(user)
                        users.append(user)
    return None


def _mixing(capture: Capture, positions: int) -> fx.Node | None:
    """What computes with several positions of samples that were picked out, if each sample chooses."""
    if not chooses_for_sequences(capture):
        return None
    for n in capture.nodes:
        data = n.all_input_nodes[0] if n.op == "call_function" and n.all_input_nodes else None
        val: Any = data.meta.get("val") if data is not None else None
        if data is None or not data.meta.get("ragged") or not isinstance(val, torch.Tensor) or val.dim() < 2:
            continue
        name, shape = op_name(n), val.shape
        if (
            (name in _PRODUCTS and shape[-1] == positions)
            or (name == "convolution" and positions in shape[2:] and max(n.args[1].meta["val"].shape[2:]) > 1)  # type: ignore
            or (name in _ATTENTION and shape[-2] == positions)
            or (name in _RECURRENCES and positions in shape[:2])
        ):
            return n
    return None


__all__ = ["MIXING", "explain"]
