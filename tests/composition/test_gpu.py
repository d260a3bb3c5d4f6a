"""Kernels in CUDA graphs, streams, devices and modes, and with large inputs."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.ir import op_providers

D, H, E, K = 256, 128, 8, 2
TOKENS = 512

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Stacked(nn.Module):
    """Plain block. `separate`: its experts are modules instead of slices of stacked parameters."""

    def __init__(self, separate: bool, d: int = D, h: int = H, experts: int = E, slots: int = K):
        super().__init__()
        self.slots, self.gate = slots, nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(d, 2 * h, bias=False), "down": nn.Linear(h, d, bias=False)})
            for _ in range(experts if separate else 0)
        )
        if not separate:
            self.up = nn.Parameter(torch.randn(experts, 2 * h, d) / d**0.5)
            self.down = nn.Parameter(torch.randn(experts, d, h) / h**0.5)

    def weights(self, e: int) -> tuple[Tensor, Tensor]:
        if len(self.experts):
            return self.experts[e]["up"].weight, self.experts[e]["down"].weight
        return self.up[e], self.down[e]

    def scores(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.scores(x).topk(self.slots, -1)
        out = torch.zeros_like(x)
        for e in range(self.gate.out_features):
            up, down = self.weights(e)
            token, slot = torch.where(ids == e)
            gate, value = F.linear(x[token], up).chunk(2, -1)
            out = out.index_add(0, token, (F.linear(F.silu(gate) * value, down) * w[token, slot, None]).to(x.dtype))
        return out


@pytest.fixture(params=[False, True], ids=["stacked", "separate"])
def models(request):
    """Return (original, compiled) with separate weights, on the first GPU in bfloat16."""
    torch.manual_seed(0)
    original = Stacked(request.param).bfloat16().cuda()
    return original, moefx.compile(copy.deepcopy(original), example_inputs=(draw_inputs(64),))


def draw_inputs(tokens: int = TOKENS, device: str = "cuda", seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, D, generator=generator).bfloat16().to(device).requires_grad_()


def run_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return output and gradients, of a loss that float16 can represent."""
    leaves = [x, *model.parameters()]
    out = model(x)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        assert torch.isfinite(got).all()
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()


@contextlib.contextmanager
def check_kernels_run():
    """Check that all expert ops in this context run on the Triton kernels."""
    op_providers.reset_counters()
    yield
    found = {provider for op, provider in op_providers.counters() if op.startswith(("expert_mlp", "build_pft"))}
    assert found == {"triton"}


