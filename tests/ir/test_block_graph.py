"""Block graphs: compiled graphs equal the block, rebuild its containers and free values early."""

import gc
import linecache
import operator
import pickle
import traceback
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx import Graph
from torch.utils import _pytree as pytree

from moefx.ir.argument_binding import Guard
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.node_values import TensorSpec, format_dtype, format_value

from .graphs import Block, D, build_block_graph

aten = torch.ops.aten


def build_graph(build, **fields) -> BlockGraph:
    graph = Graph()
    build(graph)
    graph.lint()
    return BlockGraph("block", graph, **fields)


@pytest.mark.parametrize("fused", [True, False])
def test_the_compiled_graph_equals_the_block(fused):
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(3, 4, D)
    torch.testing.assert_close(build_block_graph(fused=fused).compile()(block, x), block(x))


def test_kept_submodules_are_called_as_modules():
    block = Block()
    fired = []
    block.router.register_forward_hook(lambda *_: fired.append(1))
    build_block_graph().compile()(block, torch.randn(2, 3, D))
    assert fired == [1]


def test_every_kind_of_node_and_argument():
    def build(g):
        x = g.placeholder("x")
        self_ = g.placeholder("self_")
        weight = g.get_attr("experts.0.up.weight")
        low = g.call_function(aten.clamp.default, (x,), {"min": float("-inf"), "max": 3})
        cast = g.call_function(aten._to_copy.default, (low,), {"dtype": torch.float64, "device": torch.device("cpu")})
        part = g.call_function(operator.getitem, (cast, (slice(None, 2), ..., None)))
        negative = g.call_function(operator.sub, (-1, part))
        stacked = g.call_function(torch.stack, ([negative, negative],))
        relu = g.call_function(torch.nn.functional.relu, (stacked,))
        linear = g.call_function(torch.nn.functional.linear, (self_, weight))
        total = g.call_method("sum", (relu,), {"dim": 0, "keepdim": False})
        pair = g.call_function(torch.max, (total, 0))
        indices = g.call_function(operator.getitem, (pair, 1))
        g.output({"out": [total, (indices,)], "same": weight, "linear": linear, "flag": True, "none": None})

    block, x = Block(), 2 * torch.randn(3, D)
    result = build_graph(build).compile()(block, x, x)
    total = 2 * torch.relu(-1 - x.clamp(max=3).double()[:2, ..., None])  # the sum of two equal results
    torch.testing.assert_close(result["out"][0], total)
    torch.testing.assert_close(result["out"][1][0], total.max(0).indices)
    torch.testing.assert_close(result["linear"], x @ block.experts[0].up.weight.T)
    assert isinstance(result["out"], list) and isinstance(result["out"][1], tuple)
    assert result["same"] is block.experts[0].up.weight
    assert result["flag"] is True and result["none"] is None


def test_names_of_the_graph_do_not_shadow_the_sources():
    def build(g):
        g.placeholder("x").name = "aten"
        ranged = g.call_function(torch.arange, (1, 4))
        ranged.name = "torch"
        x = next(iter(g.nodes))
        g.output(g.call_function(aten.add.Tensor, (x, ranged)))

    torch.testing.assert_close(build_graph(build).compile()(None, torch.ones(3)), torch.tensor([2.0, 3.0, 4.0]))


def test_an_effect_is_kept():
    def build(g):
        x = g.placeholder("x")
        g.call_function(aten.copy_.default, (g.get_attr("counter"), x))
        g.output(x)

    block = torch.nn.Module()
    block.register_buffer("counter", torch.zeros(2))
    build_graph(build).compile()(block, torch.ones(2))
    assert block.counter.tolist() == [1, 1]


def test_output_specs_rebuild_the_users_containers():
    value = {"a": torch.ones(1), "b": (torch.zeros(1), None)}
    flat, spec = pytree.tree_flatten(value)

    def build(g):
        x = g.placeholder("x")
        g.output([x, x, None])

    graph = build_graph(build, output_spec=spec)
    assert pytree.tree_structure(graph.compile()(None, flat[0])) == spec
    assert "return {'a': x, 'b': (x, None)}" in graph.code and "return {'a': x, 'b': (x, None)}" in str(graph)
    assert pickle.loads(pickle.dumps(graph)).output_spec == spec


def test_containers_of_a_class_are_rebuilt_when_it_runs():
    flat, spec = pytree.tree_flatten(OrderedDict(a=torch.ones(1)))

    def build(g):
        g.output([g.placeholder("x")])

    graph = build_graph(build, output_spec=spec)
    assert graph.compile()(None, flat[0]) == OrderedDict(a=flat[0])
    assert graph.code.endswith("return tree_unflatten([x], output_spec)\n")


class Output(NamedTuple):
    out: Any


class Pair:
    def __init__(self, items):
        self.items = items


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_specs_of_any_class_pickle():
    pytree.register_pytree_node(Pair, lambda p: (p.items, None), lambda items, _: Pair(list(items)))
    for value in (Output(torch.ones(1)), Pair([torch.ones(1)])):
        flat, spec = pytree.tree_flatten(value)

        def build(g):
            g.output([g.placeholder("x")])

        loaded = pickle.loads(pickle.dumps(build_graph(build, output_spec=spec)))
        assert type(loaded.compile()(None, flat[0])) is type(value)


