"""Decide when a rewrite is checked numerically, and what follows: for `compile`, later programs and flat graphs.

| case | what follows |
|---|---|
| `Plan(validation="symbolic")` | the rewrite is used without a check |
| the weights have no values, or the caller names another obstacle | the same |
| the time budget is spent, and `Plan(validation="auto")` | the same |
| the check cannot run, or compares no value | the same, with a warning |
| all compared values agree | the rewrite is used |
| values differ, and the weights are NaN or infinite | an equal block with finite weights is checked; else as below |
| values differ | the rewrite is refused |
"""

from __future__ import annotations

import dataclasses
import logging
import time
import warnings
from collections.abc import Callable, Mapping

from torch import nn

from .._plan import Plan
from ..errors import Refused
from ..util.progress import announce
from .block_compiler import BlockRewrite
from .numeric_check import NumericCheck, Outcome, check_numerically, find_nonfinite

_MIN_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of the policy for a rewrite that is used.

    Attributes:
        text: in words, for `explain`.
        could_not_run: a check was due and could not run: the caller warns.
    """

    text: str
    could_not_run: bool = False

    def warn_if_unchecked(self, subject: str) -> None:
        """Warn if a check was due and could not run. `subject` names the rewrite: "'mlp' for a new kind of call"."""
        if self.could_not_run:
            warnings.warn(
                f"moefx rewrote {subject} without a numeric check, on the strength of the symbolic proof alone: "
                f"{self.text}",
                stacklevel=3,
            )


class CheckPolicy:
    """Applies the table above to rewrites.

    The rewrites of one policy share `plan.validation_seconds`. `compile` makes one policy for all blocks. Each later
    program and each region of a graph has its own policy, with the whole budget.
    """

    def __init__(self, plan: Plan):
        self.plan, self.seconds_left = plan, plan.validation_seconds

    def check(
        self,
        get_blocks: Callable[[], Mapping[str, nn.Module]],
        result: BlockRewrite,
        *,
        obstacle: str = "",
        source: str = "",
    ) -> Verdict:
        """Check a rewrite as the plan says.

        Args:
            get_blocks: returns the blocks that the rewrite is for, by name. All have the same structure: one is
                checked. It is not called if no check is due.
            obstacle: why the caller has no values to compare, if it has none.
            source: the user's line, for a refusal.

        Raises:
            Refused: the rewrite differs from the block.
        """
        verdict = self._check(get_blocks, result, obstacle, source)
        _log.info("moefx: numeric check of %s: %s", result.history.name or "the model", verdict.text)
        return verdict

    def _check(
        self, get_blocks: Callable[[], Mapping[str, nn.Module]], result: BlockRewrite, obstacle: str, source: str
    ) -> Verdict:
        plan = self.plan
        if plan.validation == "symbolic":
            return Verdict("off (plan.validation)")
        if obstacle:
            return Verdict(f"skipped, {obstacle}")
        blocks = get_blocks()
        name, block = next(iter(blocks.items()))
        if any(t.is_meta for t in (*block.parameters(), *block.buffers())):
            return Verdict("skipped, the weights are on the meta device")
        if self.seconds_left <= 0 and plan.validation == "auto":
            return Verdict("skipped, the time budget is spent")
        start = time.perf_counter()
        try:
            check = self._run(name, block, result)
            if check.outcome is Outcome.DIFFERS and (nonfinite := find_nonfinite(block)) is not None:
                finite = next((item for item in blocks.items() if find_nonfinite(item[1]) is None), None)
                if finite is None:
                    reason, remedy = nonfinite
                    raise Refused(reason, source=source, remedy=remedy)
                check = self._run(*finite, result)
        finally:
            self.seconds_left -= time.perf_counter() - start
        if check.outcome is Outcome.DIFFERS:
            raise Refused(check.text, source=source, remedy="please report this model")
        return Verdict(check.text, could_not_run=check.outcome is Outcome.NOT_COMPARED)

    def _run(self, name: str, block: nn.Module, result: BlockRewrite) -> NumericCheck:
        announce(f"running {name or type(block).__name__} on a few tokens")
        return check_numerically(block, result, name, max(self.seconds_left, _MIN_SECONDS))


__all__ = ["CheckPolicy", "Verdict"]
