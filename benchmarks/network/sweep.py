"""How many times as fast as `flat` each variant is, by nodes and bytes of a message (as Piper, figure 8)."""

from __future__ import annotations

from benchmarks.network.case import VARIANTS, Case, measured

_RATE = 200  # Mbit/s of a node
CASES = tuple(
    Case(nodes, 2, tokens, 1024, f"{_RATE}mbit", experts=240) for nodes in (2, 3, 4) for tokens in (32, 128, 512)
)  # 240 experts: as many on each of 4, 6 and 8 ranks


def steady(case: Case, repeats: int) -> list[dict]:
    """Two runs in which `flat` takes as long, to 20 %; the last two of four where there are none."""
    runs = [measured(case, repeats)]
    for _ in range(3):
        runs = [runs[-1], measured(case, repeats)]
        if max(map(_flat, runs)) <= 1.2 * min(map(_flat, runs)):
            break
    return runs


def line(case: Case, runs: list[dict]) -> str:
    """Dispatch plus combine: what a rank sends to others, milliseconds, how many of them a node's link takes for what
    leaves it, and how many times as fast as `flat` each variant is; in both runs."""
    flat = runs[0]["ways"]["flat"]
    leaves = flat["leaves_node"] / case.nodes
    shown = [
        f"{case.nodes}x{case.ranks}, T={case.tokens:<4} flat: {flat['sends'] / 2**20:6.2f} MiB a rank",
        f"{_both(map(_flat, runs), '.0f')} ms, the link's {8 * leaves / _RATE / 1e3:.0f}",
    ]
    for variant in VARIANTS[1:]:
        shown.append(f"{variant} {_both((_flat(run) / _total(run, variant) for run in runs), '.2f')}x")
    return "   ".join(shown)


def _total(run: dict, variant: str) -> float:
    return run["ways"][variant]["dispatch"] + run["ways"][variant]["combine"]


def _flat(run: dict) -> float:
    return _total(run, "flat")


def _both(numbers, form: str) -> str:
    return " ".join(format(number, form) for number in numbers)
