"""Search all layouts of a model on a number of ranks, and record why others are rejected (Piper section III.C)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

from ..errors import InvalidPlan
from ..runtime.ranks.link_costs import choose_dispatch
from ..util.unit_text import amount
from .architecture import Architecture, check_whole_numbers
from .entries import TERMS, Entry, Rejected, SearchRequest
from .layout import Layout, Schedule
from .platforms import Platform
from .step_formulas import (
    collect_values,
    estimate_dispatches,
    evaluate_memory,
    evaluate_memory_by_zero,
    find_step_sheet,
    find_units_above,
)

if TYPE_CHECKING:
    from ..ranking import Ranking

# (checkpoint policy, whether layers run again), the fastest first.
_POLICIES = (("h", False), ("x", False), ("h", True))
_MAX_COUNT = 10**7  # GPUs, and sequences of a step
MEMORY_TERMS = tuple(TERMS)
_Reasons = dict[str, dict[tuple[tuple[str, int], ...], None]]  # reason -> rejected sizes
# (PP, TP, EP) -> (bytes that the nearest layout lacks, its largest term)
_Shortages = dict[tuple[int, int, int], tuple[float, str]]


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The layouts that fit, fastest first, and the rejected ones."""

    request: SearchRequest
    entries: tuple[Entry, ...]
    rejected: tuple[Rejected, ...]

    @property
    def nearest(self) -> Rejected | None:
        """The rejected sizes whose nearest layout lacks the fewest bytes."""
        return min((r for r in self.rejected if r.lacking), key=lambda r: r.lacking, default=None)


def search_layouts(
    model: Architecture, platform: Platform, num_ranks: int, *, batch: int = 1024, tokens: int = 4096,
    max_sequences: int = 8, fast_domain: int | None = None, schedules: Sequence[Schedule] = ("1f1b",),
) -> SearchResult:  # fmt: skip
    """Find all layouts under Piper's constraints 7 to 11, ordered by the seconds of a step.

    Args:
        num_ranks: the world size.
        batch, tokens, max_sequences, fast_domain, schedules: see `ranking.plan`. "interleaved" means two or four
            chunks in a stage.

    Raises:
        InvalidPlan: invalid sizes.
    """
    check_whole_numbers(InvalidPlan, world_size=num_ranks, batch=batch, tokens=tokens, max_sequences=max_sequences)
    for field, number in (("world_size", num_ranks), ("batch", batch)):
        if number > _MAX_COUNT:
            raise InvalidPlan(f"{field} is {number}, expected at most {_MAX_COUNT}")
    if fast_domain is not None and (type(fast_domain) is not int or fast_domain < 0):
        raise InvalidPlan(f"fast_domain is {fast_domain!r}, expected a number of ranks, 0 for any, or None")
    if isinstance(schedules, str):
        raise InvalidPlan(f"schedules is {schedules!r}, expected several names: ({schedules!r},)")
    schedules = tuple(dict.fromkeys(schedules))
    if not schedules or (unknown_names := [s for s in schedules if s not in get_args(Schedule)]):
        problem = f"no schedule {unknown_names[0]!r}" if schedules else "no schedules to choose from"
        raise InvalidPlan(f"{problem}: there are {', '.join(get_args(Schedule))}")
    if 0 < (most := platform.networks[-1].ranks) < num_ranks:
        limit = (
            f"its coarsest network, {platform.networks[-1].name!r}, has {most} ranks, and the platform describes no "
            "network beyond it"
        )
        remedy = "`python -m moefx bench platform --base NAME` takes the networks beyond from another platform"
        raise InvalidPlan(f"platform {platform.name} has too few ranks for {num_ranks} GPUs: {limit}. {remedy}")
    max_span = platform.fast_domain if fast_domain is None else fast_domain
    rejected, shortages = _Reasons(), _Shortages()
    request = SearchRequest(batch, tokens, max_sequences, max_span, schedules)
    entries = list(_list_entries(model, platform, num_ranks, request, rejected, shortages))
    fitting_sizes = {_size_key(entry.layout) for entry in entries}
    reasons = [Rejected(tuple(map(dict, sizes)), reason) for reason, sizes in rejected.items()]
    reasons += [_describe_shortage(sizes, *miss) for sizes, miss in shortages.items() if sizes not in fitting_sizes]
    entries.sort(key=lambda entry: (entry.seconds, entry.memory["M_gpu"]))
    return SearchResult(request, tuple(entries), tuple(reasons))


