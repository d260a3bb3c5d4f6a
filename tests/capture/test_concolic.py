"""Abstract run of a block: its graph, effects, Python reads, and the restored state."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from moefx.capture.concolic import capture_block
from moefx.capture.environment.code_locations import Source, is_user_file
from moefx.capture.tracing.capture_result import Capture, Effect
from moefx.capture.tracing.concrete_routing import Routing
from moefx.errors import CaptureError, Refused

aten = torch.ops.aten


def make_meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def run(block: nn.Module, *args, seed: int = 0, kind: str = "diverse", **kwargs) -> Capture:
    return capture_block(block, args, kwargs, Routing(kind, seed))


def replay(captured: Capture, node: torch.fx.Node, env: dict) -> torch.Tensor:
    """Return the value of a node of the functional graph. `env`: inputs by position, attributes by FQN."""
    if node in env:
        return env[node]
    if node.op == "placeholder":
        value = env[node.meta["position"]]
    elif node.op == "get_attr":
        value = env[node.meta["fqn"]] if node.meta["fqn"] in env else captured.constants[node.meta["fqn"]]
    else:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: replay(captured, n, env))
        value = node.target(*args, **kwargs)
    env[node] = value
    return value


class Fn(nn.Module):
    """Block around a plain function of (self, *inputs)."""

    def __init__(self, fn, **state):
        super().__init__()
        self.fn = fn
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, *args):
        return self.fn(self, *args)


def _write_row(self, x):
    y = x.clone()
    y[1] = 7.0
    return y


def _add_to_slice(self, x):
    y = x.clone()
    y[:, 1:3].add_(1.0)
    return y


def _write_through_chain(self, x):
    y = x.clone()
    y.view(-1, 2).t()[0].mul_(3.0)
    return y * 2


def _read_other_view(self, x):
    y = x.clone()
    first, flat = y[0], y.view(-1)
    flat[0:2] += 5.0
    return first.clone()


def _write_permuted(self, x):
    y = x.reshape(2, 2, 4).clone()
    y.permute(2, 0, 1)[1].fill_(0.5)
    return y


def _write_transposed(self, x):
    y = x.clone()
    y.transpose(0, 1)[2].neg_()
    return y


def _write_unbound(self, x):
    y = x.clone()
    a, b, *_ = y.unbind(0)
    a.add_(1), b.mul_(2)
    return y


def _write_chunks(self, x):
    y = x.clone()
    left, right = y.chunk(2, dim=1)
    right.copy_(left)
    return y


def _write_split(self, x):
    y = x.clone()
    y.split([1, 3], dim=-1)[1].zero_()
    return y


def _write_diagonal(self, x):
    y = x.clone()
    y.diagonal().add_(10.0)
    return y


def _write_by_index(self, x):
    y = torch.zeros_like(x)
    y[torch.tensor([2, 0])] = x[:2]
    y.index_add_(0, torch.tensor([1, 1]), x[:2])
    return y


def _write_masked(self, x):
    y = x.clone()
    y[torch.tensor([True, False, True, False])] = 0.25
    return y


def _write_unsqueezed(self, x):
    y = x.clone()
    y.unsqueeze(1)[:, 0, 0].sub_(1.0)
    y[None].squeeze(0).mul_(2.0)
    return y


def _write_out_argument(self, x):
    y = torch.empty_like(x)
    torch.mul(x, 3.0, out=y)
    return y + 1


IN_PLACE = [
    _write_row,
    _add_to_slice,
    _write_through_chain,
    _read_other_view,
    _write_permuted,
    _write_transposed,
    _write_unbound,
    _write_chunks,
    _write_split,
    _write_diagonal,
    _write_by_index,
    _write_masked,
    _write_unsqueezed,
    _write_out_argument,
]


class TestFunctionalisation:
    @pytest.mark.parametrize("fn", IN_PLACE, ids=lambda f: f.__name__.strip("_"))
    def test_writes_through_views_reach_the_result(self, fn):
        block = Fn(fn)
        captured = run(block, make_meta(4, 4))
        x = torch.arange(16.0).view(4, 4)
        expected = block(x.clone())
        assert torch.equal(replay(captured, captured.out, {0: x}), expected)

    @pytest.mark.parametrize("fn", IN_PLACE, ids=lambda f: f.__name__.strip("_"))
    def test_graph_is_functional(self, fn):
        captured = run(Fn(fn), make_meta(4, 4))
        for node in captured.nodes:
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable, node.target

    def test_unknown_view_is_an_error_with_the_line(self):
        def strided(self, x):
            y = x.clone()
            y.unfold(0, 2, 2).add_(1.0)  # the line
            return y

        with pytest.raises(
            CaptureError,
            match=r"in-place update through a view made by .*unfold.*test_concolic\.py:\d+.*# the line",
        ):
            run(Fn(strided), make_meta(4))

    def test_unknown_origin_is_an_error(self):
        stolen = run(Fn(lambda self, x: x * 2), make_meta(3)).out.meta["val"]
        with pytest.raises(CaptureError, match=r"a tensor of unknown origin reached test_concolic\.py:\d+"):
            run(Fn(lambda self, x: x + stolen), make_meta(3))


class TestEffects:
    def test_writes_to_a_buffer_are_effects(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("total", torch.ones(3))
                self.register_buffer("unused", torch.ones(3))

            def forward(self, x):
                self.total[1:].add_(x.sum())
                return x

        block = Block()
        captured = run(block, make_meta(5))
        assert [(e.kind, e.target) for e in captured.effects] == [("buffer", "total")]
        value = replay(captured, captured.effects[0].node, {0: torch.ones(5), "total": torch.ones(3)})
        assert value.tolist() == [1.0, 6.0, 6.0]
        assert block.total.tolist() == [1.0, 1.0, 1.0]

    def test_a_count_in_an_integer_buffer_is_an_effect(self):
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("load", torch.zeros(4, dtype=torch.long))

            def forward(self, x):
                self.load += torch.bincount(x.argmax(-1), minlength=4)
                return x

        block = Block()
        captured = run(block, make_meta(9, 4))
        assert [(e.kind, e.target) for e in captured.effects] == [("buffer", "load")]
        before = next(n for n in captured.nodes if n.op == "get_attr").meta["val"]
        assert (captured.concrete_value(captured.effects[0].node) - before).sum() == 9
        assert block.load.sum() == 0

    def test_writes_to_an_input_are_effects(self):
        captured = run(Fn(lambda self, x: x.mul_(2).sum()), make_meta(3))
        (effect,) = captured.effects
        assert effect.kind == "input" and effect.target.op == "placeholder"
        assert replay(captured, effect.node, {0: torch.ones(3)}).tolist() == [2.0] * 3

    def test_attributes_that_change_are_effects(self):
        def forward(self, x):
            self.aux = (x * x).mean()
            self.calls = self.calls + 1
            self.same = self.same
            return x

        block = Fn(forward, calls=0, same=4)
        captured = run(block, make_meta(3))
        assert {(e.kind, e.target) for e in captured.effects} == {("attribute", "aux"), ("state", "calls")}
        assert next(e for e in captured.effects if e.kind == "state").node == 1
        assert not hasattr(block, "aux") and block.calls == 0

    def test_attribute_of_a_submodule(self):
        def inner(self, x):
            self.last = x + 1
            return x

        captured = run(Fn(lambda self, x: self.inner(x), inner=Fn(inner)), make_meta(3))
        assert [(e.kind, e.target) for e in captured.effects] == [("attribute", "inner.last")]

    def test_a_pure_module_has_no_effects(self):
        assert run(nn.Linear(4, 4), make_meta(3, 4)).effects == []


class Busy(nn.Module):
    """Change all kinds of state that a capture must restore."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.plain = torch.ones(4)

    def forward(self, x):
        self.seen += 1
        self.new = self.lin(x)
        self.plain = self.plain * 2
        return F.dropout(self.new) + torch.randn(4) + self.plain


