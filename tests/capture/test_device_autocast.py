"""Captures on the CPU under autocast of other devices equal torch on meta tensors."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import moefx
from moefx.capture.concolic import capture_block
from moefx.capture.environment.device_autocast import get_autocast_dtype, use_device_autocast
from moefx.capture.tracing.concrete_routing import Routing
from moefx.compiler.block_compiler import rewrite_block
from moefx.errors import CaptureError

from ..blocks import D, Loop
from ..runtime.autocast_block import Block
from ..runtime.autocast_block import D as WIDTH

ROWS = D
FUNCTIONS = {
    "Tensor.softmax": lambda x, w: x.softmax(-1),
    "F.softmax": lambda x, w: F.softmax(x, dim=-1),
    "softmax to bfloat16": lambda x, w: x.softmax(-1, dtype=torch.bfloat16),
    "log_softmax": lambda x, w: torch.log_softmax(x, 1),
    "gumbel_softmax": lambda x, w: F.gumbel_softmax(x),
    "sum": lambda x, w: x.sum(-1, keepdim=True),
    "share": lambda x, w: x / x.sum(-1, keepdim=True),
    "mean": lambda x, w: x.mean(0),
    "prod": lambda x, w: torch.prod(x, 1),
    "cumsum": lambda x, w: x.cumsum(0),
    "logsumexp": lambda x, w: x.logsumexp(-1) ** 2,
    "exp": lambda x, w: x.exp(),
    "square": lambda x, w: x.pow(2),
    "a power": lambda x, w: 2**x,
    "over": lambda x, w: 1 / x,
    "norm": lambda x, w: x.norm(dim=-1),
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (D,)),
    "rms_norm": lambda x, w: F.rms_norm(x, (D,)),
    "rms_norm with a weight": lambda x, w: F.rms_norm(x, (D,), w.mean(0)),
    "attention": lambda x, w: F.multi_head_attention_forward(
        *(x, x, x, D, 2, w.repeat(3, 1), None, None, None, False, 0.0, w, None), need_weights=False
    )[0],
    "softplus": lambda x, w: F.softplus(x),
    "sigmoid": lambda x, w: x.sigmoid(),
    "silu": lambda x, w: F.silu(x),
    "addcmul": lambda x, w: torch.addcmul(x, w, x),
    "scatter_add": lambda x, w: w.scatter_add(1, torch.zeros(ROWS, D, dtype=torch.int64, device=x.device), x),
    "cat": lambda x, w: torch.cat([x, w]),
    "stack": lambda x, w: torch.stack([x, w]),
    "linear": lambda x, w: F.linear(x, w),
    "mm": lambda x, w: torch.mm(x, w),
    "addmm": lambda x, w: torch.addmm(w, x, w),
    "einsum": lambda x, w: torch.einsum("sd,de->se", x, w),
    "cosine_similarity": lambda x, w: F.cosine_similarity(x, w, dim=-1),
    "float": lambda x, w: x.float().softmax(-1).to(x.dtype),
    "off": lambda x, w: _disable_autocast(x),
}


def _disable_autocast(x):
    with torch.autocast("cuda", enabled=False):
        return x.softmax(-1), torch.mm(x, x.t())


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return self.function(x, self.weight)


def list_dtypes(tree) -> list[torch.dtype]:
    return [t.dtype for t in torch.utils._pytree.tree_leaves(tree)]


# Captures record other ops for these, and autocast treats the recorded ops differently.
OF_ANOTHER_FORM = {
    "exp in place": lambda x, w: x.clone().exp_(),
    "cumsum in place": lambda x, w: x.clone().cumsum_(0),
    "a power in place": lambda x, w: x.clone().pow_(2),
    "addmm in place": lambda x, w: x.clone().addmm_(x, w.to(x.dtype)),
    "exp into another": lambda x, w: torch.exp(x, out=torch.empty_like(x)),
    "mm into another": lambda x, w: torch.mm(x, w.to(x.dtype), out=torch.empty_like(x)),
    "tensordot": lambda x, w: torch.tensordot(x, w.to(x.dtype), 1),
}


def run_and_capture(function, device, dtype):
    with FakeTensorMode():
        x, weight = torch.empty(ROWS, D, dtype=dtype, device=device), torch.empty(D, D, device=device)
        with use_device_autocast(device, torch.bfloat16):
            expected = list_dtypes(function(x, weight))
    with use_device_autocast(device, torch.bfloat16):
        return expected, capture_block(
            Calls(function), (torch.empty(ROWS, D, dtype=dtype, device="meta"),), {}, Routing()
        )


def run_again(captured, device) -> list[torch.dtype]:
    """Run the recorded operations under autocast, each in the mode that its program sets, and return the dtypes."""
    values: dict[torch.fx.Node, object] = {}
    with FakeTensorMode():
        for node in sorted(_collect_inputs(captured.out), key=lambda node: node.meta["index"]):
            val = node.meta["val"]
            if node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.get)
                if kwargs.get("device") is not None:
                    kwargs = {**kwargs, "device": device}
                with use_device_autocast(device, torch.bfloat16):
                    switched = node.meta["autocast"] != get_autocast_dtype()
                    with use_device_autocast(device, node.meta["autocast"]) if switched else contextlib.nullcontext():
                        values[node] = node.target(*args, **kwargs)
            else:
                values[node] = torch.empty(tuple(map(int, val.shape)), dtype=val.dtype, device=device)
    return list_dtypes(torch.utils._pytree.tree_map(values.get, captured.out))


def _collect_inputs(out) -> set[torch.fx.Node]:
    captured, stack = set(), torch.utils._pytree.tree_leaves(out)
    while stack:
        node = stack.pop()
        if node not in captured:
            captured.add(node)
            stack += node.all_input_nodes
    return captured


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "function, device",
    [
        *(pytest.param(f, "cuda", id=f"{name}-cuda") for name, f in FUNCTIONS.items()),
        *(pytest.param(f, d, id=f"{name}-{d}") for name, f in OF_ANOTHER_FORM.items() for d in ("cuda", "cpu")),
    ],
)
def test_dtypes_are_those_of_the_device(function, device, dtype):
    expected, captured = run_and_capture(function, device, dtype)
    assert list_dtypes(torch.utils._pytree.tree_map(lambda node: node.meta["val"], captured.out)) == expected
    assert run_again(captured, device) == expected


def test_passes_keep_the_dtypes_of_the_device():
    """Give `softmax` of a linear router bfloat16 on the CPU and float32 on CUDA."""
    arguments = (torch.empty(16, D, device="meta"),), {}
    for device, expected in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        with use_device_autocast(device, torch.bfloat16), torch.enable_grad():
            graph = rewrite_block(Loop(), "block", *arguments, moefx.Plan()).graph
        weights = next(node.args[1] for node in graph.nodes if "build_pft" in str(node.target))
        assert weights.meta["val"].dtype is expected


def test_autocast_of_a_device_applies_inside_vmap():
    def shares(row):
        return row.softmax(-1) / row.exp().sum()

    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(ROWS, D, dtype=dtype, device="meta")
        with use_device_autocast("cuda", torch.bfloat16):
            captured = capture_block(Calls(lambda x, w: torch.vmap(shares)(x)), (x,), {}, Routing())
        assert captured.out.meta["val"].dtype is torch.float32


def test_unreproduced_autocast_is_refused():
    """Refuse an einsum that is no product of matrices, which autocast on the CPU ignores."""
    block = Calls(lambda x, w: torch.einsum("sd,d->sd", x, w[0]))
    with (
        use_device_autocast("cuda", torch.bfloat16),
        pytest.raises(CaptureError, match=r"autocast on cuda returns torch.bfloat16 from"),
    ):
        capture_block(block, (torch.empty(ROWS, D, device="meta"),), {}, Routing())
    block = Calls(torch.inner)  # consists of `tensordot`, which captures do not record
    with (
        use_device_autocast("cuda", torch.bfloat16),
        pytest.raises(CaptureError, match=r"autocast on cuda returns torch.float32 from"),
    ):
        capture_block(block, (torch.empty(ROWS, D, device="meta"),), {}, Routing())


class OnItsDevice(Block):
    """Route in float32 on CUDA, like models that only support CUDA."""

    def region(self, part):
        return torch.autocast("cuda", enabled=False) if part == "router" else super().region(part)


def test_a_region_of_the_block_is_one_of_its_device():
    arguments = (torch.empty(16, WIDTH, device="meta"),), {}
    for device, expected in (("cpu", torch.bfloat16), ("cuda", torch.float32)):
        with use_device_autocast(device, torch.bfloat16), torch.enable_grad():
            result = rewrite_block(OnItsDevice(), "block", *arguments, moefx.Plan())
        linear = next(node for node in result.graph.nodes if "linear" in str(node.target))
        assert linear.meta["val"].dtype is expected
    assert "autocast" in result.match.modes_read  # the program is limited to this device


def test_compiled_under_autocast_is_compiled_without_it():
    torch.manual_seed(0)
    original, x = Block(), torch.randn(40, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = moefx.compile(copy.deepcopy(original), example_inputs=(x,))
    torch.testing.assert_close(compiled(x), original(x))


def test_programs_move_to_other_devices_only_without_autocast():
    x = torch.randn(40, WIDTH)
    compiled = moefx.compile(Block(), example_inputs=(x,))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x)
    for model in (compiled, pickle.loads(pickle.dumps(compiled))):
        assert [program.is_device_independent for program in vars(model)["forward"].programs] == [True, False]
