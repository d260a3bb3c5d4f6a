"""`torch.compile(model, backend="moefx")`: forward and backward of every idiom that Dynamo captures in one graph."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tomllib
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.capture.tracing.capture_result import Capture
from moefx.errors import InvalidPlan
from moefx.frontends.dynamo import backend
from moefx.frontends.fx import proof_cache
from tests.models.case import run_and_differentiate
from tests.mutants import bases

from .models import IDIOMS, D, E, H, Model, SparseGates, build_model

_ROOT = Path(__file__).parents[3]


def read_warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("moefx") and r.levelname == "WARNING"]


def compile_module(module: nn.Module, dynamic: bool | None = None, **options) -> nn.Module:
    options = {"backend": "aot_eager", "validation": "symbolic"} | options
    return torch.compile(module, backend=backend.backend, options=options, dynamic=dynamic)


def check_equal(reference: nn.Module, module: nn.Module, call, x: torch.Tensor) -> None:
    """Check results against float64: at most twice the error of the original, in half precision three times."""
    exact, expected, actual = (
        _compute_exact(reference, x),
        run_and_differentiate(reference, reference, x),
        run_and_differentiate(module, call, x),
    )
    times, tolerance = (3, 1e-2) if x.dtype == torch.bfloat16 else (2, 1e-10)
    for a, b, c in zip(actual, expected, exact, strict=True):
        bound = times * (b - c).abs().max() + tolerance / 10 * c.abs().max().clamp_min(1.0)
        assert (a - c).abs().max() <= bound


def _compute_exact(reference: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Compute results in float64 with separate products: torch has grouped products only in lower precision."""
    original = torch.nn.functional.grouped_mm

    def grouped(rows, weights, *, offs):
        starts = [0, *offs.tolist()]
        return torch.cat([rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)])

    torch.nn.functional.grouped_mm = grouped
    try:
        exact = copy.deepcopy(reference).double()
        return run_and_differentiate(exact, exact, x.double())
    finally:
        torch.nn.functional.grouped_mm = original


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("idiom", "dynamic"), [*((idiom, None) for idiom in IDIOMS), ("weight_gather", True), ("gshard", True)]
)
def test_layers_of_one_idiom_have_one_proof(idiom, dynamic):
    """Rewrite both layers with one proof, which also holds for later sizes."""
    module = build_model(idiom)
    reference, call = copy.deepcopy(module), compile_module(module, dynamic)
    before = proof_cache.num_proofs_tried
    dtype = next(module.parameters()).dtype
    for shape in ((2, 9), (1, 11)):
        torch.manual_seed(1)
        check_equal(reference, module, call, torch.randn(*shape, D, dtype=dtype))
    assert [b.name for b in moefx.blocks(call)] == ["layers.0.moe", "layers.1.moe"]
    assert all(b.graph.find("moefx::expert_mlp") for b in moefx.blocks(call))
    proofs = 2 if idiom == "gshard" and dynamic is None else 1  # the capacity of GShard is a number in the graph
    assert proof_cache.num_proofs_tried - before <= (3 if proofs == 2 else 2)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_around_a_region_is_kept(inside):
    """Enable autocast around the call or in the model, and disable it in the router."""

    class Router(bases.DenseMasked):
        def forward(self, x):
            t = x.reshape(-1, D)
            with torch.autocast("cpu", enabled=False):
                w, idx = nn.functional.linear(t.float(), self.gate.weight).softmax(-1).topk(2)
            out = torch.zeros_like(t)
            for e in range(bases.E):
                out = out + self.expert(e, t) * (w * (idx == e)).sum(-1, keepdim=True)
            return out.view_as(x)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pre, self.moe = nn.Linear(D, D), Router()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16) if inside else contextlib.nullcontext():
                return self.moe(self.pre(x))

    torch.manual_seed(0)
    module = Outer()
    call, x = compile_module(module), torch.randn(2, 9, D)
    with contextlib.nullcontext() if inside else torch.autocast("cpu", torch.bfloat16):
        got, expected = call(x), module(x)
    (block,) = moefx.blocks(call)
    assert block.spec.autocast is torch.bfloat16 and got.dtype == expected.dtype
    assert (got - expected).abs().max() <= 2 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


