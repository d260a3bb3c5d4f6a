"""Compare the routing of a recomputed forward with the routing of the first forward.

`torch.utils.checkpoint` runs the forward again inside the backward. If the router then selects other experts (its bias
moved, or noise is drawn anew), the saved tensors belong to other rows. torch compares only shapes, and the shapes of
the dialect's tensors do not depend on the routing.

So each op also stores the routing of its forward in its autograd node, which saved-tensor hooks do not replace. Its
backward compares when it gets another tensor. Compiled graphs have torch's own autograd nodes: there `build_pft`
stores its result on the frame of the checkpoint that runs it, and compares when it runs again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from ...errors import RecomputedChoice
from ..running_block import running

# Arguments of ops: the token of each row, and the first row of each expert or rank.
_TOKENS, _OFFSETS = ("token_ids",), ("expert_offsets", "rank_offsets")
_CHOICES, _FORWARD = "moefx_choices", "forward"


class RecomputedChoiceError(RecomputedChoice, CheckpointError):
    """Also a `CheckpointError`, for code that handles torch's own error about recomputations."""


class RoutingChoice(NamedTuple):
    """The routing tensors of an op's forward, and their positions among the op's saved tensors."""

    name: str
    positions: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def routing_arguments(names: Sequence[str]) -> tuple[int, ...]:
    """Return the positions of the routing arguments: token ids first, if the op has them, then offsets."""
    return tuple(names.index(name) for name in (*_TOKENS, *_OFFSETS) if name in names)


def record_routing(op: str, arguments: Sequence[Any], saved: Sequence[Any]) -> RoutingChoice | None:
    """Return the routing of a forward, from the arguments that its op saves; None in a trace."""
    saved_arguments = [(i, a) for a in arguments for i, s in enumerate(saved) if s is a]
    if not saved_arguments or any(type(tensor) is not Tensor for _, tensor in saved_arguments):
        return None
    positions, tensors = zip(*saved_arguments, strict=True)
    return RoutingChoice(running.block or f"moefx::{op}", positions, tensors)


def require_same_routing(choice: RoutingChoice, saved: Sequence[Any]) -> None:
    """Raise `RecomputedChoice` if the saved tensors hold another routing than the forward had.

    Costs nothing while the tensors are identical. On a GPU the host reads the result after the whole backward is
    enqueued, and `backward()` raises.
    """
    current = tuple(saved[i] for i in choice.positions)
    if any(type(t) is not Tensor for t in current):
        return
    if any(a is not b for a, b in zip(current, choice.tensors, strict=True)):
        _compare(choice, current)


def observe_pft(pft: Sequence[Tensor]) -> None:
    """Store the result of `build_pft` with the checkpoint that runs it. In the recomputation, compare with it."""
    pack = _top_pack_hook()
    if pack is None or any(type(t) is not Tensor for t in pft):
        return
    closure = {name: cell.cell_contents for name, cell in zip(pack.__code__.co_freevars, pack.__closure__, strict=True)}
    tensors = pft[0], pft[2]
    if "target_frame_ref" in closure:
        choices = vars(closure["target_frame_ref"]()).get(_CHOICES, {})
        index = choices.setdefault(closure["gid"], 0)  # PFTs that this recomputation has built so far
        choices[closure["gid"]] += 1
        if index < len(choices[_FORWARD]):
            _compare(choices[_FORWARD][index], tensors)
    elif "frame" in closure:
        choices = vars(closure["frame"]).setdefault(_CHOICES, {_FORWARD: []})
        choices[_FORWARD].append(RoutingChoice(running.block or "moefx::build_pft", (), tensors))


def _top_pack_hook() -> Any:
    """Return the function with which `torch.utils.checkpoint` packs saved tensors now, or None."""
    private = getattr(torch._C, "_autograd", None)
    find = getattr(private, "_top_saved_tensors_default_hooks", None)
    hooks = None if find is None else find(True)
    if not hooks:
        return None
    pack = inspect.unwrap(hooks[0])
    is_checkpoint = getattr(pack, "__module__", "") == "torch.utils.checkpoint" and hasattr(pack, "__code__")
    return pack if is_checkpoint and pack.__closure__ else None


def _compare(choice: RoutingChoice, current: Sequence[Tensor]) -> None:
    with torch.no_grad():
        differs = _differs(choice.tensors, current)
    if isinstance(differs, Tensor) and not _is_on_host(differs):
        _raise_after_backward(choice, current, differs)
    elif differs:
        raise _error(choice, current)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _differs(first: Sequence[Tensor], current: Sequence[Tensor]) -> Tensor | bool:
    """Return whether two routings differ in a valid row. The tail after the last offset may hold any values."""
    if any(a.shape != b.shape for a, b in zip(first, current, strict=True)):
        return True
    *tokens, offsets = first
    *tokens_now, offsets_now = current
    differs = (offsets != offsets_now).any()
    for a, b in zip(tokens, tokens_now, strict=True):
        row = torch.arange(a.shape[0], dtype=offsets.dtype, device=a.device)
        differs |= ((a != b) & (row < offsets[-1])).any()
    return differs


def _raise_after_backward(choice: RoutingChoice, current: Sequence[Tensor], differs: Tensor) -> None:
    if _is_capturing():  # a replay runs without the host
        torch.ops.aten._assert_async.msg(~differs, str(_error(choice, None)))
        return

    def check() -> None:
        if differs:
            raise _error(choice, current)

    torch.autograd.Variable._execution_engine.queue_callback(check)


def _error(choice: RoutingChoice, current: Sequence[Tensor] | None) -> RecomputedChoice:
    seen = "other rows"
    if current is not None and len(current) == len(choice.tensors) == 2:
        first, second = (_number_pairs(*tensors) for tensors in (choice.tensors, current))
        num_changed = int((~torch.isin(first, second)).sum())
        seen = f"{num_changed} of {first.numel()} rows to other experts"
    return RecomputedChoiceError(
        f"{choice.name}: the forward was run again for the backward, and routed {seen} than the first time; the "
        "gradients would be wrong. The router must read the same values in both: move its bias after the backward or "
        "outside of the checkpoint, keep the random state (preserve_rng_state=True), or save the first routing: "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, "
        "context_fn=functools.partial(create_selective_checkpoint_contexts, moefx.save_routing))"
    )


def _number_pairs(token_ids: Tensor, offsets: Tensor) -> Tensor:
    """Return token * num_experts + expert for each valid row."""
    sizes = offsets.diff().long()
    expert = torch.arange(sizes.shape[0], device=sizes.device).repeat_interleave(sizes)
    return token_ids[: expert.shape[0]].long() * sizes.shape[0] + expert