class TestUntouched:
    def test_a_capture_leaves_the_block_unchanged(self):
        block = Busy()
        calls = []
        block.lin.register_forward_hook(lambda m, args, out: calls.append(type(out)))
        before = {k: v.clone() for k, v in block.state_dict().items()}
        objects = {n: id(t) for n, t in [*block.named_parameters(), *block.named_buffers()]}
        keys, plain, rng = set(vars(block)), block.plain, torch.get_rng_state()
        run(block, make_meta(3, 4))
        assert all(torch.equal(v, before[k]) for k, v in block.state_dict().items())
        assert {n: id(t) for n, t in [*block.named_parameters(), *block.named_buffers()]} == objects
        assert set(vars(block)) == keys and block.plain is plain
        assert torch.equal(torch.get_rng_state(), rng)
        assert calls == [FakeTensor] and len(block.lin._forward_hooks) == 1

    def test_state_is_restored_after_an_error(self):
        def forward(self, x):
            self.left_behind = x
            self.count.add_(1)
            raise ValueError("the user's")

        block = Fn(forward)
        block.register_buffer("count", torch.zeros(2))
        call, apply, query = (
            nn.Module.__call__,
            torch.autograd.Function.__dict__["apply"],
            torch.is_grad_enabled,
        )
        with pytest.raises(ValueError, match="the user's"):
            run(block, make_meta(3))
        assert not hasattr(block, "left_behind") and block.count.tolist() == [0.0, 0.0]
        assert nn.Module.__call__ is call and torch.is_grad_enabled is query
        assert torch.autograd.Function.__dict__.get("apply", apply) is apply

    def test_attributes_are_restored_after_an_error_between_their_copies(self, monkeypatch):
        block = Fn(lambda self, x: x[self.first] + self.second, first=torch.tensor([1, 0]), second=torch.tensor([2, 3]))
        first, second = block.first, block.second
        vary = Routing.vary_integers

        def fail_at_second(self, t, name, *rest):
            if name == "second":
                raise ValueError("of the copy")
            return vary(self, t, name, *rest)

        monkeypatch.setattr(Routing, "vary_integers", fail_at_second)
        with pytest.raises(ValueError, match="of the copy"):
            run(block, make_meta(2))
        assert block.first is first and block.second is second

    def test_meta_model_and_real_model_give_one_graph(self):
        real, abstract = Busy(), Busy().to("meta")
        a, b = run(real, make_meta(3, 4)), run(abstract, make_meta(3, 4))
        assert [str(n.target) for n in a.nodes] == [str(n.target) for n in b.nodes]
        assert all(t.is_meta for t in abstract.parameters())

    def test_integer_inputs_are_copied(self):
        ids = torch.tensor([3, 1])
        run(Fn(lambda self, i: i.add_(1)), ids)
        assert ids.tolist() == [3, 1]

    def test_requires_grad_and_training_are_unchanged(self):
        block = Busy().eval()
        block.lin.weight.requires_grad_(False)
        run(block, make_meta(3, 4))
        assert not block.training and not block.lin.weight.requires_grad and block.lin.bias.requires_grad


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor + x.exp() * 0

    @staticmethod
    def backward(ctx, g):
        return 2 * g, None


