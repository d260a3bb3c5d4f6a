"""Parts of memory and time sum to the total."""

from __future__ import annotations

import dataclasses

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.planner.breakdown import LABELS, compute_memory_parts, compute_time_parts, evaluate_parts, split_sum
from moefx.planner.catalogue import MODELS, find_model
from moefx.planner.layout import Layout
from moefx.planner.memory_formulas import MEMORY
from moefx.planner.platforms import PLATFORMS, find_platform
from moefx.planner.sheet import Formula, Sheet, quantities
from moefx.planner.step_formulas import build_step_sheet, find_step_sheet
from moefx.planner.step_formulas import collect_values as given_of
from moefx.ranking import plan

SHEETS = [
    (MEMORY, "M_gpu"),
    (build_step_sheet("dedup", 2), "T_step"),
    (build_step_sheet("halo", 3), "T_step"),
    (build_step_sheet("none", 1), "T_step"),
]


def substitute(whole, expression):
    """Substitute all formulas of the sheet, so that only its inputs remain."""
    for formula in reversed(list(whole)):
        expression = expression.subs(formula.symbol, formula.expression)
    return expression


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("whole", "name"), SHEETS)
def test_parts_are_the_whole(whole, name):
    """Subtract all parts symbolically: nothing remains."""
    parts = split_sum(whole, name)
    assert len(parts) > 10
    assert sympy.expand(substitute(whole, whole.formulas[name].symbol - sum(parts.values()))) == 0


@pytest.mark.parametrize(("whole", "name"), SHEETS)
def test_every_part_has_a_name_for_readers(whole, name):
    assert set(split_sum(whole, name)) <= set(LABELS)


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(sorted(MODELS)), platform=st.sampled_from(sorted(PLATFORMS)),
    powers=st.tuples(*[st.integers(0, 3)] * 3), experts=st.integers(0, 3), kept=st.sampled_from(["h", "x", "tutel"]),
    zero=st.integers(0, 3), flags=st.tuples(st.booleans(), st.booleans()), dispatch=st.sampled_from(["flat", "dedup"]),
)  # fmt: skip
def test_numbers_add_up(model, platform, powers, experts, kept, zero, flags, dispatch):
    pp, tp, dp = (2**power for power in powers)
    layout = Layout(
        pp=pp, tp=tp, dp=dp, ep=min(2**experts, tp * dp), kept=kept, zero=zero, ssmb=flags[0], recompute=flags[1],
        dispatch=dispatch, microbatches=8,
    )  # fmt: skip
    machine = dataclasses.replace(find_platform(platform), overhead=2.0**30)
    found, stages = compute_memory_parts(find_model(model), machine, layout), (0, pp - 1)
    whole = max(MEMORY(**layout.values(find_model(model), at), M_fw=2.0**30)["M_gpu"] for at in stages)
    assert sum(found.values()) == pytest.approx(whole, rel=1e-12)
    assert all(value >= 0 for value in found.values()) and found["M_gpu"] == 2.0**30
    assert all(value >= 0 for value in compute_time_parts(find_model(model), machine, layout).values())


def test_parts_of_a_ranking():
    ranking = plan("olmoe-1b-7b", "a100-40gb", 16, batch=64)
    for entry in ranking.entries[::7]:
        bytes_of = compute_memory_parts(ranking.model, ranking.platform, entry.layout)
        seconds_of = compute_time_parts(ranking.model, ranking.platform, entry.layout, entry.experts_first)
        assert sum(bytes_of.values()) == pytest.approx(entry.memory["M_gpu"], rel=1e-12)
        assert sum(seconds_of.values()) == pytest.approx(entry.seconds, rel=1e-12)
        assert bytes_of["M_optimizer"] == entry.memory["M_optimizer"]
        assert seconds_of["T_bubble"] == entry.step["T_bubble"]


def test_missing_shared_experts_have_no_part():
    """Count neither rows nor launches of missing shared experts."""
    platform, layout = dataclasses.replace(find_platform("h200"), dense_launch=1.0), Layout()
    for name, launches in (("olmoe-1b-7b", 1), ("deepseek-v3", 4)):
        found = find_step_sheet(layout, platform, True)(**given_of(find_model(name), layout, platform, True))
        assert found["T_rest"] == pytest.approx(launches, rel=0.01)


def test_sums_are_expanded():
    """Expand sums and their factors, but no products, sums of another unit, or terms of two results."""
    n, a, b, X, Y, Z = quantities("n a b X Y Z")
    made = Sheet(
        [
            Formula("X", a * b, "B", ""),
            Formula("Y", (n - 1) * X, "B", ""),
            Formula("Z", X + 2 * Y + a, "B", ""),
            Formula("t", X / b, "s", ""),
            Formula("whole", n * Z + Y + X * Y + b, "B", ""),
        ]
    )
    parts = split_sum(made, "whole")
    assert parts == {"X": n * X, "Y": 2 * n * Y + Y, "Z": a * n, "whole": X * Y + b}
    given = dict(n=3.0, a=5.0, b=7.0)
    assert evaluate_parts(made, "whole", given) == {"X": 105, "Y": 490, "Z": 15, "whole": 35 * 70 + 7}
    assert sum(evaluate_parts(made, "whole", given).values()) == made(**given)["whole"]
    assert split_sum(made, "t") == {"t": X / b}
