"""Pass manager: snapshots, checks of each result, and passes that break a rule."""

import functools
import operator
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

import moefx
from moefx import Plan
from moefx.compiler import block_compiler, compile_steps
from moefx.compiler.compile_steps import COMPILE_STEPS, CompileStep
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.passes.pass_manager import PassError, PassManager, find_pass_location, get_pass_name, graph_pass

from ..blocks import Loop, Mlp
from ..ir.graphs import Block, D, S, build_block_graph, ops

aten = torch.ops.aten


def build_small(fake: bool = False) -> BlockGraph:
    g = Graph()
    x = g.placeholder("x")
    if fake:
        with FakeTensorMode():
            x.meta["val"] = torch.empty(S, D)
    y = g.call_function(aten.relu.default, (x,))
    g.output(y)
    return BlockGraph("layers.0.mlp", g)


def replace_relu(block: BlockGraph, target, *args, val=None) -> BlockGraph:
    block = block.copy()
    (relu,) = block.find("aten::relu")
    with block.graph.inserting_before(relu):
        new = block.graph.call_function(target, (relu.args[0], *args))
    if val is not None:
        new.meta["val"] = val
    relu.replace_all_uses_with(new)
    block.graph.erase_node(relu)
    return block


def gelu(block, plan):
    return replace_relu(block, aten.gelu.default)


def nothing(block, plan):
    return block


def run(passes, graph=None, plan=None, **options):
    options = {"level": "captured", **options}
    manager = PassManager(options.pop("block", None))
    return manager.run(graph or build_small(), passes, plan or Plan(), **options)


def test_a_history_has_a_snapshot_for_each_pass():
    history = run([nothing, gelu], made_by="rewrite", ms=2.5)
    assert history.passes == ("rewrite", "nothing", "gelu")
    first, second, third = history
    assert (first.index, first.total, first.ms) == (1, 3, 2.5)
    assert (second.added, second.removed) == (0, 0) and (third.added, third.removed) == (1, 1)
    assert re.fullmatch(r"test_pass_manager\.py:\d+", third.rule)
    assert str(history.graph).startswith("# layers.0.mlp   after 3/3 gelu   ")
    x = torch.randn(3)
    torch.testing.assert_close(history["nothing"].graph.compile()(None, x), x.relu())
    torch.testing.assert_close(history.graph.compile()(None, x), torch.nn.functional.gelu(x))


def test_later_passes_continue_the_numbering():
    history = run([nothing, gelu], made_by="rewrite")
    longer = PassManager().extend(history, [nothing], Plan(), level="captured")
    assert [(s.index, s.total) for s in longer] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [s.graph.header for s in longer] == [s.header for s in longer]
    assert longer[1].header.startswith("after 2/4 nothing") and "after 4/4" in str(longer.graph)
    assert [s.total for s in history] == [3, 3, 3]


def test_rules_of_the_package_are_relative_to_it():
    from moefx.ir.graphs.graph_levels import eliminate_dead_code

    assert re.fullmatch(r"ir/graphs/graph_levels\.py:\d+", find_pass_location(eliminate_dead_code))
    assert find_pass_location(functools.partial(eliminate_dead_code)) == find_pass_location(eliminate_dead_code)
    assert find_pass_location(len) == ""

    @graph_pass(level="fused", name="other")
    def named(block, plan): ...

    assert get_pass_name(named) == get_pass_name(functools.partial(named)) == "other"


def test_disabled_passes_are_left_out():
    history = run([nothing, gelu], plan=Plan(disable=("gelu",)))
    assert history.passes == ("capture", "nothing") and history[1].total == 2
    extended = PassManager().extend(history, [nothing, gelu], Plan(disable=("nothing",)), level="captured")
    assert extended.passes == ("capture", "nothing", "gelu") and extended[2].total == 3


def test_a_pass_must_not_change_its_input():
    def in_place(block, plan):
        next(n for n in block.graph.nodes if n.op == "call_function").target = aten.gelu.default
        return block.copy()

    with pytest.raises(PassError, match="pass in_place changed its input graph"):
        run([in_place])


