"""Change attributes that a call leaves behind, and capture the next call.

Protects from a call that depends on the call before it::

    weights, chosen = self.router(x).softmax(-1).topk(2)
    if self.last is not None:
        weights = 0.9 * weights + 0.1 * self.last
    self.last = weights.mean()

A capture starts from the attributes that the user has set, so it does not show the second call. The probe puts other
values there, captures again, and refuses the block if the form or the operations change. Buffers are read when the call
runs, but a capture takes their shapes as fixed: those that get another shape are changed, too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import Refused

if TYPE_CHECKING:
    from ..proof.proof_view import ProofView


def vary_state_between_calls(proof: ProofView) -> None:
    """Change the attributes that a call leaves behind, and require the form of the next call to be the same.

    Raises:
        Refused: the next call depends on these attributes.
    """
    reference = proof.evidence.reference
    capture = reference.capture
    buffers = dict(proof.block.named_buffers())
    attributes = {str(e.target): e.node for e in capture.effects if e.kind == "attribute"}
    written = {path: node for path, node in attributes.items() if not _has_shape_of(buffers.get(path), node)}
    if not written:
        return
    with contextlib.ExitStack() as stack:
        for path, node in written.items():
            owner, _, key = path.rpartition(".")
            module = proof.block.get_submodule(owner)
            values: dict[str, Any] = module._buffers if path in buffers else vars(module)
            if key in values:  # restore it at the end
                stack.callback(values.update, {key: values[key]})
            else:
                stack.callback(values.pop, key)
            values[key] = pytree.tree_map_only(fx.Node, _change_value, node)
        try:
            again = proof.capture_and_lift(capture.routing.restart(), reference.sizes)
            again = proof.evidence.require_same_form(again)
        except Refused as refusal:
            raise _refuse_carried(written) from refusal
    names = [[str(n.target) for n in c.nodes if n.op == "call_function"] for c in (capture, again.capture)]
    if names[0] != names[1] and any(n.op == "get_attr" and n.meta["fqn"] in written for n in again.capture.nodes):
        raise _refuse_carried(written)


def _has_shape_of(buffer: torch.Tensor | None, node: Any) -> bool:
    """Return whether the call leaves a buffer with the shape that it had."""
    return buffer is not None and isinstance(node, fx.Node) and node.meta["val"].shape == buffer.shape


def _refuse_carried(written: dict[str, Any]) -> Refused:
    node = next((n for n in pytree.tree_leaves(written) if isinstance(n, fx.Node)), None)
    return Refused(
        "the block reads an attribute that its previous call has set",
        culprits=tuple(written),
        source=str(node.meta["source"]) if node is not None else "",
        remedy="compute it in every call; to use one choice in several blocks, return it and pass it on as an argument",
    )


def _change_value(node: fx.Node) -> torch.Tensor:
    val = node.meta["val"]
    return _draw_floats(val) if isinstance(val, FakeTensor) else val.clone()


def _draw_floats(val: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # leaves the user's generator alone
    return torch.randn(val.shape, generator=generator, dtype=torch.float32).to(val.dtype)
