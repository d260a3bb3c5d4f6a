"""Parts of one process: a region is put together from the parts that overlap it, and faults are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moefx.checkpoints.model_tensors import LocalPart
from moefx.checkpoints.part_exchange import PartExchange
from moefx.errors import InvalidCheckpoint, MoefxError
from moefx.util.rank_group import RankGroup

CPU = torch.device("cpu")
WHOLE = torch.arange(24.0).reshape(6, 4)


def part_of(rows: tuple[int, int], columns: tuple[int, int] = (0, 4), dtype: torch.dtype = torch.float32) -> LocalPart:
    return LocalPart((6, 4), (rows, columns), WHOLE[slice(*rows), slice(*columns)].to(dtype))


def ranks_with(others: list[dict[str, LocalPart]]) -> Any:
    """Return ranks with this one as the first. The others hold these parts, and send nothing."""
    described = [{n: (p.shape, p.tensor.dtype, p.region) for n, p in parts.items()} for parts in others]
    ranks = [*range(len(others) + 1)]
    return SimpleNamespace(rank=0, ranks=ranks, group=None, gather=lambda value: [value, *described])


def test_a_region_is_cut_from_the_part_of_this_rank():
    exchange = PartExchange({"w": part_of((0, 6))}, RankGroup(None), CPU)
    out = torch.full((2, 3), -1.0)
    exchange.gather("w", ((3, 5), (1, 4)), out, 0)
    assert torch.equal(out, WHOLE[3:5, 1:4])
    assert exchange.described == {"w": ((6, 4), torch.float32)}


def test_a_region_takes_another_dtype():
    out = torch.empty((6, 4), dtype=torch.float64)
    PartExchange({"w": part_of((0, 6))}, RankGroup(None), CPU).gather("w", ((0, 6), (0, 4)), out, 0)
    assert torch.equal(out, WHOLE.double())


def test_parts_outside_of_the_region_stay_unread():
    exchange = PartExchange({"w": part_of((0, 2))}, ranks_with([{"w": part_of((2, 6))}]), CPU)
    out = torch.full((1, 4), -1.0)
    exchange.gather("w", ((1, 2), (0, 4)), out, 0)  # would receive from the other rank if it read its part
    assert torch.equal(out, WHOLE[1:2])


def test_missing_parts_are_counted():
    with pytest.raises(MoefxError, match=r"the ranks hold 16 of the 24 elements of w, in the regions \[\(\(0, 4\)"):
        PartExchange({"w": part_of((0, 4))}, RankGroup(None), CPU)


def test_ranks_must_agree_on_the_dtype():
    other = {"w": part_of((3, 6), dtype=torch.bfloat16)}
    with pytest.raises(InvalidCheckpoint, match=r"w has different shapes or dtypes on ranks: .* torch.bfloat16 on 1"):
        PartExchange({"w": part_of((0, 3))}, ranks_with([other]), CPU)


def test_replicas_count_once():
    exchange = PartExchange({"w": part_of((0, 6))}, ranks_with([{"w": part_of((0, 6))}]), CPU)
    out = torch.empty((6, 4))
    exchange.gather("w", ((0, 6), (0, 4)), out, 0)  # from this rank's own replica
    assert torch.equal(out, WHOLE)


def test_tied_names_of_all_ranks_are_merged():
    exchange = PartExchange({}, ranks_with([]), CPU)
    exchange.ranks = SimpleNamespace(gather=lambda tied: [tied, {"head": "embedding"}])
    assert exchange.merge_tied({"b": "a"}) == {"b": "a", "head": "embedding"}


def test_ranks_with_another_plan_are_named():
    exchange = PartExchange({}, RankGroup(None), CPU)
    exchange.check_same_plan(["one file"])
    exchange.ranks = SimpleNamespace(ranks=[4, 5, 6], gather=lambda digest: [digest, "another", digest])
    with pytest.raises(MoefxError, match=r"ranks \[5\] would write other files than rank 4"):
        exchange.check_same_plan(["one file"])
