"""`moefx.rewrite_graph` on graphs of `torch.export` and `make_fx`."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

import moefx
from moefx.errors import InvalidInput
from moefx.frontends.dynamo.backend import backend
from tests import golden
from tests.verification.compiled import break_op

from .models import IDIOMS, D, build_model

PLAN = moefx.Plan(validation="symbolic")


def export_module(module, x, dynamic=False):
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) if dynamic else None
    return torch.export.export(module, (x,), dynamic_shapes=dims).module()


def export_decomposed(module, x):
    """Export the module and decompose it to core ATen ops."""
    return torch.export.export(module, (x,)).run_decompositions().module()


def trace_functional(module, x, decompositions=None):
    """Trace the module with its parameters as inputs: no names, no lines, and no difference to activations."""
    names, values = zip(*module.named_parameters(), strict=True)

    def f(*args):
        return torch.func.functional_call(module, dict(zip(names, args[:-1], strict=True)), args[-1:])

    args = (*(v.detach() for v in values), x)
    return make_fx(f, decomposition_table=decompositions)(*args), args


def draw_input(module, *shape):
    return torch.randn(*shape, D, dtype=next(module.parameters()).dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_regions_print_alike_in_every_run(idiom, is_decomposed):
    """Print the graphs of a region identically in every run. Core ATen ops change only the routing."""
    module = build_model(idiom, num_layers=1)
    x = draw_input(module, 2, 9)
    gm = export_decomposed(module, x) if is_decomposed else export_module(module, x)
    out = moefx.rewrite_graph(gm, (x,), PLAN)
    for got, expected in zip(out(x), module(x), strict=True):
        torch.testing.assert_close(got, expected)
    (block,) = moefx.blocks(out)
    text = str(block.graph.replace(header=""))
    name = f"region_{idiom}{'_decomposed' if is_decomposed else ''}"
    if idiom == "gshard" and any("_assert_async" in str(node.target) for node in gm.graph.nodes):
        name += "_asserted"  # `one_hot` of torch 2.13 checks its ids here, outside the region
    golden.check(f"{name}.txt", re.sub(r"\S+\.py:\d+", "", text))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
@pytest.mark.parametrize("idiom", ["dense_masked", "bmm_weight_before", "stack_gather", "weight_gather"])
def test_without_names(idiom, is_decomposed):
    """Rewrite a graph of ATen ops whose parameters are inputs."""
    module = build_model(idiom)
    gm, args = trace_functional(module, draw_input(module, 2, 9), core_aten_decompositions() if is_decomposed else None)
    out = moefx.rewrite_graph(gm, args, PLAN)
    assert len(moefx.blocks(out)) == 2
    for got, expected in zip(out(*args), gm(*args), strict=True):
        torch.testing.assert_close(got, expected)


class OneProduct(nn.Module):
    """Compute gate and up of all experts in one product and split its columns.

    `wide`: the product is one wide layer.
    """

    def __init__(self, split, wide: bool):
        super().__init__()
        self.split, self.gate = split, nn.Linear(D, 4, bias=False)
        self.up = nn.Linear(D, 4 * 2 * 6) if wide else nn.Parameter(torch.randn(4, D, 2 * 6))
        self.down = nn.Parameter(torch.randn(4, 6, D))

    def forward(self, x):
        t = x.flatten(0, 1)
        w, ids = self.gate(t).softmax(-1).topk(2, -1)
        weights = t.new_zeros(t.shape[0], 4).scatter(1, ids, w)
        hidden = torch.einsum("td,edh->teh", t, self.up) if isinstance(self.up, nn.Parameter) else self.up(t)
        gate, up = self.split(hidden.view(t.shape[0], 4, 12))
        y = torch.einsum("teh,ehd->ted", nn.functional.silu(gate) * up, self.down)
        return torch.einsum("ted,te->td", y, weights).view_as(x)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["whole", "decomposed"])
@pytest.mark.parametrize("wide", [False, True], ids=["stacked", "wide"])
@pytest.mark.parametrize(
    "split",
    [lambda h: h.chunk(2, -1), lambda h: (h[..., ::2], h[..., 1::2]), lambda h: h.unflatten(-1, (2, 6)).unbind(-2)],
    ids=["halves", "interleaved", "axis"],
)
def test_columns_of_one_product(split, wide, is_decomposed):
    """Use only the columns of each expert: core ATen computes an einsum over the experts as one product."""
    module = OneProduct(split, wide).double()
    x = draw_input(module, 2, 9)
    gm = export_decomposed(module, x) if is_decomposed else export_module(module, x)
    out = moefx.rewrite_graph(gm, (x,), PLAN)
    torch.testing.assert_close(out(x), module(x))
    (block,) = moefx.blocks(out)
    assert "expert_mlp(" in str(block.graph) and "einsum" not in str(block.graph)


def test_a_graph_with_symbolic_sizes_runs_rewritten_at_other_sizes():
    module = build_model("dense_masked")
    out = moefx.rewrite_graph(
        export_module(module, draw_input(module, 2, 9), dynamic=True), (draw_input(module, 2, 9),), PLAN
    )
    for shape in ((2, 9), (4, 5), (3, 30)):
        x = draw_input(module, *shape)
        torch.testing.assert_close(out(x)[0], module(x)[0])
    assert all(b.forward.counts.rewritten == 3 and not b.fallbacks for b in moefx.blocks(out))


def test_blocks_of_a_graph_can_be_inspected():
    module = build_model("stack_gather")
    x = draw_input(module, 2, 9)
    out = moefx.rewrite_graph(export_module(module, x), (x,), PLAN)
    names = [b.name for b in moefx.blocks(out)]
    assert names == ["moefx.layers_0_moe", "moefx.layers_1_moe"]
    assert moefx.history(out, names[1]).passes == ("rewrite_block", "fuse", "checkpoint")
    assert "build_pft" in str(moefx.graph(out, names[0], after="rewrite_block"))
    report = moefx.explain(out)
    assert [m.names for m in report.matched] == [("layers.0.moe", "layers.1.moe")]
    assert moefx.history(out, "layers.1.moe") is moefx.history(out, names[1])  # by the name in the report
    assert "E=5, top-2" in str(report) and "x: 2-d float64 on cpu" in str(report) and "meta" not in str(report)


def test_graphs_are_verified_against_graph_and_model():
    """Verify against the graph and against its model, and report a wrong program."""
    module = build_model("stack_gather")
    x = draw_input(module, 2, 9)
    gm = export_module(module, x)
    out = moefx.rewrite_graph(gm, (x,), PLAN)
    for reference in (gm, module):
        report = moefx.verify(out, reference, (x,), routings=False)
        assert report.ok
        assert {"(graph)", "", "moefx.layers_0_moe", "moefx.layers_1_moe"} == {row.block for row in report.rows}
    with pytest.raises(InvalidInput, match=r"rewritten for torch.float64 only; to compare in torch.float32, rewrite"):
        moefx.verify(out, gm, (x,), dtype=torch.float32)
    with torch.no_grad():
        other = copy.deepcopy(module)
        other.layers[1]["moe"].w_up.mul_(1.01)
    assert not moefx.verify(out, other, (x,), routings=False, grads=False).ok
    (program,) = moefx.blocks(out)[1].forward.programs
    right = program.fn
    program.fn = lambda *values: tuple(2 * t for t in right(*values))
    report = moefx.verify(out, gm, (x,), routings=False, grads=False)
    assert not report.ok and report.first_block == "moefx.layers_1_moe"
    assert report.first_pass.startswith("none: the graphs after all passes are correct")


def test_the_pass_that_broke_a_region_is_named():
    module = build_model("stack_gather")
    x = draw_input(module, 2, 9)
    gm = export_module(module, x)
    out = moefx.rewrite_graph(gm, (x,), PLAN)
    with break_op("expert_mlp_backward", lambda grads, *_, **__: [*grads[:-1], grads[-1] * 1.01]):
        report = moefx.verify(out, gm, (x,), routings=False)
    assert report.first_block == "moefx.layers_0_moe" and report.first_pass.startswith("fuse (")


def test_a_page_of_a_region(tmp_path):
    module = build_model("stack_gather", num_layers=1)
    x = draw_input(module, 2, 9)
    out = moefx.rewrite_graph(export_module(module, x), (x,), PLAN)
    page = tmp_path / "region.html"
    moefx.history(out, "moefx.layers_0_moe").html(page)
    text = page.read_text()
    assert "<svg" in text and "build_pft" in text and "layers.0.moe" in text


def test_the_rest_is_untouched():
    module = build_model("dense_masked", num_layers=1)
    x = draw_input(module, 2, 9)
    gm = export_module(module, x)
    before = [(n.op, str(n.target)) for n in gm.graph.nodes]
    out = moefx.rewrite_graph(gm, (x,), PLAN)
    assert [(n.op, str(n.target)) for n in gm.graph.nodes] == before
    assert out is not gm and sum(n.op == "call_module" and "moefx" in n.target for n in out.graph.nodes) == 1
    norms = [n for n in out.graph.nodes if "layer_norm" in str(n.target)]
    assert len(norms) == 1 and norms[0].meta["val"].shape == x.shape


class Drifting(torch.nn.Module):
    """Write to a buffer that scales the gates before its first read, between two reads, or after the last."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.gate = torch.nn.Linear(D, 5, bias=False)
        self.up = torch.nn.Parameter(torch.randn(5, D, D))
        self.register_buffer("drift", torch.full((), 0.5))

    def forward(self, x):
        def write(where):
            if self.where == where:
                with torch.no_grad():
                    self.drift.add_(0.25)

        write("before")
        w, ids = self.gate(x).softmax(-1).topk(2)
        w = w * self.drift.exp()
        write("between")
        w = w * self.drift.cos()
        write("behind")
        y = torch.stack([(x @ self.up[e]).relu() for e in range(5)], 2)
        return (y.gather(2, ids.unsqueeze(-1).expand(*ids.shape, D)) * w.unsqueeze(-1)).sum(2)