def test_values_are_freed_when_nothing_needs_them():
    alive = []

    def watch(tensor):
        alive.append(weakref.ref(tensor))
        return tensor

    def count(tensor):
        gc.collect()
        return sum(ref() is not None for ref in alive)

    def build(g):
        x = g.placeholder("x")
        for _ in range(3):
            x = g.call_function(watch, (g.call_function(aten.add.Tensor, (x, 1)),))
        g.output(g.call_function(count, (x,)))

    assert build_graph(build).compile()(None, torch.ones(1)) == 1


def test_tracebacks_show_the_generated_source():
    block, graph = Block(), build_block_graph()
    with pytest.raises(RuntimeError) as caught:
        graph.compile()(block, torch.randn(2, D + 1))
    frames = [
        f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename.startswith("<moefx layers.3.mlp")
    ]
    assert frames and "aten.reshape.default" in (frames[0].line or "")
    linecache.checkcache()
    assert linecache.getline(frames[0].filename, 1).startswith("def forward(self, hidden_states)")


def test_the_same_source_is_one_function():
    first, second = build_block_graph(name="layers.0.mlp"), build_block_graph(name="layers.1.mlp")
    assert first.compile() is second.compile()
    assert first.compile() is not build_block_graph(fused=False).compile()


def test_expert_parameters_are_read_in_a_loop():
    text = build_block_graph(256).code
    assert 'read_range(self.experts, "", 0, 256, ".down.weight")' in text
    assert len(text.splitlines()) < 12


def test_a_graph_may_record_the_load():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(5, D)
    out, (offsets,) = build_block_graph().compile(record_load=True)(block, x)
    torch.testing.assert_close(out, block(x))
    ids = block.router(x)[1]
    assert offsets.diff().tolist() == [(ids == e).sum() for e in range(len(block.experts))]


def test_guards_return_the_failing_one():
    guards = (Guard("self.training"), Guard("hidden_states.shape[0] > 2", "a size was compared", "m.py:3"))
    check = build_block_graph().compile_guards(guards)
    block = Block()
    assert check(block, torch.zeros(3, D)) == -1
    assert check(block, torch.zeros(2, D)) == 1
    assert check(block.eval(), torch.zeros(2, D)) == 0


def test_a_copy_is_equal_and_independent():
    graph = build_block_graph()
    copy = graph.copy()
    assert str(copy) == str(graph) and copy.code == graph.code
    before = graph.code
    copy.graph.erase_node(copy.output)
    copy.graph.output(None)
    copy.placeholders[0].meta["letters"] = ("Z",)
    assert graph.code == before and "letters" not in graph.placeholders[0].meta


def test_graphs_pickle_with_their_printed_form():
    graph = build_block_graph().replace(header="after 2/3 fuse")
    loaded = pickle.loads(pickle.dumps(graph))
    assert str(loaded) == str(graph)
    assert loaded.compile() is graph.compile()
    assert pickle.dumps(loaded) == pickle.dumps(pickle.loads(pickle.dumps(loaded)))


def test_blocks_that_share_a_graph_share_it_in_a_pickle():
    graph = build_block_graph(256)
    many = [graph.replace(name=f"layers.{i}.mlp") for i in range(20)]
    assert len(pickle.dumps(many)) < 1.5 * len(pickle.dumps(graph)) + 4096
    loaded = pickle.loads(pickle.dumps(many))
    assert all(g.graph is loaded[0].graph for g in loaded)


def test_fake_values_become_specs_in_a_pickle():
    from torch._subclasses import FakeTensorMode

    graph = build_block_graph().copy()
    with FakeTensorMode():
        graph.placeholders[0].meta["val"] = torch.empty(2, 3, dtype=torch.bfloat16)
    graph.placeholders[0].meta["closure"] = lambda: None
    meta = pickle.loads(pickle.dumps(graph)).placeholders[0].meta
    assert meta["val"] == TensorSpec((2, 3), torch.bfloat16, torch.device("cpu"))
    assert "closure" not in meta


def test_values_print_their_dtype_and_letters():
    graph = Graph()
    node = graph.placeholder("x")
    assert format_value(node) == ""
    node.meta["letters"] = ("S", "D")
    assert format_value(node) == "[S,D]"
    node.meta["val"] = torch.empty(2, 3, dtype=torch.bfloat16)
    assert format_value(node) == "bf16[S,D]"
    node.meta["val"], node.meta["letters"] = (
        (torch.empty(2), torch.empty(3, dtype=torch.int64)),
        (("S",), ("B",)),
    )
    assert format_value(node) == "f32[S] i64[B]"
    node.meta["letters"] = "S*K"
    assert format_value(node) == "S*K"
    assert [format_dtype(d) for d in (torch.bool, torch.uint8, torch.float16)] == ["bool", "u8", "f16"]


def test_nodes_are_found_by_name_or_operation():
    graph = build_block_graph(fused=False)
    assert [n.op for n in graph.find("router")] == ["call_module"]
    assert graph.find("moefx::combine") == graph.find(torch.ops.moefx.combine.default) != []
    assert repr(graph) == f"<BlockGraph layers.3.mlp: {len(graph.nodes)} nodes>"