def test_autocast_around_some_calls():
    """Prove one graph with autocast and without: users may train with it and evaluate without it."""
    module, x = build_model("weight_gather", torch.float32, num_layers=1), torch.randn(2, 9, D)
    for enabled in (False, True, False):
        torch._dynamo.reset()
        call = compile_module(module, backend="eager")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            call(x)
        (block,) = moefx.blocks(call)
        assert block.spec.autocast is (torch.bfloat16 if enabled else None) and not block.fallbacks


def test_random_numbers_without_an_input():
    """Include values computed from the random numbers in the region: it draws them once."""

    class Noisy(bases.WeightGather):
        def forward(self, x):
            t = x.reshape(-1, D)
            w, idx = (self.gate(t) + torch.randn(bases.E) * 0.1).softmax(-1).topk(2, dim=-1)
            h = torch.einsum("nd,nkdh->nkh", t, self.w_up[idx]).relu()
            return (torch.einsum("nkh,nkhd->nkd", h, self.w_down[idx]) * w.unsqueeze(-1)).sum(1).view_as(x)

    torch.manual_seed(0)
    module, x = Model(Noisy, num_layers=1), torch.randn(2, 9, D)
    for p in module.parameters():
        nn.init.normal_(p, std=0.5)
    call = compile_module(module)
    for _ in range(2):
        torch.manual_seed(1)
        got, after = call(x), torch.rand(1)
        torch.manual_seed(1)
        torch.testing.assert_close((got, after), (module(x), torch.rand(1)))
    assert moefx.blocks(call)


def test_side_results():
    """Update counts in a buffer and an auxiliary loss as the original does."""
    module = build_model("sparse_gates")
    reference, call, x = copy.deepcopy(module), compile_module(module), torch.randn(2, 9, D, dtype=torch.float64)
    (_, aux), (_, expected) = call(x), reference(x)
    torch.testing.assert_close(aux, expected)
    for compiled_layer, layer in zip(module.layers, reference.layers, strict=True):
        assert compiled_layer["moe"].load.sum() == 2 * 9 * 2
        torch.testing.assert_close(compiled_layer["moe"].load, layer["moe"].load)


def test_weights_may_change():
    module = build_model("dense_masked")
    call, x = compile_module(module), torch.randn(2, 9, D, dtype=torch.float64)
    call(x)
    with torch.no_grad():
        module.layers[1]["moe"].experts[3].down.weight.mul_(-2)
    check_equal(copy.deepcopy(module), module, call, x)


@pytest.mark.exhaustive  # half a minute of C++
def test_inductor_compiles_the_rest():
    """Compile without options, as users do."""
    module = build_model("stack_gather")
    reference, call = copy.deepcopy(module), torch.compile(module, backend=backend.backend)
    for shape in ((2, 9), (1, 11)):
        check_equal(reference, module, call, torch.randn(*shape, D, dtype=next(module.parameters()).dtype))
    assert len(moefx.blocks(call)) == 2


def test_a_second_compile_reuses_the_proof():
    before = proof_cache.num_proofs_tried
    for _ in range(2):
        torch._dynamo.reset()
        compile_module(build_model("dense_masked"))(torch.randn(2, 9, D, dtype=torch.float64))
    assert proof_cache.num_proofs_tried == before + 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D, D))

    def forward(self, x, bias):
        w, idx = (self.gate(x) + bias).softmax(-1).topk(2)
        gates = x.new_zeros(*x.shape[:-1], 4).scatter(-1, idx, w)
        return (torch.einsum("...d,edf->...ef", x, self.up).tanh() * gates.unsqueeze(-1)).sum(-2)


class OneBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in "123")
        self.register_buffer("bias", torch.randn(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, self.bias)
        return x


def test_layers_with_a_weight_of_the_model_have_one_proof():
    module, before = OneBias().double(), proof_cache.num_proofs_tried
    call, x = compile_module(module), torch.randn(2, 9, D, dtype=torch.float64)
    torch.testing.assert_close(call(x), copy.deepcopy(module)(x))
    assert len(moefx.blocks(call)) == 3 and proof_cache.num_proofs_tried == before + 1


def test_a_proof_that_is_kept_holds_no_capture():
    """Release captures with the proof: they need hundreds of megabytes."""

    def captures() -> int:
        gc.collect()
        return sum(isinstance(obj, Capture) for obj in gc.get_objects())

    before = captures()
    call = compile_module(build_model("dense_masked"))
    call(torch.randn(2, 9, D, dtype=next(call.parameters()).dtype))
    assert len(moefx.blocks(call)) == 2 and captures() == before


def test_the_numeric_check_runs():
    module = build_model("dense_masked", num_layers=1)
    call = compile_module(module, validation="auto")
    call(torch.randn(2, 9, D, dtype=torch.float64))
    assert "agrees in" in str(moefx.explain(call))


def test_absence_of_regions_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "moefx.frontends.dynamo.backend"):
        for width in (4, 5):
            torch._dynamo.reset()
            layer = nn.Linear(width, width)
            x = torch.randn(3, width)
            torch.testing.assert_close(compile_module(layer)(x), layer(x))
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "no MoE region" in caplog.text


class ExpertChoice(nn.Module):
    """Experts select tokens, which moefx refuses."""

    def __init__(self):
        super().__init__()
        self.gate, self.w = nn.Linear(D, 5, bias=False), nn.Parameter(torch.randn(5, D, D))

    def forward(self, x):
        t = x.reshape(-1, D)
        scores = self.gate(t).softmax(-1).t()
        v, idx = scores.topk(4, dim=-1)
        y = torch.bmm(t[idx], self.w) * v.unsqueeze(-1)
        return torch.zeros_like(t).index_add(0, idx.flatten(), y.flatten(0, 1)).view_as(x)


def test_a_refusal_has_reason_and_line(caplog):
    module = ExpertChoice()
    call, x = compile_module(module), torch.randn(2, 9, D)
    torch.testing.assert_close(call(x), module(x))
    assert not moefx.blocks(call)
    (text,) = read_warnings(caplog)
    assert "topk chooses among tokens, not among experts" in text and "test_backend.py:" in text


