"""Nodes around a region keep their order and effects: random numbers, writes in place, modes, gradients.

Results equal the original whether or not the region is rewritten.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import moefx
from moefx.frontends.dynamo.backend import backend

D, E, H = 8, 4, 6
RAMP = torch.linspace(0, 3, E, dtype=torch.float64)


@torch.library.custom_op("moefx_tests::shift", mutates_args=("into",))
def shift_in_place(into: torch.Tensor) -> None:
    into.add_(RAMP)


@torch.library.custom_op("moefx_tests::noisy", mutates_args=())
def add_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@add_noise.register_fake
def _(x):
    return torch.empty_like(x)


add_noise.register_autograd(lambda ctx, grad: grad)


class Mixture(nn.Module):
    """Gather weights by the selection: the graph has no data dependency that fixes its position."""

    def __init__(self, forward=None):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(E, D))
        self.up, self.down = nn.Parameter(torch.randn(E, D, H) / 2), nn.Parameter(torch.randn(E, H, D) / 2)
        self.register_buffer("bias", torch.zeros(E))
        self.register_buffer("same", self.bias.view(2, 2).view(-1))
        self.register_buffer("chosen", torch.zeros(E, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("var", torch.ones(D))
        self.register_buffer("table", 2 * torch.randn(E, D))
        self.fn = forward or (lambda m, x: m.mixed(x, F.linear(x, m.router)))
        self.double()
        self.same = self.bias.view(2, 2).view(-1)

    def mixed(self, x, logits, up=None):
        w, ids = logits.softmax(-1).topk(2)
        h = torch.einsum("td,tkdh->tkh", x, (self.up if up is None else up)[ids]).relu()
        return torch.einsum("tkh,tkhd,tk->td", h, self.down[ids], w)

    def forward(self, x):
        return self.fn(self, x)


def compute_logits(m, x):
    return F.linear(x, m.router)


def add_noise_after_dropout(m, x):
    r = F.dropout(x, 0.5, True)
    return m.mixed(x, compute_logits(m, x) + torch.rand(E)) + r


def add_noise_before_dropout(m, x):
    noise = torch.rand(E)
    x = F.dropout(x, 0.5, True)
    return m.mixed(x, compute_logits(m, x) + noise)


def add_noise_after_attention(m, x):
    scores = compute_logits(m, x)
    a = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]
    return m.mixed(x, scores + torch.rand(E)) + a


def add_noise_after_an_op(m, x):
    scores, y = compute_logits(m, x), torch.ops.moefx_tests.noisy(x)
    return m.mixed(x, scores + torch.rand(E)) + y


def add_noise_twice(m, x):
    y = m.mixed(x, compute_logits(m, x) + torch.rand(E))
    return y + 3 * m.mixed(x, 2 * compute_logits(m, x) + torch.randn(E))


DRAWS = [
    add_noise_after_dropout,
    add_noise_before_dropout,
    add_noise_after_attention,
    add_noise_after_an_op,
    add_noise_twice,
]


def update_statistics_before(m, x):
    F.batch_norm(x, m.mean, m.var, training=True, momentum=0.5)
    return m.mixed(x, compute_logits(m, x - m.mean))


def update_statistics_between(m, x):
    scores = compute_logits(m, x - m.mean)
    y = F.batch_norm(x, m.mean, m.var, training=True, momentum=0.5)
    return m.mixed(x, scores) + y


def normalize_instances_before(m, x):
    F.instance_norm(x.T[None], m.mean, m.var, use_input_stats=True, momentum=0.5)
    return m.mixed(x, compute_logits(m, x - m.mean))


def write_foreach_before(m, x):
    torch._foreach_add_([m.bias], [RAMP])
    return m.mixed(x, compute_logits(m, x) + m.bias)


def call_op_before(m, x):
    torch.ops.moefx_tests.shift(m.bias)
    return m.mixed(x, compute_logits(m, x) + m.bias)


def call_op_between(m, x):
    scores = compute_logits(m, x) + m.bias
    torch.ops.moefx_tests.shift(m.bias)
    return m.mixed(x, scores)


def write_out_before(m, x):
    x = x.sin()
    torch.max(x.detach().flatten()[None] * RAMP[:, None], 1, out=(m.bias, m.chosen))
    return m.mixed(x, compute_logits(m, x) + m.bias)


def write_other_name_before(m, x):
    m.same.add_(RAMP)
    return m.mixed(x, compute_logits(m, x) + m.bias)


def renorm_before(m, x):
    F.embedding(torch.tensor([0, 1]), m.table, max_norm=0.5)
    return m.mixed(x, F.linear(x, m.table))


def write_in_a_checkpoint_before(m, x):
    def body(x):
        return x.sin() + m.bias.add_(RAMP).sum() * 0

    z = checkpoint(body, x.detach(), use_reentrant=False)
    return m.mixed(x, compute_logits(m, x) + m.bias) + z


def write_rows_after(m, x):
    x = x.sin()
    w, ids = F.linear(x, m.router.detach()).softmax(-1).topk(2)
    h = torch.einsum("td,tkdh->tkh", x, m.up.detach()[ids]).relu()
    y = torch.einsum("tkh,tkhd,tk->td", h, m.down[ids], w)
    x.mul_(0.5)
    return y + x


WRITES = [
    update_statistics_before, update_statistics_between, normalize_instances_before, write_foreach_before,
    call_op_before, call_op_between, write_out_before, write_other_name_before,
    renorm_before, write_in_a_checkpoint_before, write_rows_after,
]  # fmt: skip


def write_rows_before(m, x):
    x = x.sin()
    x.mul_(2)
    x[..., 0] = 1
    x.view(-1)[:4].sub_(1)
    return m.mixed(x, compute_logits(m, x))


def write_bias_before(m, x):
    with torch.no_grad():
        m.bias.add_(1)
        m.bias.mul_(torch.arange(E))
    return m.mixed(x, compute_logits(m, x) + m.bias)


def pass_bias_on(m, x):
    with torch.no_grad():
        bias = m.bias.add_(torch.arange(E))
    return m.mixed(x, compute_logits(m, x) + bias)


def write_weight_before(m, x):
    with torch.no_grad():
        m.up.mul_(0.9)
    return m.mixed(x, compute_logits(m, x))


def write_largest_before(m, x):
    with torch.no_grad():
        m.mean.copy_(torch.maximum(m.mean, x.abs().amax(0)))
    return m.mixed(x, compute_logits(m, x / (1 + m.mean)))


def write_bias_around(m, x):
    with torch.no_grad():
        m.bias.add_(torch.arange(E))
    scores = compute_logits(m, x) + m.bias.clone()
    with torch.no_grad():
        m.bias.mul_(0.5)
    return m.mixed(x, scores)


BEFORE = [
    write_rows_before,
    write_bias_before,
    pass_bias_on,
    write_weight_before,
    write_largest_before,
    write_bias_around,
]


def route_in_inference_mode(m, x):
    with torch.inference_mode():
        scores = compute_logits(m, x)
    return m.mixed(x, scores.clone())


def run_in_inference_mode(m, x):
    with torch.inference_mode():
        y = m.mixed(x, compute_logits(m, x))
    return y.clone() + x


def differentiate_computed_weight(m, x):
    up = m.up * 2
    y = m.mixed(x, compute_logits(m, x), up)
    (g,) = torch.autograd.grad(y.sum() + up.sum(), up, retain_graph=True)
    return y + g.sum()


def differentiate_scores(m, x):
    scores = compute_logits(m, x)
    y = m.mixed(x, scores)
    (g,) = torch.autograd.grad(y.sum(), scores, retain_graph=True)
    return y + g.sum()


MODES = [route_in_inference_mode, run_in_inference_mode, differentiate_computed_weight, differentiate_scores]


def run(call, model, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = call(x)
    out.sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return out.detach(), x.grad, grads, dict(model.named_buffers()), torch.get_rng_state()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("fn", [*DRAWS, *WRITES, *BEFORE, *MODES], ids=lambda f: f.__name__)
def test_results_equal_the_originals(fn):
    original, compiled_model = Mixture(fn), Mixture(fn)
    call = torch.compile(compiled_model, backend=backend, options={"backend": "eager", "validation": "symbolic"})
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(9 - seed, D, dtype=torch.float64)
        original.zero_grad(), compiled_model.zero_grad()
        torch.testing.assert_close(run(call, compiled_model, x), run(original, original, x))
    assert not any(block.fallbacks for block in moefx.blocks(call))
    if fn in (*DRAWS[:3], *BEFORE, add_noise_twice, call_op_between, update_statistics_between, differentiate_scores):
        assert len(moefx.blocks(call)) == (2 if fn is add_noise_twice else 1)


def run_sequence_first(m, x, then):
    """Take and return [B, S, D] like Megatron, and compute on [S, B, D]."""
    z = x.transpose(0, 1)
    w, ids = F.linear(z, m.router).softmax(-1).topk(2)
    out = torch.zeros_like(z)  # with the strides of z
    for e in range(E):
        out = out + (w * (ids == e)).sum(-1, keepdim=True) * ((z @ m.up[e]).relu() @ m.down[e])
    return then(out.transpose(0, 1))


STRIDES = {
    "view": lambda t: t.view(-1, D),
    "as_strided": lambda t: t.as_strided((60,), (1,)) * 1,
    "asked": lambda t: t * t.stride(0),
    "returned": lambda t: t,
    "next": lambda t: t.transpose(0, 1).sin(),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("way", ["eager", "aot_eager", "export", "module"])
def test_strides_equal_the_originals(how, way):
    if (way, how) == ("module", "asked"):
        pytest.skip("numbers made of strides are refused")
    model = Mixture(lambda m, x: run_sequence_first(m, x, STRIDES[how]))
    compiled_model, x = copy.deepcopy(model), torch.randn(3, 7, D, dtype=torch.float64)
    if way == "module":
        call = moefx.compile(compiled_model, example_inputs=(x,))
    elif way == "export":
        call = moefx.rewrite_graph(torch.export.export(compiled_model, (x,)).module(), (x,))
    else:
        call = torch.compile(compiled_model, backend=backend, options={"backend": way, "validation": "symbolic"})
    for shape in [(3, 7), *([(3, 5), (4, 7)] if way != "export" and how != "as_strided" else [])]:
        x = torch.randn(*shape, D, dtype=torch.float64)
        out, want = call(x), model(x)
        torch.testing.assert_close(out, want)
        assert out.stride() == want.stride()
    assert len({block.name for block in moefx.blocks(call)}) == 1


def run_loop(m, x):
    w, ids = compute_logits(m, x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, (x[t] @ m.up[e]).relu() @ m.down[e] * w[t, k, None])
    return out


SIZES = {
    "loop": run_loop,
    "rows": lambda m, x: m.mixed(x[x[:, 0] > 0], compute_logits(m, x[x[:, 0] > 0])),
    "behind": lambda m, x: m.mixed(x, compute_logits(m, x))[x[:, 0] > 0],
    "beside": lambda m, x: m.mixed(x, compute_logits(m, x)).sum() + x[x[:, 0] > 0].sum(),
    "marked": lambda m, x: m.mixed(x, compute_logits(m, x)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", SIZES)
@pytest.mark.parametrize("then", ["eager", "aot_eager"])
def test_sizes_that_follow_from_data(how, then):
    """Leave only regions with data-dependent sizes unchanged."""
    model = Mixture(SIZES[how])
    x = torch.randn(9, D, dtype=torch.float64)
    if how == "marked":
        torch._dynamo.decorators.mark_unbacked(x, 0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        call = torch.compile(model, backend=backend, options={"backend": then, "validation": "symbolic"})
        torch.testing.assert_close(call(x), model(x))
    assert len(moefx.blocks(call)) == (1 if how in ("behind", "beside") else 0)


def test_writes_in_exported_graphs():
    """Rewrite a region without gradients. Export makes it a subgraph with written buffers as inputs."""

    def forward(m, x):
        x = x.sin()
        with torch.no_grad():
            m.same.add_(RAMP)
        return m.mixed(x, compute_logits(m, x) + m.bias)

    model, x = Mixture(forward), torch.randn(9, D, dtype=torch.float64)
    gm = torch.export.export(model, (x,)).module()
    want = copy.deepcopy(gm)(x)
    torch.testing.assert_close(moefx.rewrite_graph(gm, (x,))(x), want)


def make_activation(fn):
    @torch._dynamo.allow_in_graph
    def act(x):
        return fn(x)

    return act


class Acting(Mixture):
    def __init__(self, fn):
        super().__init__()
        self.act = make_activation(fn)

    def forward(self, x):
        w, ids = compute_logits(self, x).softmax(-1).topk(2)
        h = self.act(torch.einsum("td,tkdh->tkh", x, self.up[ids]))
        return torch.einsum("tkh,tkhd,tk->td", h, self.down[ids], w)


def test_functions_of_one_name():
    """Prove two functions with the same name separately."""
    model = nn.ModuleList([Acting(torch.relu), Acting(torch.tanh)])

    def all_of(x):
        return [layer(x) for layer in model]

    x = torch.randn(9, D, dtype=torch.float64)
    call = torch.compile(all_of, backend=backend, options={"backend": "eager"})
    torch.testing.assert_close(call(x), all_of(x))
    assert len(moefx.blocks(call)) == 2


class Called(Mixture):
    """Mixture with modules that torch.fx calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(D, E, bias=False).double(), nn.ReLU()

    def forward(self, x):
        w, ids = self.linear(x).softmax(-1).topk(2)
        h = self.act(torch.einsum("td,tkdh->tkh", x, self.up[ids]))
        return torch.einsum("tkh,tkhd,tk->td", h, self.down[ids], w)


