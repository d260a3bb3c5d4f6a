"""`Plan(dispatch="gather")`: every rank gathers the tokens of all ranks, and returns their sums."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moefx
import moefx.distribution.dispatch_choice
import moefx.distribution.expert_layouts
import moefx.ir.ops.token_gather
import moefx.runtime.ranks.topology
from moefx.errors import ExpertsOverwritten, InvalidInput
from moefx.runtime.ranks.link_costs import EXCHANGES_PER_LAYER, HOST_COSTS, Link, count_gathered_bytes

from ..blocks import D, Dropping
from .launch import sampled
from .models import BLOCKS, Model, check, compile_over_mesh, is_expert_parameter
from .sequence_cases import PLAN as SHARED_TOKENS
from .sequence_cases import check_gradients, draw_same_tokens, make_tensor_parallel_mesh
from .verify_cases import agree_on_all_ranks
from .volume_cases import Block as Wide

GATHER = moefx.Plan(dispatch="gather", validation="symbolic")
LIMITED = GATHER.replace(max_tokens=13)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def case_outputs_and_gradients() -> None:
    """Compare each kind of block, with a different number of tokens on each rank."""
    for kind, plan in sampled(itertools.product(BLOCKS, (GATHER, LIMITED)), 5):
        check(Model(kind, layers=1).double(), make_mesh(), plan)


def case_ranks_without_tokens() -> None:
    for plan in (GATHER, LIMITED):
        x = torch.randn(0 if dist.get_rank() % 2 else 5, D, dtype=torch.float64)
        check(Model("gated", layers=1).double(), make_mesh(), plan, x)
        check(Model("gated", layers=1).double(), make_mesh(), plan, torch.zeros(0, D, dtype=torch.float64))


def case_a_capacity() -> None:
    """Drop slots on the ranks of their tokens."""
    torch.manual_seed(0)
    model = Dropping().double()
    compiled = compile_over_mesh(model, make_mesh(), GATHER)
    x = torch.randn(11 + dist.get_rank(), D, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))
    assert moefx.blocks(compiled)[0].fallbacks == 0


def case_a_stash() -> None:
    """Spread models as on GPUs, whose layers share a stash. CPU providers keep nothing in it and compute all again."""
    with mock.patch.object(moefx.distribution.expert_layouts, "has_stash", lambda axis: True):
        for plan, kept in ((GATHER, "2.2"), (LIMITED.replace(stash_factor=0), "0")):
            check(Model("gated", layers=2).double(), make_mesh(), plan)
            assert f"a stash keeps activations of {kept} balanced layers" in explain_experts(plan, layers=2)
    assert "stash" not in explain_experts(GATHER)


@contextlib.contextmanager
def count_collectives():
    """Count collectives and copies to the host."""
    found: Counter = Counter()

    def count_calls(name, function):
        def run(*args, **kwargs):
            found[name] += 1
            return function(*args, **kwargs)

        return run

    gather = moefx.ir.ops.token_gather
    with (
        mock.patch.object(gather, "start_gather", count_calls("gather", gather.start_gather)),
        mock.patch.object(gather, "start_scatter", count_calls("scatter", gather.start_scatter)),
        mock.patch.object(
            moefx.ir.ops.row_exchange,
            "start_all_to_all",
            count_calls("uneven", moefx.ir.ops.row_exchange.start_all_to_all),
        ),
        mock.patch.object(dist, "all_gather", count_calls("hosts", dist.all_gather)),
        mock.patch.object(torch.Tensor, "cpu", count_calls("copies", torch.Tensor.cpu)),
    ):
        yield found


def case_collectives_and_copies() -> None:
    """Run only even collectives; hosts communicate once per layer or never. Nothing is copied to the host."""
    for plan, hosts in ((GATHER, 2), (LIMITED, 0)):
        compiled = compile_over_mesh(Model("gated", layers=2), make_mesh(), plan)
        x = torch.randn(9, D)
        for _ in range(2):
            compiled(x)  # the third call compares no experts
        with count_collectives() as found:
            out = compiled(x)
            assert found == {"gather": 2, "scatter": 2} | ({"hosts": hosts} if hosts else {}), found
        with count_collectives() as found:
            out.sum().backward()
            assert found == {"gather": 2, "scatter": 2}, found


def case_bytes_equal_the_formula() -> None:
    """Count the bytes that leave a rank in a layer's forward and backward."""
    mesh, tokens, top_k = make_mesh(), 6, 4  # columns of 4 * 4 bytes begin at multiples of 16
    compiled = compile_over_mesh(Wide(D, 8, top_k), mesh, GATHER.replace(max_tokens=tokens))
    left = 0

    def count_bytes(function, is_whole):
        def run(parts, size, group):
            nonlocal left
            left += sum(rows.nbytes for rows in parts) * (size - 1) // (size if is_whole else 1)
            return function(parts, size, group)

        return run

    gather = moefx.ir.ops.token_gather
    with (
        mock.patch.object(gather, "start_gather", count_bytes(gather.start_gather, False)),
        mock.patch.object(gather, "start_scatter", count_bytes(gather.start_scatter, True)),
    ):
        compiled(torch.randn(tokens, D, requires_grad=True)).sum().backward()
    wanted = EXCHANGES_PER_LAYER * (dist.get_world_size() - 1) * count_gathered_bytes(4.0 * D, top_k, tokens)
    assert left == wanted, (left, wanted)