class Expert(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class Loop(nn.Module):
    """Find rows on the host in a loop, which Dynamo does not compile."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(Expert(D, D) for _ in range(4))

    def forward(self, x):
        w, idx = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(idx == e)
            out = out.index_add(0, token, expert(x[token]) * w[token, slot, None])
        return out


def test_a_loop_that_depends_on_data_is_named(caplog):
    module, x = Loop(), torch.randn(9, D)
    torch.testing.assert_close(compile_module(module)(x), module(x))
    (text,) = {r.getMessage() for r in caplog.records if "moefx.compile" in r.getMessage()}
    assert "does not compile forward (test_backend.py:" in text and "aten.nonzero.default" in text


def test_explain_of_a_graph_without_regions():
    """Explain the graphs of Dynamo, not the blocks that `moefx.compile` would find."""
    call = compile_module(Loop())
    assert "not called yet" in str(moefx.explain(call))
    call(torch.randn(9, D))
    explained = moefx.explain(call)
    assert not explained.matched and not moefx.blocks(call) and explained.refused


class Unrolled(Loop):
    """Expand the loop: the graph ends where the host finds the rows."""

    def forward(self, x):
        w, idx = self.gate(x).softmax(-1).topk(2)
        hit = idx.unique().tolist()
        return sum(self.experts[e](x) * (w * (idx == e)).sum(-1, keepdim=True) for e in hit)


def test_a_graph_that_ends_before_the_experts_is_named(caplog):
    module, x = Unrolled(), torch.randn(9, D)
    torch.testing.assert_close(compile_module(module)(x), module(x))
    texts = {r.getMessage() for r in caplog.records if "moefx.compile" in r.getMessage()}
    assert any("selected at test_backend.py:" in t and "ends its graph at test_backend.py:" in t for t in texts)


def test_rewritten_blocks_are_unchanged(caplog):
    module, x = nn.Sequential(nn.LayerNorm(D), Loop()), torch.randn(9, D)
    rewritten = moefx.compile(module, example_inputs=(x,))
    before = proof_cache.num_proofs_tried
    torch.testing.assert_close(compile_module(rewritten)(x), module(x))
    assert proof_cache.num_proofs_tried == before and not read_warnings(caplog)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpint": "x"}, "checkpint"),
        ({"backend": 3}, "expected a name or a function"),
        ({"backend": "moefx"}, "must be another one"),
        ({"backend": "aot_egaer"}, "did you mean aot_eager"),
        ({"expert_axis": "ep"}, "only moefx.compile\\(mesh=...\\)"),
        ({"sequence_axis": "tp"}, "only moefx.compile\\(mesh=...\\)"),
        ({"disable": ("fusion",)}, "no pass 'fusion'; there is fuse"),
        ({"disable": 3}, "expected names of passes"),
        ({"validation_seconds": "10"}, "expected a number"),
        ({"backend": "inductor", "backend_options": 3}, "'backend_options': 3}: expected a dict"),
        ({"backend": "inductor", "backend_options": {"max_autotun": True}}, "did you mean max_autotune"),
        ({"backend": "inductor", "backend_options": {"max_autotune": "yes"}}, "expected a bool"),
        ({"backend": lambda gm, inputs: gm, "backend_options": {}}, "takes no `options`"),
        (
            {"backend": "inductor", "max_autotune": True},
            "an option of Inductor; options={'backend_options': ",
        ),
    ],
)
def test_unknown_options_raise(options, message):
    """Raise moefx's own error inside torch's error at the first call."""
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as error:
        compile_module(nn.Linear(3, 3), **options)(torch.randn(2, 3))
    assert isinstance(error.value.inner_exception, InvalidPlan)


def test_unknown_mode_raises():
    call = torch.compile(nn.Linear(3, 3), backend=backend.backend, mode="fastest")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="mode='fastest': ") as error:
        call(torch.randn(2, 3))
    assert isinstance(error.value.inner_exception, InvalidPlan)


@pytest.mark.parametrize("options", [[("checkpoint", "x")], moefx.Plan(checkpoint="x"), "x"])
def test_options_are_a_dict(options):
    call = torch.compile(nn.Linear(3, 3), backend=backend.backend, options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="expected a dict of fields of a Plan"):
        call(torch.randn(2, 3))


def test_a_plan_in_the_options():
    module = build_model("dense_masked", num_layers=1)
    call = compile_module(module, checkpoint="x")
    call(torch.randn(2, 9, D, dtype=torch.float64))
    (mlp,) = moefx.blocks(call)[0].graph.find("moefx::expert_mlp")
    assert mlp.kwargs["keep"] == "x"


def test_grad_mode_and_eager():
    """Run without gradients, with the backend "eager"."""
    module = Model(SparseGates).double()
    reference, call = copy.deepcopy(module), compile_module(module, backend="eager")
    x = torch.randn(2, 9, D, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(call(x)[0], reference(x)[0])
        assert len(moefx.blocks(call)) == 2
        block = moefx.blocks(call)[0]
        block.record_load()
        call(x)
    assert int(block.load().sum()) == 2 * 18


def test_no_load_of_a_graph_that_is_compiled_further():
    call, x = compile_module(build_model("stack_gather", num_layers=1)), torch.randn(2, 9, D, dtype=torch.float64)
    call(x)
    (block,) = moefx.blocks(call)
    with pytest.warns(UserWarning, match="the code that 'aot_eager' makes of a graph keeps none"):
        block.record_load()
    call(x)
    assert block.load() is None


def test_the_entry_point(tmp_path):
    """Find the backend by name from an installed package: `torch.compile(model, backend="moefx")`."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    points = project["entry-points"]["torch_dynamo_backends"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    info.joinpath("entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines, ""]))
    script = """
        import sys; sys.path.insert(0, sys.argv[1])
        import torch
        layer = torch.nn.Linear(3, 3)
        x = torch.randn(2, 3)
        call = torch.compile(layer, backend="moefx", options={"backend": "eager"})
        torch.testing.assert_close(call(x), layer(x))
        assert "moefx.frontends.dynamo.backend" in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, cwd=_ROOT, timeout=120)


def test_inside_of_a_checkpoint():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    module = Checkpointed(build_model("stack_gather"))
    reference, call = copy.deepcopy(module.inner), compile_module(module)
    check_equal(reference, module, call, torch.randn(2, 9, D, dtype=torch.float64))
    assert [b.name for b in moefx.blocks(call)] == ["inner.layers.0.moe", "inner.layers.1.moe"]


class Flat(nn.Module):
    """Mixture in a single function."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, D))
        self.up, self.down = nn.Parameter(torch.randn(E, D, H)), nn.Parameter(torch.randn(E, H, D))
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x):
        t = F.layer_norm(x.reshape(-1, D), (D,))
        scores = (t @ self.gate.T).sigmoid()
        idx = (scores + self.bias).topk(2, -1)[1]
        w = scores.gather(1, idx)
        gates = torch.zeros_like(scores).scatter(1, idx, w / w.sum(-1, keepdim=True))
        h = F.silu(torch.einsum("td,edh->teh", t, self.up))
        return x + torch.einsum("teh,ehd,te->td", h, self.down, gates).view_as(x)


