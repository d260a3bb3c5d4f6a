"""Hand-made graphs with the dialect's exchanges: outputs and gradients equal all experts on one rank."""

from __future__ import annotations

import itertools
import os
from unittest import mock

import torch
import torch.distributed as dist

import moefx.ir.ops.dialect  # noqa: F401  registers the ops
from moefx.ir.ops.exchange_routes import exchange_counts, place_choices, plan_dispatch, read_counts
from moefx.ir.ops.expert_gemms import grouped_mm
from moefx.ir.ops.row_exchange import all_to_all_back, all_to_all_rows, wait_rows, wait_sums
from moefx.ir.ops.row_packing import pack_rows
from moefx.ir.ops.token_routing import build_pft, combine, dispatch
from moefx.ir.ops.uneven_all_to_all import start_all_to_all, wait_for_collective

from .launch import sampled

D, E, K = 6, 8, 3


def get_group_name() -> str:
    return dist.group.WORLD.group_name


def draw_routing(kind: str, tokens: int, experts: int = E, k: int = K) -> torch.Tensor:
    """Return the selected experts [tokens, k] of this rank's tokens."""
    rank, generator = dist.get_rank(), torch.Generator().manual_seed(7 + dist.get_rank())
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    if kind == "one rank":  # all tokens of all ranks
        ids = ids % 2
    elif kind == "own":  # no rows travel
        slots = experts // dist.get_world_size()
        ids = rank * slots + ids % slots
    elif kind == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -1)
    elif kind == "nothing":
        ids = torch.full_like(ids, -1)
    return ids


def run_experts(x, ids, weights, w, num_experts, num_rows=None):
    """Return each token's weighted sum of its experts, computed by the dialect on one rank."""
    how = {"num_experts": num_experts, "num_rows": num_rows}
    token_ids, _, offsets, inverse, row_weights = build_pft(ids, weights, None, **how)
    if num_rows is not None:
        assert int(offsets[-1]) == int(num_rows) <= token_ids.shape[0] <= int(num_rows) * 65 / 64
    rows = grouped_mm(dispatch(x, token_ids, offsets, inverse), [w], offsets, transposed=False)
    return combine(rows, row_weights, token_ids, offsets, inverse)


def run_exchanged(x, ids, weights, w, places, dedup):
    world, slots = dist.get_world_size(), w.shape[0]
    how = {"num_slots": slots, "dedup": dedup}
    place = place_choices(ids, None, places=places.tolist())
    counts = exchange_counts([place], levels=[world], group=get_group_name(), **how)
    plan = plan_dispatch(place, num_ranks=world, **how)
    packed = pack_rows([x], [weights], place, *plan[:3], **how) if dist.get_rank() % 2 else None
    assert packed is None or not packed.requires_grad
    splits, choices = read_counts(*counts, levels=[world], group=get_group_name())
    plan = (*plan, splits)
    sent, ticket = all_to_all_rows([x], [weights], place, packed, *plan, group=get_group_name(), **how)
    rows, local, scales = wait_rows([sent], [ticket], [splits], [x], [weights], place, groups=[get_group_name()], **how)
    sums = run_experts(rows, local, scales, w, slots, choices)
    back = all_to_all_back(sums, [splits], [ticket], groups=[get_group_name()])
    return wait_sums(*back, *plan, group=get_group_name()), splits


def check(kind: str, dedup: bool, tokens: int, moved: bool = False) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    slots = E // world
    order = torch.randperm(E, generator=torch.Generator().manual_seed(3)) if moved else torch.arange(E)
    places = torch.empty_like(order)
    places[order] = torch.arange(E)  # place p holds the expert order[p]
    generator = torch.Generator().manual_seed(1)
    all_weights = torch.randn(E, D, D + 1, generator=generator, dtype=torch.float64, requires_grad=True)
    own_weights = all_weights.detach()[order[rank * slots : (rank + 1) * slots]].clone().requires_grad_()
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    ids = draw_routing(kind, tokens)
    weights = torch.rand(tokens, K, dtype=torch.float64, requires_grad=True)
    out, splits = run_exchanged(x, ids, weights, own_weights, places, dedup)
    want = run_experts(x, ids, weights, all_weights, E)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(want)
    got = torch.autograd.grad(out, (x, weights, own_weights), grad)
    expected = torch.autograd.grad(want, (x, weights, all_weights), grad)
    total = expected[2].clone()
    dist.all_reduce(total)  # an expert's gradient is the sum over the ranks
    for a, b in zip(got, (*expected[:2], total[order[rank * slots : (rank + 1) * slots]]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    ranks = places[ids.clamp(min=0)] // slots
    sent = [[len(set(t[v].tolist())) if dedup else int(v.sum()) for t, v in zip(ranks, ids >= 0, strict=True)]]
    assert int(splits[0].sum()) == sum(sent[0])


def case_all_routings() -> None:
    kinds = ("any", "one rank", "own", "dropped", "nothing")
    for kind, dedup, moved in sampled(itertools.product(kinds, (True, False), (False, True)), 3):
        check(kind, dedup, tokens=5 + 3 * dist.get_rank(), moved=moved)


def case_every_rank_receives_rows() -> None:
    with mock.patch.dict(os.environ, {"MOEFX_NO_EMPTY_RANKS": "1"}):
        for kind, dedup in itertools.product(("any", "one rank", "nothing"), (True, False)):
            check(kind, dedup, tokens=5 + 3 * dist.get_rank())


def case_a_rank_without_tokens() -> None:
    for dedup in (True, False):
        check("any", dedup, tokens=0 if dist.get_rank() == 1 else 9)


def case_concurrent_exchanges() -> None:
    """Wait for exchanges, some of them empty, in another order than they started, around a message of the program."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [[[(a * i + b) % 3 * i for b in range(world)] for a in range(world)] for i in (3, 0, 2000, 1)]
    message = torch.full((5,), float(rank))
    word, heard = dist.isend(message, (rank + 1) % world), torch.empty(5)
    starts, wanted = [], []
    for i, sent in enumerate(sizes):
        to, received = sent[rank], [row[rank] for row in sent]
        rows = torch.randn(sum(to), 7, generator=torch.Generator().manual_seed(10 * i + rank)).bfloat16()
        starts.append(start_all_to_all(rows, to, received, get_group_name()))
        wanted.append(rows.new_empty(sum(received), 7))
        dist.all_to_all_single(wanted[-1], rows, received, to)
    dist.recv(heard, (rank - 1) % world)
    word.wait()
    assert heard.tolist() == [float((rank - 1) % world)] * 5
    for arrived, want in reversed(list(zip(starts, wanted, strict=True))):
        assert torch.equal(wait_for_collective(arrived), want)
