"""`moefx.compile(mesh=...)`: outputs and gradients equal the plain model on each rank's tokens."""

from __future__ import annotations

import copy
import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefx
from moefx.errors import InvalidPlan, NotRewritten, Refused

from ..blocks import D, Loop, Mlp, WithBias
from .launch import sampled
from .models import BLOCKS, Model, check, compile_over_mesh

# ruff: noqa: E501  graphs as printed
GRAPHS = {
    "dedup": """\
destinations     = place_choices(topk_ids)
send             = plan_dispatch(destinations, num_ranks=4, num_slots=1, dedup=True)
counts           = exchange_counts([destinations], levels=[4], axis="ep")
packed           = pack_rows([x], [topk_w], destinations, send)
splits, num_rows = read_counts(counts)
sent             = all_to_all_rows([x], [topk_w], destinations, packed, send, splits, axis="ep")
later            = weights_later([up.local], [down.local])
rows, local_ids, weights = wait_rows(sent)
pft              = build_pft(local_ids, weights, num_experts=1, num_rows=num_rows)
y                = expert_mlp(rows, pft, [up.local], [down.local], later; relu(h) | y*w, keep="h", reduce=True)
back             = all_to_all_back(y, [splits], axis="ep")
sums             = wait_sums(back, send)""",
    "rbd": """\
destinations     = place_choices(topk_ids)
send_inter       = plan_dispatch(destinations, num_ranks=2, num_slots=2, dedup=True)
counts           = exchange_counts([destinations], levels=[2, 2], axis="ep")
packed_inter     = pack_rows([x], [topk_w], destinations, send_inter)
splits_inter, splits_intra, num_rows = read_counts(counts)
sent_inter       = all_to_all_rows([x], [topk_w], destinations, packed_inter, send_inter, splits_inter, axis="ep/inter")
later            = weights_later([up.local], [down.local])
pilots, pilot_destinations, pilot_weights = wait_rows(sent_inter)
send_intra       = plan_dispatch(pilot_destinations, num_ranks=2, num_slots=1, dedup=True)
sent_intra       = all_to_all_rows([pilots], [pilot_weights], pilot_destinations, send_intra, splits=splits_intra, axis="ep/intra")
rows, local_ids, weights = wait_rows(sent_intra)
pft              = build_pft(local_ids, weights, num_experts=1, num_rows=num_rows)
y                = expert_mlp(rows, pft, [up.local], [down.local], later; relu(h) | y*w, keep="h", reduce=True)
back_intra       = all_to_all_back(y, [splits_intra], axis="ep/intra")
sums_intra       = wait_sums(back_intra, send_intra)
back_inter       = all_to_all_back(sums_intra, [splits_inter], axis="ep/inter")
sums_inter       = wait_sums(back_inter, send_inter)""",
    "halo": """\
destinations     = place_choices(topk_ids)
near, far        = near_and_far(destinations, begin={begin}, num_places=2)
send_inter       = plan_dispatch(far, num_ranks=2, num_slots=2, dedup=True)
send_near        = plan_dispatch(near, num_ranks=2, num_slots=1, dedup=True)
counts           = exchange_counts([destinations], levels=[2, 2], near=True, axis="ep")
packed_inter     = pack_rows([x], [topk_w], far, send_inter)
packed_near      = pack_rows([x], [topk_w], near, send_near)
splits_inter, splits_intra, splits_near, num_rows = read_counts(counts)
sent_inter       = all_to_all_rows([x], [topk_w], far, packed_inter, send_inter, splits_inter, axis="ep/inter")
sent_near        = all_to_all_rows([x], [topk_w], near, packed_near, send_near, splits_near, axis="ep/intra")
later            = weights_later([up.local], [down.local])
pilots, pilot_destinations, pilot_weights = wait_rows(sent_inter)
send_intra       = plan_dispatch(pilot_destinations, num_ranks=2, num_slots=1, dedup=True)
sent_intra       = all_to_all_rows([pilots], [pilot_weights], pilot_destinations, send_intra, splits=splits_intra, axis="ep/intra")
rows, local_ids, weights = wait_rows([sent_intra, sent_near])
pft              = build_pft(local_ids, weights, num_experts=1, num_rows=num_rows)
y                = expert_mlp(rows, pft, [up.local], [down.local], later; relu(h) | y*w, keep="h", reduce=True)
back_intra       = all_to_all_back(y, [splits_intra, splits_near], axis="ep/intra")
sums_intra       = wait_sums(back_intra.far, send_intra)
back_inter       = all_to_all_back(sums_intra, [splits_inter], axis="ep/inter")
sums_near        = wait_sums(back_intra.near, send_near)
sums_inter       = wait_sums(back_inter, send_inter)
out              = sums_near + sums_inter""",
}


