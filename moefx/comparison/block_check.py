"""The numeric check of `compile`: run an original block and its rewritten program on a few tokens.

It checks the algebra on weights and routings that the symbolic proof did not choose. Both run in float64 if memory
allows, with every explicit cast promoted, and under the rule with slack: a wrong term is far above 1e-9, and rounding
must not reject a correct rewrite. A run in the block's own precision detects wrong casts, such as a missing upcast.

All these runs are under dispatch modes, which see one op at a time. Eager calls of the compiled model run joined ops
(`ir/graphs/joined_ops.py`), which modes switch off. So one more comparison, of the program with its joined form, has no
mode.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, summarize_error
from .compare import CallChain, Subject
from .policy import Row
from .router_states import UNRELATED, router_states, vary_constants
from .sandbox import Call, Casts, Inputs, RunOptions, call_forward, leaves
from .work_count import WorkCount

SLACK = 1e4
MAX_BYTES = 2 << 30
_MAX_CROWD_SECONDS = 3.0  # seconds, if the work grew with the tokens; counted, so that a busy machine checks the same


@dataclasses.dataclass
class BlockCheck:
    """The outcome for one block.

    Attributes:
        rows: the tensors compared with the original's, over all router states.
        joined_rows: the tensors of the joined program, compared with those of the program that runs op by op.
        notes: omitted comparisons and the reasons: memory, time, or an error of the original.
    """

    rows: list[Row] = dataclasses.field(default_factory=list)
    joined_rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no row failed. Also True if nothing was compared: see `rows` and `notes`."""
        return all(row.ok for row in (*self.rows, *self.joined_rows))

    @property
    def reason(self) -> str:
        """One sentence about the worst mismatch; "" without one."""
        failed = [row for row in (*self.rows, *self.joined_rows) if not row.ok]
        if not failed:
            return ""
        worst = max(failed, key=lambda row: row.error / row.bound if row.bound else math.inf)
        difference = worst.note or f"{worst.norm} error {worst.error:.2g}, allowed {worst.bound:.2g}"
        others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        other = "the same ops one by one" if worst in self.joined_rows else "the original"
        return f"{worst.kind} `{worst.name}` differs from {other} on {worst.case}: {difference}{others}"


def check_block(
    original: nn.Module,
    program: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    name: str = "",
    joined: Call | None = None,
    crowd: Inputs | None = None,
    seconds: float = 30.0,
    max_bytes: int = MAX_BYTES,
    seed: int = 0,
) -> BlockCheck:
    """Compare `program(block, *args, **kwargs)` with `original.forward(*args, **kwargs)`, forward and backward.

    Compares under several router states:

    - the given inputs;
    - inputs that send nearly all tokens to the same experts and starve the others;
    - unrelated inputs of the same scale, with varied values for constant parameters and buffers;
    - `crowd`, inputs of many tokens.

    The original's parameters, `.grad`, buffers and random state do not change. A block that does not run in float64,
    because an op has no float64 kernel, is compared in its own precision.

    If these agree, `joined` is compared with `program` on the given inputs, with gradients and without.

    Args:
        joined: the program as eager calls run it, with joined ops; None if no ops are joined.
        seconds: time limit; the first state and the comparison of `joined` always run.
        max_bytes: memory limit, which determines the precision and the compared gradients.

    Raises:
        InvalidInput: the original raises a RuntimeError, TypeError, ValueError or IndexError on the given inputs. Other
            errors propagate, except those that the original raises on other inputs: they become notes.
    """
    notes: list[str] = []
    inputs = (args, kwargs or {})
    tokens = sum(v.numel() * v.element_size() for _, v in leaves(inputs) if isinstance(v, Tensor))
    exact, *own_precisions = _plan_precisions(original, max_bytes - 64 * tokens, notes)
    check_states = functools.partial(_check_states, original, program, inputs, name, crowd, seconds, seed)
    try:
        check = check_states([exact, *own_precisions], notes)
    except InvalidInput as error:
        if not own_precisions:
            raise
        precision, options, largest = own_precisions[0]
        reason = summarize_error(error.__cause__ or error)
        notes.append(f"{name or 'block'}: not in float64 ({reason}), compared in {precision}")
        check = check_states([(precision, options | {"exact": None}, largest)], notes)
    if joined is not None and check.ok:
        *_, largest = (exact, *own_precisions)[-1]
        options = RunOptions(seed, max_gradient_numel=largest)
        try:
            check.joined_rows = _compare_joined(original, program, joined, inputs, name, options)
        except InvalidInput as error:  # raised by the program without joined ops
            check.notes.append(f"{name or 'block'}: joined ops not checked ({summarize_error(error)})")
    return check