def find_first_fit(ranking: Ranking, num_ranks: int) -> Entry | Rejected | None:
    """Repeat a ranking's search with another number of ranks, until a layout fits.

    Returns:
        The first layout that fits; if none does, the one that needs the least additional memory; None if no layout
        divides the ranks.
    """
    shortages = _Shortages()
    for entry in _list_entries(ranking.model, ranking.platform, num_ranks, ranking.request, _Reasons(), shortages):
        return entry
    return min(
        (_describe_shortage(sizes, *miss) for sizes, miss in shortages.items()), key=lambda r: r.lacking, default=None
    )


def _list_entries(
    model: Architecture,
    platform: Platform,
    num_ranks: int,
    request: SearchRequest,
    rejected: _Reasons,
    shortages: _Shortages,
) -> Iterator[Entry]:
    """Yield all layouts that fit, unordered. Adds the reasons against the others to `rejected` and `shortages`."""
    max_span = request.fast_domain
    for layout in _list_layouts(model, platform, num_ranks, request, rejected):
        min_ep = layout.tp if layout.ssmb else 1  # its ranks are neighbours in both placements
        placements = (True, False) if min_ep < layout.ep < layout.tp * layout.dp else (True,)  # whether experts first
        allowed = [
            placement
            for placement in placements
            if not max_span or layout.ep == 1 or _compute_axis_span(layout, placement) <= max_span
        ]
        if not allowed:
            _reject(rejected, f"crosses the fast domain of {max_span} ranks (Piper eq. 10)", EP=layout.ep)
            continue
        dispatches = {placement: choose_layout_dispatch(model, layout, platform, placement) for placement in allowed}
        orders = _list_schedules(model, layout, request.schedules)
        for (policy, recompute), (schedule, chunks) in itertools.product(_POLICIES, orders):
            fits_by_dispatch = {}
            for dispatch in dict.fromkeys(dispatches.values()):
                candidate = dataclasses.replace(
                    layout, dispatch=dispatch, kept=policy, recompute=recompute, schedule=schedule, chunks=chunks
                )
                fits_by_dispatch[dispatch] = _find_fitting_zero(model, candidate, platform, shortages)
            entries: list[Entry] = []
            for experts_first, dispatch in dispatches.items():
                if (fits := fits_by_dispatch[dispatch]) is not None:
                    entries.append(_build_entry(model, fits[0], platform, experts_first, fits[1]))
            # the usual placement if the other one is not faster
            yield from entries if len({entry.seconds for entry in entries}) > 1 else entries[:1]


def estimate_entry(model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True) -> Entry:
    """Estimate a layout, whether it fits or not.

    Raises:
        InvalidPlan: `ep` does not divide the experts, or there are more stages than layers.
    """
    return _build_entry(model, layout, platform, experts_first, evaluate_memory(model, layout, platform))