class TestWhole:
    def test_custom_function_is_one_opaque_node(self):
        captured = run(Fn(lambda self, x: Double.apply(x, 2.0) + 1), make_meta(3))
        opaque = [n for n in captured.nodes if n.meta.get("opaque")]
        assert len(opaque) == 1 and opaque[0].args[1] == 2.0
        assert not any(n.target is aten.exp.default for n in captured.nodes)
        x = torch.ones(3)
        assert torch.equal(replay(captured, captured.out, {0: x}), 2 * x + 1)

    @pytest.mark.parametrize(
        ("fn", "target"),
        [
            (lambda self, x: F.linear(x, self.w), F.linear),
            (lambda self, x: x @ self.w, torch.matmul),
            (lambda self, x: torch.matmul(x, self.w), torch.matmul),
            (lambda self, x: torch.einsum("td,de->te", x, self.w), torch.einsum),
            (lambda self, x: torch.mm(x, self.w), aten.mm.default),
        ],
    )
    def test_contractions_are_captured_as_one_operation(self, fn, target):
        block = Fn(fn, w=nn.Parameter(torch.randn(4, 4)))
        captured = run(block, make_meta(3, 4))
        assert captured.out.target is target
        x = torch.randn(3, 4)
        assert torch.allclose(replay(captured, captured.out, {0: x, "w": block.w}), block(x))

    def test_module_calls_are_recorded(self):
        block = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
        captured = run(block, make_meta(3, 4))
        assert [(c.fqn, c.depth) for c in captured.calls] == [("0.0", 1), ("0.1", 1), ("0", 0), ("1", 0)]
        outer = captured.calls[2]
        assert all(outer.start <= c.start and c.stop <= outer.stop for c in captured.calls[:2])
        assert captured.calls[-1].args[0] is outer.out and captured.calls[-1].out is captured.out

    def test_outputs_in_dataclasses_are_recorded(self):
        @dataclasses.dataclass
        class Out:
            logits: torch.Tensor
            aux: torch.Tensor

        inner = Fn(lambda self, x: Out(x * 2, x.sum()))
        captured = run(Fn(lambda self, x: self.inner(x).logits, inner=inner), make_meta(3))
        (call,) = captured.calls
        assert set(call.out) == {".logits", ".aux"} and call.out[".logits"] is captured.out