def case_experts_over_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for dispatch, kind in sampled(itertools.product(("dedup", "flat"), BLOCKS), 6):
        plan = moefx.Plan(dispatch=dispatch, validation="symbolic")
        check(Model(kind, layers=1 if dispatch == "flat" else 2).double(), mesh, plan)


def case_ranks_without_tokens() -> None:
    """Run ranks without tokens, with a block that skips idle experts too: on one device it needs a token."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    x = torch.randn(0 if dist.get_rank() % 2 else 9, D, dtype=torch.float64)
    for kind in ("kinds", "stacked"):
        check(Model(kind, layers=1).double(), mesh, moefx.Plan(dispatch="dedup", validation="symbolic"), x)


def case_graphs_are_printed() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    for dispatch, wanted in GRAPHS.items():
        plan = moefx.Plan(dispatch=dispatch, node_size=2)
        compiled = moefx.compile(BLOCKS["stacked"](), mesh=mesh, plan=plan, example_inputs=(torch.zeros(9, D),))
        lines = [line.partition("  #")[0].rstrip() for line in str(moefx.graph(compiled, "")).splitlines()]
        wanted = wanted.format(begin=dist.get_rank() // 2 * 2)
        assert "\n".join(lines[5:-1]) == wanted, moefx.graph(compiled, "")
    plan = moefx.Plan(disable=("overlap",), dispatch="dedup")
    compiled = moefx.compile(BLOCKS["stacked"](), mesh=mesh, plan=plan, example_inputs=(torch.zeros(9, D),))
    assert moefx.graph(compiled, "").find("moefx::all_to_all_rows")
    assert not moefx.graph(compiled, "").find("moefx::weights_later")


class Scaled(Loop):
    """Experts that share a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def expert(self, e, x, w):
        return torch.tanh(self.experts[e](x) * self.scale) * w


def check_refused(error: type[Exception], text: str, *args, **kwargs) -> None:
    try:
        moefx.compile(*args, **kwargs)
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(f"expected {error.__name__}: {text}")


class MovingMean(Loop):
    """Read a buffer behind the experts, or in them, and overwrite it by a mean of tokens, which no exchange delays."""

    def __init__(self, is_in_experts: bool):
        super().__init__(Mlp)
        self.is_in_experts = is_in_experts
        self.register_buffer("mean", torch.ones(D))

    def expert(self, e, x, weight):
        return super().expert(e, x * self.mean if self.is_in_experts else x, weight)

    def forward(self, x):
        out = super().forward(x)
        out = out if self.is_in_experts else out + self.mean
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return out


def case_buffers_are_read_before_they_are_written() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for is_in_experts in (False, True):
        torch.manual_seed(0)
        original = MovingMean(is_in_experts).double()
        plain, x = copy.deepcopy(original), torch.randn(9, D, dtype=torch.float64)
        compiled = compile_over_mesh(original, mesh, moefx.Plan(validation="symbolic"))
        for _ in range(2):
            torch.testing.assert_close(compiled(x), plain(x))
            torch.testing.assert_close(compiled.mean, plain.mean)
        assert moefx.blocks(compiled)[0].fallbacks == 0


def case_invalid_axes_raise() -> None:
    world = dist.get_world_size()
    block, inputs = BLOCKS["gated"](), (torch.zeros(9, D),)
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    check_refused(InvalidPlan, f"the mesh has no such axis; it has ep={world}", block, mesh=flat, example_inputs=inputs,
            plan=moefx.Plan(expert_axis="tp"))  # fmt: skip
    unnamed = init_device_mesh("cpu", (world,))
    check_refused(InvalidPlan, "axes of the mesh have no names", block, mesh=unnamed, example_inputs=inputs)
    check_refused(Refused, "the experts share a value", Scaled(), mesh=flat, example_inputs=inputs)

    class TwoKinds(Loop):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([*self.experts[:2], *Loop(Mlp, num_experts=2).experts])

    check_refused(Refused, "several kinds of experts with matrices", TwoKinds(), mesh=flat, example_inputs=inputs)

    class WithSpare(Loop):
        def __init__(self):
            super().__init__(num_experts=world)
            self.gate, self.up = nn.Linear(D, 2 * world), nn.Parameter(torch.randn(2 * world, D, D))

        def expert(self, e, x, w):
            return torch.relu(x @ self.up[e]) * w

        def forward(self, x):
            w, ids = self.route(x)
            return self.mixed(x, w, ids) + x * (w * (ids >= world)).sum(-1, keepdim=True)

    check_refused(
        Refused,
        f"up holds {2 * world} experts, but the block uses {world}",
        WithSpare(),
        mesh=flat,
        example_inputs=inputs,
    )

    class WithDropout(Loop):
        def expert(self, e, x, w):
            return torch.dropout(super().expert(e, x, w), 0.5, self.training)

    compiled = moefx.compile(WithDropout().eval(), mesh=flat, example_inputs=inputs)
    compiled(torch.randn(5, D))
    try:
        compiled.train()(torch.randn(5, D))
    except NotRewritten as found:
        assert "draw random numbers" in str(found)
        assert "a part of the experts" in str(found)
    else:
        raise AssertionError("ran the original")


