"""Check one rewrite numerically, on random arguments of a few tokens and of many."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.environment.worker_thread import run_in_worker
from ..capture.search.skipped_calls import patch_skipped_calls
from ..capture.state.outside_state import keep_outside_state
from ..capture.state.side_effects import keep_random_state, silence_hooks
from ..comparison.block_check import check_block
from ..comparison.sandbox import Call, Casts, Inputs, RunOptions, execute, make_sandbox
from ..errors import summarize_error
from ..ir import op_providers
from ..ir.argument_binding import find_device, flatten_arguments, make_signature_binder
from ..matching.facts.guarded_sizes import find_sequence
from ..util.single_thread import use_one_thread
from .block_compiler import BlockRewrite

_SMALL_PARAMETER = 1 << 14  # elements
_CROWD_TOKENS = 521  # more than the proof used
_TRAINING_TOKENS = 8192  # of a call whose kernels are compiled before the first step


class Outcome(enum.Enum):
    """What a numeric check has found.

    Attributes:
        AGREES: at least one value was compared, and none differs.
        DIFFERS: a value differs.
        NOT_COMPARED: no value was compared.
    """

    AGREES = enum.auto()
    DIFFERS = enum.auto()
    NOT_COMPARED = enum.auto()


@dataclasses.dataclass(frozen=True)
class NumericCheck:
    """The result of a numeric check. `text` says it in words, for `explain`."""

    outcome: Outcome
    text: str


def check_numerically(block: nn.Module, result: BlockRewrite, name: str, seconds: float) -> NumericCheck:
    """Compare a rewrite with the original on a few tokens. `block` runs as the original."""

    def check() -> NumericCheck:
        with use_one_thread() if _has_small_parameters(block) else contextlib.nullcontext():
            return _run_numeric_check(block, result, name, seconds)

    return run_in_worker(check)


def _run_numeric_check(block: nn.Module, result: BlockRewrite, name: str, seconds: float) -> NumericCheck:
    """Compare block and rewrite on random arguments, without effects on the block or the random state."""
    args, kwargs = _make_random_arguments(block, result)
    crowded_arguments = _make_many_tokens(block, result, _CROWD_TOKENS, similar=True) if _is_small(block) else None
    fn, joined_fn = result.graph.compile(), result.graph.compile(join=True)
    bind_placeholders = _make_placeholder_binder(block, result)

    def run_program(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fn(block, *bind_placeholders(*args, **kwargs))

    def run_joined(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return joined_fn(block, *bind_placeholders(*args, **kwargs))

    try:
        with (
            keep_random_state(),
            silence_hooks(block),
            keep_outside_state(block),
            patch_skipped_calls(block, result.skipped),
        ):
            _compile_kernels(block, result, run_program, (args, kwargs))
            check = check_block(
                block, run_program, args, kwargs,
                joined=None if joined_fn is fn else run_joined, name=name, crowd=crowded_arguments, seconds=seconds,
            )  # fmt: skip
    except Exception as error:
        return NumericCheck(Outcome.NOT_COMPARED, f"could not run: {summarize_error(error)[:160]}")
    if not check.ok:
        reason = f"the rewritten block does not agree with the original: {check.reason}"
        return NumericCheck(Outcome.DIFFERS, reason)
    if not check.rows:
        return NumericCheck(Outcome.NOT_COMPARED, "; ".join(["compared no value", *check.notes]))
    worst = max(row.error for row in check.rows)
    dtype_note = next((note for note in check.notes if "compared in" in note), "").partition(": ")[2]
    text = f"agrees in {len(check.rows)} comparisons, worst error {worst:.1e}" + (
        f"; {dtype_note}" if dtype_note else ""
    )
    return NumericCheck(Outcome.AGREES, text)


def _compile_kernels(block: nn.Module, result: BlockRewrite, program: Call, few_tokens: Inputs) -> None:
    """Compile the kernels of a program together, on a GPU: its first runs compile them one after the other.

    Kernels differ between numbers of tokens, so these are the kernels of the check and those of a usual training step.
    """
    if find_device(block).type != "cuda":
        return

    def compile_for(inputs: Inputs) -> None:
        execute(make_sandbox(block, Casts(None)), inputs, RunOptions(), call=program)

    with op_providers.compile_ahead() as is_useful:
        if not is_useful:
            return
        with contextlib.suppress(Exception):  # the check reports its errors
            compile_for(few_tokens)
        with contextlib.suppress(Exception):  # they may not fit in memory
            if (many_tokens := _make_many_tokens(block, result, _TRAINING_TOKENS)) is not None:
                compile_for(many_tokens)


def find_nonfinite(block: nn.Module) -> tuple[str, str] | None:
    """Return the reason and the remedy if a block cannot be compared because weights are NaN or infinite, else None."""
    for name, t in (*block.named_parameters(), *block.named_buffers()):
        if t.is_floating_point() and (count := int((~t.detach().isfinite()).sum())):
            return (
                f"{count} of the {t.numel()} values of {name} are NaN or infinite: the rewritten block cannot be "
                "compared with the original",
                "load finite weights, or pass plan=Plan(validation='symbolic') to compile without a comparison",
            )
    return None


def _has_small_parameters(block: nn.Module) -> bool:
    """Return whether ops on a few tokens end before a second thread has woken, as for hundreds of small experts."""
    sizes = [p.numel() for p in block.parameters()]
    return sum(sizes) <= _SMALL_PARAMETER * len(sizes)


def _is_small(block: nn.Module) -> bool:
    """Return whether a block runs on hundreds of tokens quickly."""
    return sum(p.numel() for p in block.parameters()) <= 1 << 24


def _make_random_arguments(block: nn.Module, result: BlockRewrite) -> Inputs:
    """Make random arguments for the numeric check: a few tokens, on the device of the weights."""
    arguments, guards = result.match.arguments, result.match.guards
    candidate_sizes = [arguments.choose_sizes(tokens) for tokens in (24, 12, 48, 6, 96)] + result.match.sizes
    sizes = next((s for s in candidate_sizes if all(g.holds(s) for g in guards)), candidate_sizes[0])
    return _fill_arguments(block, result, sizes)


def _make_many_tokens(block: nn.Module, result: BlockRewrite, tokens: int, similar: bool = False) -> Inputs | None:
    """Make random arguments of `tokens` tokens or a few more; None if the guards exclude this number.

    Args:
        similar: make most tokens similar, so that some experts get hundreds.
    """
    sizes = find_sequence(result.match.arguments, result.match.guards, tokens)
    if not all(guard.holds(sizes) for guard in result.match.guards):
        return None
    return _fill_arguments(block, result, sizes, similar)


def _fill_arguments(block: nn.Module, result: BlockRewrite, sizes: dict[str, int], similar: bool = False) -> Inputs:
    arguments, device = result.match.arguments, find_device(block)
    args, kwargs = arguments.build_call(sizes)
    generator = torch.Generator().manual_seed(0)

    def make_real(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t.to(device)
        value = torch.randn(t.shape, generator=generator, dtype=torch.float32)
        if similar and t.dim() > arguments.feature:
            value = _concentrate_rows(value.movedim(arguments.feature, -1)).movedim(-1, arguments.feature)
        return value.to(device, t.dtype).requires_grad_()

    return pytree.tree_map_only(torch.Tensor, make_real, (args, kwargs))


def _concentrate_rows(x: torch.Tensor) -> torch.Tensor:
    """Make two thirds of the rows nearly equal, so that a router sends them to the same experts."""
    rows = x.reshape(-1, x.shape[-1]).clone()
    similar_rows = rows[: 2 * len(rows) // 3]
    similar_rows.mul_(0.05).add_(rows[-1])
    return rows.reshape(x.shape)


def _make_placeholder_binder(block: nn.Module, result: BlockRewrite) -> Any:
    """Return a function from the arguments of a call to the values of the placeholders."""
    bind, paths = make_signature_binder(block), result.graph.binding.paths

    def bind_placeholders(*args: Any, **kwargs: Any) -> list[Any]:
        values = dict(flatten_arguments(bind(*args, **kwargs), result.graph.binding.objects))
        return [values[p] for p in paths]

    return bind_placeholders


__all__ = ["NumericCheck", "Outcome", "check_numerically", "find_nonfinite"]