def test_a_checkpoint_with_a_transposed_weight():
    """Compile a checkpoint although Dynamo keeps `.T` outside its graph."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Flat()

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=False)

    module = Checkpointed().double()
    reference, call = copy.deepcopy(module), compile_module(module, validation="numeric")
    check_equal(reference, module, call, torch.randn(2, 9, D, dtype=torch.float64))
    assert len(moefx.blocks(call)) == 1
    assert "numeric check: agrees" in str(moefx.explain(call))


def test_layers_of_one_function_in_checkpoints():
    """Name the regions of two checkpoints of one function differently: each has its own inner graph."""
    module = build_model("weight_gather", num_layers=1).layers[0]["moe"]

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = module

        def layer(self, x):
            t = x.reshape(-1, D)
            w, idx = self.moe.gate(t).softmax(-1).topk(2, dim=-1)
            h = torch.einsum("nd,nkdh->nkh", t, self.moe.w_up[idx]).relu()
            return (torch.einsum("nkh,nkhd->nkd", h, self.moe.w_down[idx]) * w.unsqueeze(-1)).sum(1).view_as(x)

        def forward(self, x):
            for _ in range(2):
                x = x + checkpoint(self.layer, x, use_reentrant=False)
            return x

    whole = Twice()
    call = compile_module(whole)
    check_equal(copy.deepcopy(whole), whole, call, torch.randn(2, 9, D, dtype=torch.float64))
    first, second = (b.name for b in moefx.blocks(call))
    assert second == f"{first}_2"


@pytest.mark.exhaustive
def test_a_compiled_backward_for_one_use_is_not_reused_for_two():
    """Compile both: Inductor caches backwards on disk, and the first may overwrite saved tensors."""
    torch.manual_seed(0)
    module = nn.Sequential(Flat(), Flat()).double()
    x = torch.randn(2, 9, D, dtype=torch.float64)

    def differentiate(call, times):
        loss = call(x).square().sum()
        parameters = [*module.parameters()]
        return [torch.autograd.grad(loss, parameters, retain_graph=times > 1) for _ in range(times)]

    with torch._inductor.utils.fresh_cache():
        for times in (1, 2):
            torch.compiler.reset()
            call = torch.compile(module, backend=backend.backend, options={"validation": "symbolic"})
            torch.testing.assert_close(differentiate(call, times), differentiate(module, times))