@contextlib.contextmanager
def simulate_device(per_byte: float = 1e-12):
    """Simulate devices that run asynchronously to their hosts, with links of this speed."""
    topology, choice = moefx.runtime.ranks.topology, moefx.distribution.dispatch_choice
    with (
        mock.patch.object(choice, "_host_runs_ahead", lambda axis: True),
        mock.patch.object(topology, "measure_link", lambda *_: Link(1e-5, per_byte)),
        mock.patch.object(topology, "measure_handling", lambda *_: 0.0),
    ):
        yield


def explain_experts(plan: moefx.Plan, layers: int = 1) -> str:
    """Return the line of `explain` about the experts, which all ranks print."""
    compiled = compile_over_mesh(Model("gated", layers=layers), make_mesh(), plan)
    (line,) = (line for line in str(moefx.explain(compiled)).splitlines() if "experts over" in line)
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    assert len(set(lines)) == 1, lines
    return line


def case_auto() -> None:
    """Gather if the time of the host decides, on one level, and print the reason."""
    auto = moefx.Plan(node_size=dist.get_world_size(), validation="symbolic")

    def host(way: str, max_tokens: int | None = None) -> str:
        return re.escape(f"{1e3 * HOST_COSTS[way].seconds(max_tokens):.2f} ms")

    exchange = r"\d+\.\d+ \+ "
    figures = f"flat {exchange}{host('flat')}, dedup {exchange}{host('dedup')}, gather {exchange}"
    with simulate_device():
        check(Model("gated", layers=1).double(), make_mesh(), auto)
        line = explain_experts(auto)
        assert "every rank gathers the tokens of all ranks, the hosts agree" in line, line
        assert re.search(f"{figures}{host('gather')}, pull {exchange}{host('pull')};", line), line
        assert "a CUDA graph needs Plan(dispatch='gather'" in line, line
        line = explain_experts(auto.replace(max_tokens=64))
        assert "at most 64 tokens a rank" in line, line
        assert "a CUDA graph can hold it" in line, line
        assert re.search(f"{figures}{host('gather', 64)}, pull {exchange}{host('pull', 64)};", line), line
        for fields in (dict(chunks=2), dict(max_tokens=64, tokens=65)):
            assert "one level, and 'dedup'" in explain_experts(auto.replace(**fields))
        assert "gather" not in explain_experts(auto.replace(node_size=2)).partition("; a CUDA graph")[0]
        with mock.patch.object(moefx.distribution.dispatch_choice, "_has_reduce_scatter", lambda axis: False):
            assert "one level, and 'dedup'" in explain_experts(auto)
        with mock.patch.object(dist, "is_gloo_available", lambda: False):
            assert "one level, and 'dedup'" in explain_experts(auto)
            assert "every rank gathers" in explain_experts(auto.replace(max_tokens=64))
    with simulate_device(per_byte=1e-7):
        line = explain_experts(auto)
        assert "its experts, one exchange (auto" in line, line
        assert re.search(figures, line), line


def case_too_many_tokens() -> None:
    """Raise on the rank with too many tokens, before its first collective."""
    compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(), LIMITED)
    try:
        with count_collectives() as found:
            compiled(torch.randn(14, D))
    except InvalidInput as error:
        assert "14 tokens" in str(error), error
        assert "max_tokens=13" in str(error), error
        assert not found["gather"], found
    else:
        raise AssertionError("was accepted")
    compiled(torch.randn(13, D))


def case_shared_tokens() -> None:
    mesh = make_tensor_parallel_mesh()
    for number, plan in ((8, GATHER), (7, LIMITED), (1, GATHER), (0, LIMITED)):
        model = Model("gated").double()
        compiled = compile_over_mesh(model, mesh, SHARED_TOKENS.replace(dispatch="gather", max_tokens=plan.max_tokens))
        x = draw_same_tokens(mesh, number)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        out, want = compiled(inputs[0]), model(inputs[1])
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        (out**2).sum().backward()
        (want**2).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-10)
        check_gradients(model, compiled, mesh)


def case_checkpoint_policies_and_frozen_experts() -> None:
    for keep in sampled(("h", "x", "all"), 2):
        model = Model("stacked", layers=1).double()
        for name, p in model.named_parameters():
            p.requires_grad_(not (is_expert_parameter(name) and name.endswith("up")))
        check(model, make_mesh(), LIMITED.replace(checkpoint=keep))