def _compare_joined(
    original: nn.Module, program: Call, joined: Call, inputs: Inputs, name: str, options: RunOptions
) -> list[Row]:
    """Compare a program that runs op by op with its joined form, in the block's own precision.

    Both run the same providers on the same numbers, so the first one is the truth: see `policy` for the bound, which is
    above zero because a GPU may add in another order in each run.
    """
    subject = Subject(
        original, original, Casts(None), None, block=name, call_original=program, call_compiled=joined, is_opaque=True
    )
    chain, case = CallChain(subject), "the given inputs, with ops joined"
    with_gradients = chain.compare(inputs, options, case)
    without = chain.compare(inputs, dataclasses.replace(options, grads=False), f"{case}, without gradients")
    return with_gradients.rows + without.rows


def _check_states(
    original: nn.Module, program: Call, example: Inputs, name: str, crowd: Inputs | None, seconds: float, seed: int,
    plan: list[tuple[str, dict[str, Any], float]], notes: list[str],
) -> BlockCheck:  # fmt: skip
    """Compare under each router state and precision of `plan`."""
    check = BlockCheck(notes=notes)
    deadline = time.monotonic() + seconds
    work = WorkCount()
    for state, inputs in itertools.chain(router_states(example, seed), [("a crowd of tokens", crowd)] if crowd else []):
        factor = _count_elements(crowd) / _count_elements(example) if crowd is not None and inputs is crowd else 0
        if work.seconds * factor > _MAX_CROWD_SECONDS:
            check.notes.append(f"{name or 'block'}: {state} not checked, too slow")
            continue
        for precision, subject_options, largest in plan:
            case = f"{state}, {precision}"
            if precision != plan[0][0] and inputs is not example:
                continue  # rounding does not depend on the routing
            if check.rows and time.monotonic() > deadline:
                check.notes.append(f"{name or 'block'}: {case} not checked, the limit of {seconds:g} s is reached")
                continue
            block = vary_constants(original, seed) if state == UNRELATED else original
            subject = Subject(
                block, block, block=name, call_original=call_forward, call_compiled=program, **subject_options
            )
            is_counted = crowd is not None and inputs is example and precision == plan[0][0]
            chain = CallChain(subject)  # in sandboxes of its own: a program holds for the attributes of the moment
            try:
                comparison = chain.compare(
                    inputs,
                    RunOptions(seed, max_gradient_numel=largest),
                    case,
                    is_brief=precision != plan[0][0],
                    work=work if is_counted else None,
                )
            except Exception as error:
                if (inputs is example and not check.rows) or not chain.is_original_error(error):
                    raise
                why = summarize_error(error.__cause__ or error)[:160]
                check.notes.append(f"{name or 'block'}: the original raises {why} on {case}")
                continue
            check.rows += comparison.rows
            check.notes += comparison.notes
    return check


def _count_elements(inputs: Inputs) -> int:
    return max(1, sum(t.numel() for _, t in leaves(inputs) if isinstance(t, Tensor)))


def _plan_precisions(block: nn.Module, budget: int, notes: list[str]) -> list[tuple[str, dict[str, Any], float]]:
    """(name, arguments of `Subject`, largest parameter to differentiate) of each run, the decisive one first."""
    own_name = "its own precision"
    sizes = sorted(p.numel() for p in block.parameters())
    width = max((p.element_size() for p in block.parameters()), default=4)
    exact = Casts(torch.float64)
    copied = 8 * sum(sizes)
    if copied < budget:
        largest = _find_largest_affordable(sizes, (budget - copied) // 16)
        plan = [("float64", {"working": exact, "exact": None, "promote": True, "slack": SLACK}, largest)]
        if all(p.dtype != torch.float64 for p in block.parameters()):
            plan.append((own_name, {"working": Casts(None), "exact": exact}, largest))
    else:
        largest = _find_largest_affordable(sizes, max(budget, 0) // (2 * width))
        plan = [(own_name, {"working": Casts(None), "exact": None}, largest)]
        notes.append(f"float64 weights need {copied >> 20} MiB: compared in the block's own precision")
    if not math.isinf(largest):
        left_out = sum(size > largest for size in sizes)
        notes.append(f"gradients of the {left_out} largest parameters not compared, for lack of memory")
    return plan


def _find_largest_affordable(sizes: list[int], budget: int) -> float:
    """Return the largest parameter size such that all gradients up to it have at most `budget` elements together."""
    total = 0
    for i, size in enumerate(sizes):
        total += size
        if total > budget:
            return sizes[i - 1] if i and sizes[i - 1] < size else size - 1
    return math.inf