@pytest.mark.parametrize("key, value", [("letters", ("S", "F")), ("save", True), ("source", "model.py:7")])
def test_a_pass_must_not_change_the_meta_of_its_input(key, value):
    def annotate(block, plan):
        block.find("aten::relu")[0].meta[key] = value
        return block.copy()

    with pytest.raises(PassError, match="pass annotate changed its input graph"):
        run([annotate])


def test_a_pass_must_not_change_the_values_of_its_input():
    def resize(block, plan):
        with FakeTensorMode():
            block.placeholders[0].meta["val"] = torch.empty(S, D + 1)
        return block.copy()

    with pytest.raises(PassError, match="pass resize changed its input graph"):
        run([resize], build_small(fake=True))


def test_malformed_graphs_dead_code_and_python_functions_are_bugs():
    def malformed(block, plan):
        block = block.copy()
        relu = block.find("aten::relu")[0]
        block.placeholders[0].prepend(relu)
        return block

    def dead(block, plan):
        block = block.copy()
        with block.graph.inserting_before(block.output):
            block.graph.call_function(aten.neg.default, (block.placeholders[0],))
        return block

    def python(block, plan):
        return replace_relu(block, replace_relu)

    with pytest.raises(PassError, match="pass malformed left a malformed graph"):
        run([malformed])
    with pytest.raises(PassError, match=r"pass dead: .*'captured'.*\n.*neg.*nothing uses its result"):
        run([dead])
    with pytest.raises(PassError, match="replace_relu is a Python function"):
        run([python])


def test_the_spec_of_the_level_is_checked():
    assert len(run([], build_block_graph(), level="fused")) == 1
    with pytest.raises(PassError, match=r"moefx::expert_mlp does not exist at level 'dialect'"):
        run([], build_block_graph(), level="dialect")

    @graph_pass(level="dialect")
    def lowers(block, plan):
        return block

    with pytest.raises(PassError, match=r"pass lowers: not a legal graph of level 'dialect'"):
        run([lowers], build_block_graph(), level="fused")


def test_fakes_are_propagated_into_new_nodes():
    history = run([gelu], build_small(fake=True))
    node = history.graph.find("aten::gelu")[0]
    assert node.meta["val"].shape == (S, D)
    assert "f32[10,8]" in str(history.graph)


def narrow(block, plan):
    return replace_relu(block, aten.narrow.default, 0, 0, 4)


def change_arguments(block: BlockGraph, *arguments) -> BlockGraph:
    """Change the arguments of the node `narrow`, which keeps its name and target."""
    block = block.copy()
    (node,) = block.find("aten::narrow")
    node.args = (node.args[0], *arguments)
    return block


def test_fakes_of_changed_arguments_are_propagated_to_all_users():
    def double(block, plan):
        block = block.copy()
        with block.graph.inserting_before(block.output):
            block.output.args = (block.graph.call_function(aten.mul.Tensor, (block.output.args[0], 2)),)
        return block

    def shorten(block, plan):
        return change_arguments(block, 0, 0, 3)

    history = run([narrow, double, shorten], build_small(fake=True))
    shapes = [
        [tuple(node.meta["val"].shape) for node in snapshot.graph.nodes[1:-1]] for snapshot in history.snapshots[1:]
    ]
    assert shapes == [[(4, D)], [(4, D), (4, D)], [(3, D), (3, D)]]


def test_changed_arguments_that_cannot_run_are_a_bug():
    def exceed(block, plan):
        return change_arguments(block, 0, S, 4)

    with pytest.raises(PassError, match=r"pass exceed: .*narrow.* cannot run"):
        run([narrow, exceed], build_small(fake=True))