def patch_act(m):
    m.act.forward = torch.tanh


def patch_linear(m):
    inner = m.linear.forward
    m.linear.forward = lambda x: inner(x) * 3


@pytest.mark.parametrize("patch", [patch_act, patch_linear, None])
def test_modules_with_a_patched_forward(patch):
    m, x = Called(), torch.randn(9, D, dtype=torch.float64)
    hook = None
    if patch is None:
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out * 3 if type(module) is nn.Linear else out
        )
    else:
        patch(m)
    try:
        gm = fx.symbolic_trace(m)
        torch.testing.assert_close(moefx.rewrite_graph(gm, (x,))(x), gm(x))
    finally:
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_looking_at_a_graph_changes_nothing(momentum):
    """Keep the statistics. With None torch reads the number of batches, which is unknown."""
    gm = fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(D, momentum=momentum)))
    before = copy.deepcopy(gm.state_dict())
    assert moefx.rewrite_graph(gm, (torch.randn(9, D),)) is gm
    torch.testing.assert_close(gm.state_dict(), before)


def test_a_module_of_the_users_called_moefx():
    m, x = Called(), torch.randn(9, D, dtype=torch.float64)
    m.moefx = nn.LayerNorm(D).double()
    gm = fx.symbolic_trace(m)
    gm.add_submodule("moefx", m.moefx)
    (out,) = (n for n in gm.graph.nodes if n.op == "output")
    with gm.graph.inserting_before(out):
        out.args = (gm.graph.call_module("moefx", (out.args[0],)),)
    gm.recompile()
    rewritten_graph = moefx.rewrite_graph(gm, (x,))
    torch.testing.assert_close(rewritten_graph(x), m.moefx(m(x)))
    assert len(moefx.blocks(rewritten_graph)) == 1 and rewritten_graph.moefx is m.moefx


@torch._dynamo.allow_in_graph
def double(t):
    t.mul_(2)
    return t.sum()


def test_unknown_effects_on_a_weight():
    """Do not compute a value again after an op with unknown effects."""

    def forward(m, x):
        up = m.up * 2
        double(m.up)
        return m.mixed(x, compute_logits(m, x), up)

    x = torch.randn(9, D, dtype=torch.float64)
    with torch.no_grad():
        want = Mixture(forward)(x)
        torch.testing.assert_close(
            torch.compile(Mixture(forward), backend=backend, options={"backend": "eager"})(x), want
        )