def case_explain_lists_distributed_parameters() -> None:
    """Explain the distribution that `compile` would apply, without moving parameters."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.shares, self.last = BLOCKS["stacked"](), Scaled(), BLOCKS["gated"](6)
            self.dense = self.last.experts[0]

        def forward(self, x):
            return self.last(self.shares(self.first(x))) + self.dense(x)

    world, model, inputs = dist.get_world_size(), Two(), (torch.zeros(9, D),)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    before = dict(model.named_parameters())
    found = moefx.explain(model, mesh=mesh, example_inputs=inputs)
    (first,) = found.matched
    assert first.names == ("first",)
    assert moefx.explain(model, example_inputs=inputs).matched[0].notes == ()
    assert first.notes[0].startswith(f"experts over {world} ranks of mesh axis 'ep' ({world}), {4 // world} each")
    refused = {r.name: r for r in found.refused}
    assert "the experts share a value" in refused["shares"].reason
    assert refused["shares"].culprits == ("scale",)
    assert refused["shares"].source
    assert refused["shares"].remedy
    why = "dense.gate.weight is the parameter last.experts.0.gate.weight" if 6 % world == 0 else "6 experts"
    assert why in refused["last"].reason, refused["last"]
    after = dict(model.named_parameters())
    assert all(p is after[name] for name, p in before.items())
    assert not moefx.blocks(model)

    compiled = moefx.compile(model.first, mesh=mesh, example_inputs=inputs)
    assert moefx.explain(compiled).matched[0].notes == first.notes
    try:
        moefx.explain(model, mesh=mesh, example_inputs=inputs, plan=moefx.Plan(expert_axis="tp"))
    except InvalidPlan as error:
        assert "the mesh has no such axis" in str(error)
    else:
        raise AssertionError("over an axis that there is not")


def case_ambiguous_axes_raise() -> None:
    block, inputs = BLOCKS["gated"](), (torch.zeros(9, D),)
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_refused(InvalidPlan, "which axis of the mesh (dp=2, tp=2)", block, mesh=two, example_inputs=inputs)
    for axis, fits, other in (("tp", "ep_first", "dp_first"), ("dp", "dp_first", "ep_first")):
        plan = moefx.Plan(expert_axis=axis, placement=other)
        check_refused(InvalidPlan, f"Plan(placement='{other}'): an expert group of the mesh has the ranks", block,
                mesh=two, plan=plan, example_inputs=inputs)  # fmt: skip
        moefx.compile(block, mesh=two, plan=plan.replace(placement=fits), example_inputs=inputs)


def case_two_axes() -> None:
    """Form expert groups of neighbouring ranks (EP first), and of strided ranks (DP first)."""
    for names, axis in ((("dp", "ep"), None), (("experts", "dp"), "experts")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for kind in ("gated", "stacked"):
            check(Model(kind).double(), mesh, moefx.Plan(expert_axis=axis, validation="symbolic"))


def case_calls_unlike_the_example() -> None:
    """Call with another dtype and autocast: the block is lifted again, with abstract parameters of all experts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    for make in sampled((lambda: Model("biased"), lambda: Model("stacked"), WithBias), 3):
        torch.manual_seed(0)
        model = make()
        compiled = compile_over_mesh(model, mesh, moefx.Plan(validation="symbolic"))
        x = torch.randn(11, D)
        torch.testing.assert_close(compiled(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        compiled.double(), model.double()
        x = x.double()
        torch.testing.assert_close(compiled(x), model(x))
        assert not any(block.fallbacks for block in moefx.blocks(compiled))