class Notes(threading.local):
    """Notes of a forward for its test. Captures restore containers, but not thread-local attributes."""

    __module__ = "threading"


class TestValues:
    def test_integers_are_real_and_floats_abstract(self):
        seen = Notes()

        def forward(self, x):
            values, ids = (x @ self.w).topk(2, -1)
            seen.ids, seen.values = ids, values
            return values

        run(Fn(forward, w=nn.Parameter(torch.randn(4, 6))), make_meta(5, 4))
        assert isinstance(seen.values, FakeTensor) and not isinstance(seen.ids, FakeTensor)
        assert (seen.ids[:, 0] != seen.ids[:, 1]).all()

    def test_one_routing_holds_through_groups_and_masks(self):
        """Derive groups, a threshold and a second selection from one set of invented scores."""
        seen = Notes()

        def forward(self, x):
            scores = (x @ self.w).sigmoid()
            groups = scores.view(-1, 3, 2).amax(-1).topk(2, -1).indices
            mask = torch.zeros(x.shape[0], 3).scatter(1, groups, 1.0).repeat_interleave(2, -1)
            limited = scores.masked_fill(mask == 0, -1.0)
            ids = limited.topk(2, -1).indices
            above = scores >= scores.gather(1, ids).amin(-1, keepdim=True)
            seen.groups, seen.ids, seen.above, seen.limited = groups, ids, above, limited
            return limited

        captured = run(Fn(forward, w=nn.Parameter(torch.randn(4, 6))), make_meta(11, 4))
        groups, ids = seen.groups, seen.ids
        assert ((ids // 2)[:, :, None] == groups[:, None, :]).any(-1).all()
        value = captured.concrete_value(captured.out)
        assert torch.equal(value.topk(2, -1).indices, ids)
        assert seen.above.gather(1, ids).all()

    def test_parameters_have_their_own_values_in_shadows(self):
        block = Fn(lambda self, x: (self.bias > 0).long(), bias=nn.Parameter(torch.tensor([1.0, -1.0])))
        assert run(block, make_meta(2)).out.meta["val"].tolist() == [1, 0]

    def test_product_of_activations_is_computed_from_their_values(self):
        """Invent values for x @ w only; (x @ w) @ (x @ w).T is computed from them."""

        def forward(self, x):
            a = x @ self.w
            return (a @ a.t()).argmax(-1), a

        captured = run(Fn(forward, w=nn.Parameter(torch.randn(4, 5))), make_meta(3, 4))
        ids, a = captured.out
        value = captured.concrete_value(a)
        assert torch.equal(ids.meta["val"], (value @ value.t()).argmax(-1))

    def test_boolean_indexing_becomes_integer_indexing(self):
        captured = run(
            Fn(lambda self, x: x[(x @ self.w)[:, 0] > 0], w=nn.Parameter(torch.randn(4, 3))), make_meta(8, 4)
        )
        index = next(n for n in captured.nodes if n.target is aten.index.Tensor)
        assert index.args[1][0].meta["val"].dtype == torch.int64

    def test_values_from_integers_are_marked(self):
        def forward(self, x):
            ones = torch.ones(3)
            return x * ones, ones * 2, torch.rand(3)

        product_constant_random = run(Fn(forward), make_meta(3)).out
        assert [bool(n.meta["from_integers"]) for n in product_constant_random] == [False, True, False]

    def test_no_grad_is_recorded(self):
        def forward(self, x):
            with torch.no_grad():
                a = x * 2
            return a + x

        nodes = {n.target: n for n in run(Fn(forward), make_meta(3)).nodes if n.op == "call_function"}
        assert nodes[aten.mul.Tensor].meta["grad"] is False and nodes[aten.add.Tensor].meta["grad"] is True

    def test_modes_that_python_reads_are_recorded(self):
        assert run(Fn(lambda self, x: x if torch.is_grad_enabled() else -x), make_meta(3)).modes_read == {
            "is_grad_enabled"
        }
        assert run(Fn(lambda self, x: torch.relu(x)), make_meta(3)).modes_read == set()

    def test_sources_are_the_users_lines(self):
        captured = run(Fn(lambda self, x: x.relu()), make_meta(3))
        source = captured.out.meta["source"]
        assert source.file == __file__ and "x.relu()" in source.text and str(source).startswith("test_concolic.py:")

    @pytest.mark.parametrize(
        ("file", "users"),
        [
            (torch.__file__, False),
            ("<string>", False),
            ("<frozen importlib>", False),
            ("/home/me/model.py", True),
            ("<ipython-input-3>", True),
        ],
    )
    def test_files_of_the_user_are_recognised(self, file, users):
        assert is_user_file(file) is users


def _branch(self, x):
    if (x @ self.w).amax() > 100.0:
        return x * 2
    return x + 1


def _read_scale(self, x):
    peak = float((x @ self.w).amax())
    return x * 2 if peak > 100.0 else x + 1


class TestHostReads:
    def test_a_branch_on_a_boolean_is_recorded(self):
        captured = run(Fn(_branch, w=nn.Parameter(torch.randn(4, 3))), make_meta(5, 4))
        (read,) = captured.reads
        assert read.value is False and captured.out.target is aten.add.Tensor
        assert read.node.meta["val"].dtype == torch.bool and "amax()" in read.source.text

    def test_a_boolean_can_be_forced_to_the_other_branch(self):
        block = Fn(_branch, w=nn.Parameter(torch.randn(4, 3)))
        (read,) = run(block, make_meta(5, 4)).reads
        flipped = capture_block(
            block, (make_meta(5, 4),), {}, Routing("diverse", 0), interventions={read.call_stack: True}
        )
        assert flipped.out.target is aten.mul.Tensor and flipped.reads[0].value is True

    def test_a_float_that_python_reads_can_be_forced(self):
        block = Fn(_read_scale, w=nn.Parameter(torch.randn(4, 3)))
        captured = run(block, make_meta(5, 4))
        (read,) = captured.reads
        assert type(read.value) is float and captured.out.target is aten.add.Tensor
        flipped = capture_block(
            block, (make_meta(5, 4),), {}, Routing("diverse", 0), interventions={read.call_stack: 1e30}
        )
        assert flipped.out.target is aten.mul.Tensor

    def test_two_reads_on_one_line_are_two_sources(self):
        def forward(self, x):
            s = x @ self.w
            return x + 1 if (s.amax() > 100 and s.amin() < -100) or s.sum() > 1e6 else x

        sources = {r.source for r in run(Fn(forward, w=nn.Parameter(torch.randn(4, 3))), make_meta(5, 4)).reads}
        assert len(sources) == 2 and len({s.line for s in sources}) == 1

    def test_a_line_stays_one_source_when_the_interpreter_warms_up(self):
        def forward(self, x):
            return x + (x @ self.w).sum().item()

        block = Fn(forward, w=nn.Parameter(torch.randn(4, 3)))
        assert len({r.source for _ in range(12) for r in run(block, make_meta(5, 4)).reads}) == 1

    def test_integers_are_no_reads(self):
        def forward(self, x):
            ids = (x @ self.w).argmax(-1)
            return x[: int(ids[0]) + 1] * len(ids.tolist())

        assert run(Fn(forward, w=nn.Parameter(torch.randn(4, 3))), make_meta(5, 4)).reads == []

    def test_source_is_hashable(self):
        assert len({Source("a", 1, 2), Source("a", 1, 2), Source("a", 1, 3)}) == 2


class TestPieces:
    def test_tensors_of_closures_are_constants(self):
        offset = torch.tensor([1.0, 2.0, 3.0])
        captured = run(Fn(lambda self, x: x + offset + self.own, own=torch.ones(3)), make_meta(3))
        kinds = {n.meta["fqn"]: n.meta["kind"] for n in captured.nodes if n.op == "get_attr"}
        assert sorted(kinds.values()) == ["attribute", "constant"] and kinds["own"] == "attribute"
        assert [t.tolist() for t in captured.constants.values()] == [[1.0, 2.0, 3.0]]

    def test_tied_parameters_are_one_node(self):
        a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        b.weight = a.weight
        captured = run(nn.Sequential(a, b), make_meta(2, 3))
        assert sum(n.op == "get_attr" for n in captured.nodes) == 1

    def test_a_comparison_of_sizes_makes_a_guard(self):
        block = Fn(lambda self, x: x * 2 if x.shape[0] > 4 else x)
        captured = capture_block(block, (make_meta(7, 3),), {}, Routing(), dims={"S": 7})
        assert [str(g) for g in captured.sizes.guards] == ["S > 4"]

    def test_effect_is_plain_data(self):
        assert [f.name for f in dataclasses.fields(Effect)] == ["kind", "target", "node", "source"]

    def test_same_routing_gives_the_same_graph_and_numbers(self):
        block = Fn(
            lambda self, x: (x @ self.w).topk(2).indices + torch.randint(0, 5, (5, 2)),
            w=nn.Parameter(torch.randn(4, 6)),
        )
        a, b = run(block, make_meta(5, 4)), run(block, make_meta(5, 4))
        assert torch.equal(a.out.meta["val"], b.out.meta["val"])
        assert not torch.equal(a.out.meta["val"], run(block, make_meta(5, 4), seed=1).out.meta["val"])


class TestHooksOfTheModel:
    """Remove hooks that the capture's call installed: transformers installs hooks in the first call."""

    def test_hooks_installed_during_a_capture_are_removed(self):
        class Recorder(nn.Module):
            def __init__(self):
                super().__init__()
                self.router, self.installed, self.seen = nn.Linear(8, 4), False, []

            def forward(self, x):
                if not self.installed:
                    self.router.register_forward_hook(lambda module, args, out: self.seen.append(out))
                    self.installed = True
                return self.router(x)

        block = Recorder()
        before = block.router.register_forward_pre_hook(lambda module, args: None)
        capture_block(block, (torch.empty(3, 8, device="meta"),), {}, Routing())
        assert not block.installed and not block.router._forward_hooks and not block.seen
        assert list(block.router._forward_pre_hooks) == [before.id]


def _compare_items(block, x):
    rows = x.topk(2).indices.tolist()
    return x.sum() + sum(e in row for e in range(12) for row in rows)


def _wait_for_activation(block, x):
    while (x := x.cos()).sum().item() != 0:
        pass
    return x


def test_a_loop_over_the_items_of_a_list_ends():
    captured = run(Fn(_compare_items), make_meta(64, 12))
    assert len(captured.reads) > 1024  # more than `_MAX_READS` and `_MAX_READS_PER_TOKEN` allow for new activations


def test_a_loop_that_waits_for_an_activation_is_refused():
    with pytest.raises(Refused, match="a loop compares activations and has not ended after"):
        run(Fn(_wait_for_activation), make_meta(4, 12))