def test_users_of_changed_nodes_that_cannot_run_are_a_bug():
    def add(block, plan):
        block = block.copy()
        (node,) = block.find("aten::narrow")
        with block.graph.inserting_before(block.output):
            block.output.args = (block.graph.call_function(aten.add.Tensor, (node, node)),)
        return block

    def separate(block, plan):
        block = change_arguments(block, 1, 0, 4)
        (total,) = block.find("aten::add")
        with block.graph.inserting_before(total):
            other = block.graph.call_function(aten.narrow.default, (block.placeholders[0], 0, 0, 4))
        total.args = (total.args[0], other)
        return block

    with pytest.raises(PassError, match=r"pass separate: .*add.* cannot run"):
        run([narrow, add, separate], build_small(fake=True))


def test_passes_may_use_parameters_of_the_block():
    def project(block, plan):
        block = block.copy()
        relu = block.find("aten::relu")[0]
        with block.graph.inserting_before(block.output):
            weight = block.graph.get_attr("experts.0.up.weight")
            new = block.graph.call_function(torch.nn.functional.linear, (relu, weight))
        block.output.args = (new,)
        return block

    def unfused(block, plan):
        return block

    graph = run([gelu, nothing], build_small(fake=True)).graph
    graph.find("aten::gelu")[0].target = aten.relu.default
    history = run([project], graph, block=Block())
    assert history.graph.find("linear")[0].meta["val"].shape == (S, 6)


def test_a_node_that_fails_or_has_another_shape_is_a_bug():
    def breaks(block, plan):
        return replace_relu(block, aten.view.default, [3, 7])

    def lies(block, plan):
        return replace_relu(block, aten.sum.dim_IntList, [0], val=torch.empty(3, device="meta"))

    def data_dependent(block, plan):
        return replace_relu(block, aten.nonzero.default)

    with pytest.raises(PassError, match=r"pass breaks: .*view.* cannot run"):
        run([breaks], build_small(fake=True))
    with pytest.raises(PassError, match=r"pass lies: .*declared as .*'3'.* computes .*'8'"):
        run([lies], build_small(fake=True))
    history = run([data_dependent], build_small(fake=True))
    assert history.graph.find("aten::nonzero")


def test_unpacked_results_and_parameters_are_not_counted():
    def split(block, plan):
        block = replace_relu(block, aten.split.Tensor, 4)
        split = block.find("aten::split")[0]
        with block.graph.inserting_after(split):
            item = block.graph.call_function(operator.getitem, (split, 0))
        block.output.args = (item,)
        return block

    assert run([split])[-1].added == 1


def test_dialect_graphs_run_at_every_level():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(6, D)
    history = run([nothing], build_block_graph(fused=False), level="dialect")
    torch.testing.assert_close(history.graph.compile()(block, x), block(x))
    assert history.graph.find(ops.dispatch.default)


class TestPassBehindCheckpoint:
    """Pass that a user adds after `checkpoint`, with its own name."""

    @pytest.fixture(autouse=True)
    def passes(self, monkeypatch):
        @graph_pass(level="fused", name="count-nodes")
        def count(graph, plan):
            return graph

        names = [step.name for step in COMPILE_STEPS]
        position = names.index("checkpoint") + 1
        added = CompileStep("count-nodes", "", "fused", count, is_optional=True)
        steps = (*COMPILE_STEPS[:position], added, *COMPILE_STEPS[position:])
        monkeypatch.setattr(compile_steps, "COMPILE_STEPS", steps)

    def test_passes_run_again_if_the_planner_changes_the_policy(self):
        block = Loop(Mlp)
        result = block_compiler.rewrite_block(block, "", (torch.randn(24, 6),), {}, Plan(checkpoint="h"))
        again = block_compiler.rerun_from_checkpoint(block, result, Plan(checkpoint="x"))
        assert again.history.passes == result.history.passes == ("rewrite_block", "fuse", "checkpoint", "count-nodes")
        assert 'keep="h"' in str(result.graph) and 'keep="x"' in str(again.graph)

    def test_a_pass_is_disabled_by_its_name(self):
        compiled = moefx.compile(Loop(Mlp), torch.randn(24, 6), plan=Plan(disable=("count-nodes",)))
        assert moefx.history(compiled, "").passes == ("rewrite_block", "fuse", "checkpoint")
