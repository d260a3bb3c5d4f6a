"""Definitions of ops: contracts of shapes, gradients, and selection of the provider."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor

from moefx.errors import DoubleBackward, InvalidInput, InvalidPlan
from moefx.ir import op_providers
from moefx.ir.ops import dialect
from moefx.ir.ops.op_definition import Contract, op, registry


@op("test_scale(Tensor x, Tensor[] w, *, float by=2.0) -> Tensor[]", contract="x[S,D], w[*] -> out[S,D]")
def scale(x: Tensor, w: list[Tensor], *, by: float = 2.0) -> list[Tensor]:
    """Return x * by + sum of w, and an extra output without a gradient."""
    return [x * by + sum(w), torch.ones_like(x)]


@op("test_scale_backward(Tensor grad, *, float by=2.0) -> Tensor", contract="grad[S,D] -> x[S,D]")
def scale_backward(grad: Tensor, *, by: float = 2.0) -> Tensor:
    return grad * by


scale.fake(lambda x, w, *, by=2.0: [torch.empty_like(x), torch.empty_like(x)])
scale_backward.fake(lambda grad, *, by=2.0: torch.empty_like(grad))
scale_backward.once_differentiable("test_scale")


def _save(ctx, args, kwargs, outputs):
    ctx.kwargs, ctx.num = kwargs, len(args[1])
    ctx.mark_non_differentiable(*outputs[1:])


def _backward(ctx, grads):
    ctx_needs.append(ctx.needs)
    return scale_backward(grads[0], **ctx.kwargs), [grads[0].clone() for _ in range(ctx.num)]


ctx_needs: list = []
scale.autograd(save=_save, backward=_backward)


@scale.provider("only_small", supports=lambda x, w, *, by=2.0: x.shape[0] < 3)
def _small(x: Tensor, w: list[Tensor], *, by: float = 2.0) -> list[Tensor]:
    return [x * by + sum(w), torch.ones_like(x)]


def test_a_contract_is_parsed():
    contract = Contract.parse("x[S,D], w[*], offsets[E+1], v[S]? -> rows[B,D]")
    assert contract.inputs == {"x": ("S", "D"), "offsets": ("E+1",), "v": ("S",)}
    assert contract.outputs == {"rows": ("B", "D")}


def test_is_one_readable_op_with_its_docstring():
    assert registry["test_scale"] is scale
    assert scale.overload is torch.ops.moefx.test_scale.default
    assert "x * by" in (scale.__doc__ or "")
    assert repr(scale) == "<moefx op test_scale: x[S,D], w[*] -> out[S,D]>"


def test_gradients_of_lists_and_needed_inputs():
    x, w = torch.randn(4, 2, requires_grad=True), [torch.randn(4, 2, requires_grad=i != 1) for i in range(3)]
    ctx_needs.clear()
    out, extra = scale(x, w, by=3.0)
    assert type(out.grad_fn).__name__ == "test_scaleBackward"
    assert not extra.requires_grad
    out.sum().backward()
    assert ctx_needs == [[True, True]]
    assert torch.equal(x.grad, torch.full((4, 2), 3.0))
    assert w[1].grad is None
    assert torch.equal(w[2].grad, torch.ones(4, 2))
    ctx_needs.clear()
    scale(x, [v.detach() for v in w])[0].sum().backward()
    assert ctx_needs == [[True, False]]


def test_no_graph_without_grad():
    x = torch.randn(4, 2, requires_grad=True)
    with torch.no_grad():
        assert scale(x, [])[0].grad_fn is None
    with torch.inference_mode():
        assert scale(x, [])[0].is_inference()
    assert scale(x.detach(), [])[0].grad_fn is None


def test_double_backward_is_a_named_error():
    x = torch.randn(4, 2, requires_grad=True)
    (grad,) = torch.autograd.grad((scale(x, [])[0] ** 2).sum(), x, create_graph=True)
    with pytest.raises(DoubleBackward, match="moefx::test_scale is differentiable once"):
        grad.sum().backward()


def test_shapes_are_checked_with_numbers():
    with pytest.raises(InvalidInput, match=r"test_scale: x has shape \[3\], expected \[S,D\]"):
        scale(torch.ones(3), [])
    with pytest.raises(InvalidInput, match=r"x has shape \[3\]"), torch.device("meta"):
        scale(torch.ones(3), [])


def test_latest_supporting_provider_runs_and_is_counted():
    op_providers.reset_counters()
    scale(torch.ones(2, 2), [])
    scale(torch.ones(5, 2), [])
    scale(torch.ones(5, 2), [])
    assert op_providers.counters() == {("test_scale", "only_small"): 1, ("test_scale", "reference"): 2}
    with op_providers.force("test_scale", "only_small"):
        scale(torch.ones(5, 2), [])
        with op_providers.force("test_scale", "reference"):
            scale(torch.ones(2, 2), [])
        scale(torch.ones(5, 2), [])
    scale(torch.ones(5, 2), [])
    assert op_providers.counters() == {("test_scale", "only_small"): 3, ("test_scale", "reference"): 4}


def test_compiling_ahead_runs_the_host_code_and_returns_the_references_results(monkeypatch):
    log = []

    @contextlib.contextmanager
    def compiler():
        log.append("skip launches")
        yield
        log.append("compile")

    def host_code(x, others, by=2.0):
        log.append(tuple(x.shape))
        return torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)

    small = dataclasses.replace(scale.providers["only_small"], run=host_code)
    monkeypatch.setitem(scale.providers, "only_small", small)
    monkeypatch.setattr(op_providers, "_compilers", {"only_small": compiler})
    op_providers.reset_counters()
    with op_providers.compile_ahead() as is_useful:
        assert is_useful
        few, many = scale(torch.ones(2, 2), []), scale(torch.ones(5, 2), [])
    assert log == ["skip launches", (2, 2), "compile"]  # the provider does not support five rows
    assert all(map(torch.equal, few, scale.reference(torch.ones(2, 2), [])))
    assert all(map(torch.equal, many, scale.reference(torch.ones(5, 2), [])))
    assert not op_providers.counters()
    assert scale(torch.ones(2, 2), [])[0].isnan().all() and log[-1] == (2, 2)


def test_forcing_an_unknown_provider_raises():
    with pytest.raises(InvalidPlan, match="no op moefx::test_nothing"), op_providers.force("test_nothing", "x"):
        pass
    message = "no provider 'triton'; it has reference, only_small"
    with pytest.raises(InvalidPlan, match=message), op_providers.force("test_scale", "triton"):
        pass


def test_a_defined_op_passes_opcheck():
    x = torch.randn(4, 2, requires_grad=True)
    torch.library.opcheck(scale.overload, (x, [torch.randn(4, 2, requires_grad=True)]), {"by": 3.0})


IMPORT = """
import sys, time, torch
before = set(sys.modules)
start = time.perf_counter()
import moefx.ir.ops.dialect
print(time.perf_counter() - start)
print(*(set(sys.modules) - before))
"""


def test_importing_the_dialect_is_light():
    seconds, modules = [], ""
    for _ in range(3):  # the fastest of three: the machine may be busy
        start = time.perf_counter()
        out = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout
        first, modules = out.strip().split("\n")
        seconds.append(float(first))
        if seconds[-1] < 0.15 or time.perf_counter() - start > 60:
            break
    assert min(seconds) < 0.15
    assert not {"triton", "sympy", "moefx.lowering.register"} & set(modules.split())


def test_dynamo_does_not_trace_ops_after_a_graph_break():
    from torch._dynamo import convert_frame

    ids = torch.randint(3, (8, 2))

    def shuffled(num_rows: torch.Tensor) -> torch.Tensor:
        return 1 + dialect.build_pft(ids, None, None, num_experts=3, num_rows=num_rows)[0]  # its length is unknown

    torch._dynamo.reset()
    convert_frame.input_codes.seen.clear()
    torch.compile(shuffled, backend="eager")(torch.tensor([16]))
    names = {code().co_name for code in convert_frame.input_codes.seen if code() is not None}
    assert names and names.isdisjoint({"_run", "kernel", "build_pft"}), names
