"""Rankings without a fitting layout: reasons by kind, and the required number of GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from moefx import cli
from moefx.errors import InvalidPlan, MoefxError, NothingFits
from moefx.planner.min_gpus import find_min_gpus
from moefx.planner.platforms import PLATFORMS, Network
from moefx.ranking import plan

from ..pace import limit_time


def test_the_smallest_number_of_gpus():
    """Half the number fits no layout in a separate search."""
    found = find_min_gpus(ranking := plan("mixtral-8x22b", "a100-40gb", 8))
    assert found and found.entry and found.nearest is None
    assert found.num_ranks == 64 == found.entry.layout.num_ranks
    assert not len(plan("mixtral-8x22b", "a100-40gb", 32)) and found.entry in tuple(
        plan("mixtral-8x22b", "a100-40gb", 64)
    )
    assert (
        "Doubling the GPUs, 64 are the first on which something fits, in 36.85 GiB a GPU: data parallelism over 64 "
        "GPUs, ZeRO-3, kept for the backward: only inputs of layers." in str(ranking)
    )


def test_the_limiting_term_is_named_if_no_number_fits():
    ranking = plan("mixtral-8x22b", "a100-40gb", 32, tokens=2**20)
    with limit_time(5):
        found = find_min_gpus(ranking)
    assert found and found.entry is None and found.nearest and found.nearest.term == "M_activations"
    assert (
        f"nothing fits up to {found.num_ranks}, and larger numbers were not searched. On {found.num_ranks}, PP="
        in str(found)
    )
    assert "most of it activations (M_activations)" in str(found)


def test_the_search_reports_untried_numbers():
    """Search six doublings with memory for the states; more would take long."""
    ranking = plan("mixtral-8x22b", "a100-40gb", 32, tokens=2**20)
    found = find_min_gpus(ranking)
    assert found and found.num_ranks == 64 * 2**5 and not found.is_all
    node, _ = ranking.platform.networks
    few = dataclasses.replace(ranking.platform, networks=(node, Network("cluster", 100, 25e9)))
    found = find_min_gpus(plan("mixtral-8x22b", few, 32, tokens=2**20))
    assert found and found.num_ranks == 64 and found.is_all
    assert "nothing fits up to 64, and the platform does not have twice as many. On 64, PP=" in str(found)
    with pytest.raises(NothingFits, match=r"or more GPUs \(the platform has at most 100\)"):
        plan("mixtral-8x22b", few, 64, tokens=2**20)[0]


def test_nothing_is_searched_if_a_layout_fits_or_no_gpus_are_left():
    assert find_min_gpus(plan("olmoe-1b-7b", "h200", 8)) is None
    node = dataclasses.replace(PLATFORMS["a100-40gb"], networks=(Network("node", 8, 300e9),))
    assert find_min_gpus(plan("deepseek-v3", node, 8)) is None
    assert "Doubling" not in str(plan("deepseek-v3", node, 8))
    with pytest.raises(InvalidPlan):
        plan("deepseek-v3", node, 16)


def test_an_empty_ranking_raises_with_reason_and_remedy():
    ranking = plan("deepseek-v3", "a100-40gb", 8)
    assert list(ranking) == [] and not len(ranking)
    with pytest.raises(NothingFits, match=r"no layout of deepseek-v3 fits 8 x NVIDIA A100.*\(40 GiB each\)") as caught:
        ranking[0]
    nearest = min((r for r in ranking.rejected if r.lacking), key=lambda r: r.lacking)
    assert isinstance(caught.value, IndexError) and isinstance(caught.value, MoefxError)
    assert f"{nearest.label} comes nearest" in str(caught.value)
    assert "optimizer states. Take more GPUs" in str(caught.value)
    with pytest.raises(NothingFits, match="no sizes divide"):
        plan("olmoe-1b-7b", "h200", 1009, batch=3).explain()
    with pytest.raises(IndexError, match="no entry 100000"):
        plan("olmoe-1b-7b", "h200", 8)[100000]


def test_the_command_shows_reasons_instead_of_formulas(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "deepseek-v3", "--platform", "a100-40gb", "--gpus", "8", "--explain", "1"]) == 1
    assert "rejected" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_sizes_are_named_without_a_table():
    assert "\nPP stages, TP ranks of the dense matrices, DP" in str(plan("deepseek-v3", "a100-40gb", 8))


def test_no_number_divides():
    found = find_min_gpus(plan("olmoe-1b-7b", "h200", 1009, batch=3))
    assert found and found.entry is None and str(found).endswith(", no layout divides.")


def test_reasons_are_by_kind():
    """Print one line for all sizes that do not fit, with their number and the closest one."""
    ranking = plan("deepseek-v3", "a100-40gb", 8)
    short = [r for r in ranking.rejected if r.lacking]
    nearest = min(short, key=lambda r: r.lacking)
    lines = [line for line in str(ranking).splitlines() if "fit" in line and "PP=" in line]
    assert lines == [
        f"  {len(short)} sizes of PP, TP and EP: do not fit, most of it is optimizer states (M_optimizer); "
        f"{nearest.label} comes nearest and needs {nearest.why.split()[3]} TiB more"
    ]
    assert len(ranking.reasons()) < len(ranking.rejected)


def test_a_kind_of_many_sizes_is_shortened():
    ranking = plan("kimi-k2", "frontier", 768)
    (sizes,) = [sizes for sizes, why in ranking.reasons() if why.startswith("crosses the node")]
    assert sizes == ", ".join(f"TP={n}" for n in (12, 16, 24, 32, 48, 64, 96, 128, 192)) + ", ... (2 more), TP=768"