def _list_layouts(
    model: Architecture, platform: Platform, num_ranks: int, request: SearchRequest, rejected: _Reasons
) -> Iterator[Layout]:
    """Yield all layouts whose sizes divide, without policy, schedule and dispatch."""
    for pp in _list_divisors(num_ranks):
        if pp > model.num_layers:
            _reject(rejected, f"more stages than the {model.num_layers} layers (Piper eq. 9)", PP=pp)
            continue
        for tp in _list_divisors(num_ranks // pp):
            if tp > platform.node_size:
                _reject(rejected, f"crosses the node of {platform.node_size} ranks", TP=tp)
                continue
            if model.attention.num_heads % tp:
                _reject(rejected, f"does not divide the {model.attention.num_heads} heads", TP=tp)
                continue
            dp = num_ranks // pp // tp
            if request.batch % dp:
                _reject(rejected, f"does not divide the batch of {request.batch} sequences", DP=dp)
                continue
            if request.batch // dp < pp and "gpipe" not in request.schedules:
                reason = f"fewer micro-batches than stages from a batch of {request.batch}: only gpipe takes them"
                _reject(rejected, reason, PP=pp, DP=dp)
                continue
            sequences = [b for b in _list_divisors(request.batch // dp) if b <= request.max_sequences]
            for ep in _list_divisors(tp * dp):
                if model.num_experts % ep:
                    _reject(rejected, f"does not divide the {model.num_experts} experts (Piper eq. 8)", EP=ep)
                    continue
                ssmb_choices = (*((True,) if tp > 1 and ep % tp == 0 else ()), *((False,) if dp % ep == 0 else ()))
                if not ssmb_choices:
                    reason = "ranks that have the same tokens share experts by SSMB, all TP of them, or not at all"
                    _reject(rejected, f"EP is neither a multiple of TP nor divides DP: {reason}", PP=pp, TP=tp, EP=ep)
                for b in sequences:
                    for ssmb in ssmb_choices:
                        yield Layout(
                            pp=pp, tp=tp, dp=dp, ep=ep, ssmb=ssmb, sequences=b, tokens=request.tokens,
                            microbatches=request.batch // dp // b,
                        )  # fmt: skip


def _list_schedules(
    model: Architecture, layout: Layout, schedules: Sequence[Schedule]
) -> Iterator[tuple[Schedule, int]]:
    """Yield the (schedule, chunks) that a pipeline can have.

    The numbers of micro-batches are those that torch's schedules take: any for GPipe, at least one for each stage for
    1F1B, and a multiple of the stages for the interleaved schedule (Megatron-LM, arXiv 2104.04473 section 2.2) and for
    zero bubble, which torch interleaves.
    """
    if layout.pp == 1:
        yield "1f1b", 1
        return
    is_multiple = layout.microbatches % layout.pp == 0
    can_run = {"gpipe": True, "1f1b": layout.microbatches >= layout.pp}
    for schedule in schedules:
        if not can_run.get(schedule, is_multiple):
            continue
        for chunks in (2, 4) if schedule == "interleaved" else (1,):
            if layout.pp * chunks <= model.num_layers:
                yield schedule, chunks


def _reject(rejected: _Reasons, reason: str, **sizes: int) -> None:
    rejected.setdefault(reason, {})[tuple(sizes.items())] = None


def _build_entry(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool, memory: dict[str, float]
) -> Entry:
    step = find_step_sheet(layout, platform, experts_first)(**collect_values(model, layout, platform, experts_first))
    return Entry(layout, experts_first, memory, step, find_units_above(layout, platform, experts_first))


def _compute_axis_span(layout: Layout, experts_first: bool) -> int:
    """Return the number of ranks from the first to the last rank of an expert axis."""
    return layout.ep if experts_first else (layout.ep - 1) * layout.expert_replicas + 1


def choose_layout_dispatch(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool, preferred: str = "auto"
) -> Any:
    """Choose how rows travel: as wanted if the topology allows it, otherwise the fastest dispatch, as under
    `Plan(dispatch="auto")`.

    "gather" must be wanted: it moves no fewer bytes than "dedup", and the seconds of a step do not include the host.
    "pull" counts as "gather": it has the same buffers, and took about as long over two GPUs.
    """
    preferred = "gather" if preferred == "pull" else preferred
    seconds = estimate_dispatches(model, layout, platform, experts_first) if layout.ep > 1 else {"flat": 0.0}
    if preferred in seconds:
        return preferred
    return choose_dispatch({dispatch: s for dispatch, s in seconds.items() if dispatch != "gather"})


def _find_fitting_zero(
    model: Architecture, layout: Layout, platform: Platform, shortages: _Shortages
) -> tuple[Layout, dict[str, float]] | None:
    """Return the layout with the lowest ZeRO stage that fits, and its memory.

    If none fits, returns None and updates `shortages` if this layout lacks less than earlier ones of the same sizes.
    """
    sizes = _size_key(layout)
    for zero, memory in evaluate_memory_by_zero(model, layout, platform, (1, 2, 3) if layout.dp > 1 else (0,)):
        shortage = memory["M_gpu"] - platform.memory_bytes
        if shortage <= 0:
            return dataclasses.replace(layout, zero=zero), memory
        if sizes not in shortages or shortage < shortages[sizes][0]:
            shortages[sizes] = shortage, max(MEMORY_TERMS, key=memory.__getitem__)
    return None


def _describe_shortage(sizes: tuple[int, int, int], shortage: float, term: str) -> Rejected:
    reason = f"does not fit: {amount(shortage, 'B')} too much at least, most of it {TERMS[term]} ({term})"
    return Rejected((dict(zip(("PP", "TP", "EP"), sizes, strict=True)),), reason, shortage, term)


def _size_key(layout: Layout) -> tuple[int, int, int]:
    return layout.pp, layout.tp, layout.ep


@functools.lru_cache(maxsize=256)
def _list_divisors(number: int) -> tuple[int, ...]:
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return tuple(dict.fromkeys([*small, *(number // i for i in reversed(small))]))