def test_a_graph_is_replayed_with_other_tokens(models):
    original, compiled = models
    x = draw_inputs().detach()
    static = x.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), check_kernels_run():
        for _ in range(3):
            run_step(compiled, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_step(compiled, static)
    for seed in (2, 3):  # another routing, with other numbers of rows
        fresh = draw_inputs(seed=seed)
        static.data.copy_(fresh)
        graph.replay()
        assert_close(results, run_step(original, fresh))


def test_another_stream_gives_the_same_step(models):
    original, compiled = models
    x, stream = draw_inputs(), torch.cuda.Stream()
    expected = run_step(compiled, x)  # recorded on the default stream
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream), check_kernels_run():
            results = run_step(compiled, x)
        stream.synchronize()
        assert all(map(torch.equal, results, expected))
    assert_close(expected, run_step(original, x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_devices_in_one_process(models):
    original, compiled = models
    twin = copy.deepcopy(compiled).to("cuda:1")
    expected = run_step(compiled, draw_inputs())
    for _ in range(2):
        results = run_step(twin, draw_inputs(device="cuda:1"))  # the current device is the first
        assert all(t.device == torch.device("cuda:1") for t in results)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(results, expected, strict=True))
        assert all(map(torch.equal, run_step(compiled, draw_inputs()), expected))
    assert_close(expected, run_step(original, draw_inputs()))


def test_inference_mode_keeps_nothing(models):
    _, compiled = models
    x = draw_inputs(8192)
    expected = compiled(x)
    kept = x.shape[0] * K * 2 * H * x.element_size()  # H
    for mode, keeps in ((torch.inference_mode, False), (torch.no_grad, False), (torch.enable_grad, True)):
        with mode(), check_kernels_run():
            for _ in range(3):
                compiled(x)  # recorded, and its launches captured
            out = None
            gc.collect()  # memory of other tests
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            out = compiled(x)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
            assert held >= kept if keeps else held == 0, (mode, held)
            assert torch.equal(out, expected)
            del out
    assert_close(run_step(compiled, x)[:1], [expected])  # training still works


def test_gradient_checkpointing_gives_the_same_step(models):
    _, compiled = models
    x = draw_inputs()
    expected = run_step(compiled, x)
    with check_kernels_run():
        results = run_step(checkpointed(compiled), x)
    assert all(map(torch.equal, results, expected))


def checkpointed(block: nn.Module) -> nn.Module:
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    return Checkpointed()


def _off(block: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return block.gate(x.float()).softmax(-1)


def _shares(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


# Routers that compute in other precisions on CUDA than on the CPU, which captures blocks: with ties in bfloat16 tokens
# would select other experts.
ROUTERS = {
    "softmax": lambda block, x: block.gate(x).softmax(-1),
    "sigmoid": lambda block, x: _shares(block.gate(x).sigmoid()),
    "exp": lambda block, x: _shares(block.gate(x).exp()),
    "float32": lambda block, x: block.gate(x).float().softmax(-1).to(x.dtype),
    "without autocast": _off,
    "normed": lambda block, x: F.linear(F.rms_norm(x, (D,)), block.gate.weight).softmax(-1),
    "softplus": lambda block, x: F.normalize(F.softplus(block.gate(x)), dim=-1),
    "a square": lambda block, x: 1 / (1 + block.gate(x) ** 2),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_original_results(router, dtype):
    class Routed(Stacked):
        def scores(self, x: Tensor) -> Tensor:
            return router(self, x)

    torch.manual_seed(0)
    original = Routed(False).cuda()
    compiled = moefx.compile(copy.deepcopy(original), example_inputs=(draw_inputs(64).float().detach(),))
    x = draw_inputs().float().detach().requires_grad_()
    with torch.autocast("cuda", dtype):
        compiled(x)  # lifted again for autocast, which runs both programs on the CPU
        with check_kernels_run():
            results = run_step(compiled, x)
        expected = run_step(original, x)
    assert [t.dtype for t in results] == [t.dtype for t in expected]
    assert_close(results, expected)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_gives_the_original_step(models, mode):
    original, compiled = models
    torch._dynamo.reset()
    fast = torch.compile(compiled, fullgraph=True, mode=mode)
    for seed in (1, 2, 3):
        x = draw_inputs(seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close([t.clone() for t in run_step(fast, x)], run_step(original, x))


def test_a_second_derivative_is_refused(models):
    _, compiled = models
    x = draw_inputs()
    (grad,) = torch.autograd.grad(compiled(x).float().square().sum(), x, create_graph=True)
    with pytest.raises(moefx.MoefxError, match="differentiable once"):
        grad.float().sum().backward()


def test_more_elements_than_32_bits_count():
    """Compare the last tokens with a separate call, for T*K*2h above 2^31."""
    d, h, tokens = 64, 1024, 2**19 + 96
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of GPU memory")
    assert tokens * K * 2 * h > 2**31
    torch.manual_seed(0)
    original = Stacked(False, d, h).bfloat16().cuda()
    few = torch.randn(64, d, device="cuda").bfloat16()
    compiled = moefx.compile(original, example_inputs=(few,))
    x = torch.randn(tokens, d, device="cuda").bfloat16().requires_grad_()
    with check_kernels_run():
        out = compiled(x)
        grad_x, *grads = torch.autograd.grad(out, [x, *compiled.parameters()], torch.ones_like(out))
    last = x.detach()[-4096:].requires_grad_()
    alone = compiled(last)
    (grad_last,) = torch.autograd.grad(alone, last, torch.ones_like(alone))
    assert torch.equal(out[-4096:], alone) and torch.equal(grad_x[-4096:], grad_last)
    halves = [torch.zeros_like(g, dtype=torch.float32) for g in grads]
    for part in x.detach().split(2**17):
        part_out = compiled(part)
        for total, g in zip(
            halves, torch.autograd.grad(part_out, list(compiled.parameters()), torch.ones_like(part_out)), strict=True
        ):
            total += g.float()
    assert_close(grads, halves)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_random_numbers_of_the_device_are_unchanged(device):
    """Draw no random numbers for captures and checks, including those of a later call."""
    x, model = torch.randn(TOKENS, D, device=device), Stacked(separate=True).to(device)
    before = torch.cuda.get_rng_state()
    compiled = moefx.compile(model, example_inputs=(x,))
    compiled.eval()(x)
    moefx.verify(compiled, model, (x,))
    assert torch.equal(before, torch.cuda.get_rng_state())