def case_recomputation() -> None:
    """Recompute under `torch.utils.checkpoint`, with and without the policy that saves exchanges."""
    model = Model("gated", layers=1)
    compiled = compile_over_mesh(model, make_mesh(), GATHER)
    x = torch.randn(9 + dist.get_rank(), D)
    want = model(x)
    want.pow(2).sum().backward()
    for policy in (None, moefx.save_routing):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        options = {} if policy is None else {"context_fn": contexts}
        compiled.zero_grad()
        out = checkpoint(compiled, x, use_reentrant=False, **options)
        torch.testing.assert_close(out, want)
        out.pow(2).sum().backward()
        torch.testing.assert_close(compiled.first.weight.grad, model.first.weight.grad)


def case_one_graph() -> None:
    """Compile one graph: the hosts communicate inside the graph, or never."""
    for plan in sampled((GATHER, LIMITED), 2):
        model = Model("stacked", layers=1)
        compiled = compile_over_mesh(model, make_mesh(), plan)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        whole = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=True)
        for number in (9, 6):
            x = torch.randn(number + dist.get_rank(), D)
            torch.testing.assert_close(whole(x), model(x))
            compiled.zero_grad(), model.zero_grad()
            whole(x).pow(2).sum().backward()
            model(x).pow(2).sum().backward()
            torch.testing.assert_close(compiled.first.weight.grad, model.first.weight.grad)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def case_a_load() -> None:
    """Count each rank's own tokens."""
    model = Model("gated", layers=1)
    compiled = compile_over_mesh(model, make_mesh(), GATHER)
    (block,) = moefx.blocks(compiled)
    block.record_load()
    x = torch.randn(9 + dist.get_rank(), D)
    compiled(x)
    ids = model.blocks[0].route(model.first(x))[1]
    assert torch.equal(block.load(), ids.flatten().bincount(minlength=len(block.load())).int())


def case_overwritten_experts() -> None:
    """Notice overwritten experts although the host reads no numbers: it compares at calls 1, 2, 4, 8, ..."""
    compiled = compile_over_mesh(Model("gated", layers=1), make_mesh(), LIMITED)
    x = torch.randn(9, D)
    compiled(x)
    with torch.no_grad():
        for _, p in sorted(compiled.named_parameters(), key=lambda named: (named[1].shape, named[0])):
            dist.broadcast(p, 0)
    try:
        for _ in range(3):
            compiled(x)
    except ExpertsOverwritten:
        return
    raise AssertionError("was not noticed")


FAULTS = {"start_gather": 8, "start_scatter": 6}  # tensors that two layers send in forward and backward


def case_verify_detects_wrong_rows() -> None:
    """Report a wrong row in any collective."""
    check_faults_are_seen(LIMITED, {name: number // 2 for name, number in FAULTS.items()}, inject_fault)


def check_faults_are_seen(
    plan: moefx.Plan, faults: dict[str, int], inject: Callable[[str, int], contextlib.AbstractContextManager[list]]
) -> None:
    """Check that `verify` accepts two layers, and reports them with any of the faults.

    Args:
        faults: number of places of each kind.
        inject: makes a context for a kind and a place, with a list of the calls that it changed, on rank 1.
    """
    model = Model("joined", layers=2)
    compiled = compile_over_mesh(model, make_mesh(), plan)
    x = torch.randn(9 + dist.get_rank(), D)
    report = moefx.verify(compiled, model, x, token_counts=(5,))
    assert report.ok, report
    for name, at in sampled([(name, at) for name, number in faults.items() for at in range(number)], 4):
        with inject(name, at) as changed:
            report = moefx.verify(compiled, model, x, routings=False, token_counts=())
        assert bool(changed) == (dist.get_rank() == 1), f"{name} {at} did not run: {changed}"
        assert not agree_on_all_ranks(report.ok), f"a wrong row in {name} {at} was not seen\n{report}"


@contextlib.contextmanager
def inject_fault(name: str, at: int) -> Iterator[list[int]]:
    """Add 1 to the first row of one rank, or exchange the selection of two tokens, in one collective."""
    started, seen, changed = getattr(moefx.ir.ops.token_gather, name), 0, list[int]()

    def change(rows):
        nonlocal seen
        seen += 1
        if (seen - 1) % FAULTS[name] != at or dist.get_rank() != 1:
            return rows
        changed.append(seen)
        rows = rows.clone()
        # The other tensors are selections and places.
        rows[0] = rows[0] + 1.0 if rows.dtype.is_floating_point else rows[1]
        return rows

    def start_wrong(parts, size, group):
        return started(list(map(change, parts)), size, group)

    with mock.patch.object(moefx.ir.ops.token_gather, name, start_wrong):
        yield changed