@pytest.mark.parametrize("where", ["before", "between", "behind"])
def test_buffer_writes_outside_of_a_region_keep_their_order(where):
    """Keep the order of the region's reads of a buffer and the writes around them."""
    module = Drifting(where)
    reference = copy.deepcopy(module)
    call = torch.compile(module, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    for _ in range(2):
        x = torch.randn(2, 9, D)
        torch.testing.assert_close(call(x), reference(x))
        torch.testing.assert_close(module.drift, reference.drift)
    assert len(moefx.blocks(call)) == (0 if where == "between" else 1)


def test_a_graph_without_regions_is_returned():
    gm = export_module(torch.nn.Linear(4, 4), torch.randn(3, 4))
    assert moefx.rewrite_graph(gm, (torch.randn(3, 4),)) is gm


def test_rewrite_graph_rejects_other_arguments():
    with pytest.raises(InvalidInput, match="GraphModule"):
        moefx.rewrite_graph(torch.nn.Linear(3, 3), (torch.randn(2, 3),))
    gm = fx.symbolic_trace(torch.nn.Linear(3, 3))
    with pytest.raises(InvalidInput, match="1 inputs"):
        moefx.rewrite_graph(gm, ())


@pytest.mark.parametrize("invalid", [torch.randn(2, 4), "x", None])
def test_inputs_that_do_not_fit_raise(invalid, caplog):
    gm = fx.symbolic_trace(torch.nn.Linear(3, 3))
    with pytest.raises(InvalidInput, match=r"the graph does not run on these example_inputs: (Runtime|Type)Error: "):
        moefx.rewrite_graph(gm, (invalid,))
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_in_place_results():
    """Read a sum that is accumulated in place through the name of an earlier result."""

    class InPlace(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(D, 4, bias=False)
            self.experts = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(4))

        def forward(self, x):
            w, idx = self.gate(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                out.add_(expert(x) * (w * (idx == e)).sum(-1, keepdim=True))
            return out.mul(2)

    module, x = InPlace(), torch.randn(9, D)
    graphs = []
    torch.compile(module, backend=lambda g, a: graphs.append((g, a)) or g.forward)(x)
    ((gm, args),) = graphs
    out = moefx.rewrite_graph(gm, args, PLAN)
    assert len(moefx.blocks(out)) == 1
    torch.testing.assert_close(out(*args)[0], module(x))


class Checked(IDIOMS["weight_gather"]):
    """Raise if the weights exceed a limit."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor(2.0))
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)

    def forward(self, x):
        torch._check(x.shape[-1] == D)
        scores = self.gate(x).softmax(-1).topk(2, -1).values
        torch._assert_async((scores < self.limit).all(), "too large")
        return super().forward(x)


@pytest.mark.parametrize("decompose", [False, True])
def test_checks_of_the_graph_still_raise(decompose):
    module, x = Checked().double(), torch.randn(2, 9, D, dtype=torch.float64)
    gm = export_decomposed(module, x) if decompose else export_module(module, x)
    out = moefx.rewrite_graph(gm, (x,), PLAN)
    assert len(moefx.blocks(out)) == 1
    torch.testing.assert_close(out(x), module(x))
    out.limit.zero_()
    with pytest.raises(RuntimeError, match="too large"):
        out(x)


class Attends(nn.Module):
    """Layer with a mixture after masked attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.attention = nn.LayerNorm(D), nn.MultiheadAttention(D, 2, batch_first=True)
        self.moe = build_model("dense_masked", num_layers=1).layers[0]["moe"]

    def forward(self, x, mask):
        x = x + self.attention(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
        return x + self.moe(self.norm(x))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("decompose", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mixture_behind_attention(decompose, dynamic):
    """Rewrite only the mixture: a tensor of the input's length need not depend on its values.

    The graph runs in the mode of its capture, regardless of its `training` flag.
    """
    layer = Attends().double().eval()
    args = torch.randn(3, 9, D, dtype=torch.float64), torch.rand(3, 9) > 0.2
    dims = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},) * 2 if dynamic else None
    program = torch.export.export(layer, args, dynamic_shapes=dims)
    out = moefx.rewrite_graph((program.run_decompositions() if decompose else program).module(), args, PLAN)
    assert [b.name for b in moefx.blocks(out)] == ["moefx.moe"] and not moefx.explain(out).refused
    moefx.verify(out, layer, args, routings=False).raise_if_failed()
