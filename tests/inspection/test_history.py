"""History of a block: lookup, diffs, scripts that reproduce a graph, and the captured graph."""

import operator
import os
import pickle
import runpy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch.fx import Graph
from torch.utils._pytree import tree_structure

import moefx
from moefx.compiler import block_compiler
from moefx.inspection.history import History, Snapshot
from moefx.ir.graphs.block_graph import BlockGraph
from moefx.ir.node_values import TensorSpec

from .. import golden
from ..ir.graphs import Block, D, build_block_graph
from .histories import Gated, make_history


def fuse(block, plan):
    return build_block_graph(64, name=block.name)


def test_a_snapshot_is_found_by_pass_or_index():
    h = make_history()
    assert h.passes == ("rewrite", "fuse") and len(h) == 2 and list(h) == [h[0], h["fuse"]]
    assert h.graph is h["fuse"].graph
    with pytest.raises(KeyError, match=r"no pass 'lower' ran on layers.3\.mlp; there is rewrite, fuse"):
        h["lower"]


def test_the_diff_of_a_pass_is_readable():
    golden.check("history_diff.txt", make_history().diff("fuse"))
    assert make_history().diff() == make_history().diff("fuse")
    lines = make_history().diff("rewrite").splitlines()[1:]
    assert lines and all(line.startswith("+ ") for line in lines)


def test_a_history_prints_every_graph():
    golden.check("history.txt", str(make_history()))
    assert str(make_history()["fuse"]).splitlines()[0] == (
        "# layers.3.mlp   after 2/2 fuse   1.9 ms   +1 -7   passes/fuse.py:88"
    )


def test_histories_of_equal_blocks_share_graphs():
    h = make_history()
    other = h.renamed("layers.4.mlp")
    assert other.name == "layers.4.mlp" and str(other.graph).startswith("# layers.4.mlp")
    assert other.graph.graph is h.graph.graph
    loaded = pickle.loads(pickle.dumps((h, other)))
    assert str(loaded[0]["rewrite"]) == str(h["rewrite"]) and loaded[1].graph.graph is loaded[0].graph.graph


def test_a_repro_runs_by_itself(tmp_path):
    path = tmp_path / "repro.py"
    h, block = make_history(4), Block()
    h.repro(path, block=block)
    environment = {**os.environ, "PYTHONPATH": str(Path(moefx.__file__).parents[1])}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["after_1_rewrite", "after_2_fuse"]
    assert all(float(line.split()[-1]) < 1e-5 for line in done.stdout.splitlines())


def test_a_repro_of_every_kind_of_value(tmp_path):
    g = Graph()
    x = g.placeholder("x")
    x.meta["val"] = TensorSpec((3, 4), torch.bfloat16, torch.device("cpu"))
    kept = g.call_module("experts.0.norm", (x,))
    kept.meta["val"] = (x.meta["val"], TensorSpec((3,), torch.int64, torch.device("cpu")))
    ids = g.call_function(operator.getitem, (kept, 1))
    single = g.call_module("shared", (x,))
    single.meta["val"] = x.meta["val"]
    total = g.call_function(operator.add, (single, g.call_function(torch.relu, (g.get_attr("w"),))))
    next(n for n in g.nodes if n.op == "get_attr").meta["val"] = x.meta["val"]
    g.output([total, ids, g.call_function(torch.special.expit, (x,))])
    spec = tree_structure(OrderedDict(a=0, b=(0, 0)))
    graph = BlockGraph("", g, output_spec=spec)
    path = tmp_path / "repro.py"
    History("", (Snapshot(1, 1, "a pass", 0.0, 0, 0, "", graph),)).repro(path)
    namespace = runpy.run_path(str(path))
    assert list(namespace["result"]) == ["a", "b"] and namespace["result"]["b"][0].dtype == torch.int64


def test_the_captured_graph_of_a_block_is_saved_with_its_history():
    compiled = moefx.compile(Gated(tuple), example_inputs=(torch.randn(9, D),))
    h = moefx.history(compiled, "")
    assert h.passes == ("rewrite_block", "fuse", "checkpoint")
    assert len(h.captured.find("aten::index_add")) == 4 and not h.captured.find("moefx::build_pft")
    assert [n.name for n in h.captured.placeholders] == ["x"]
    loaded = pickle.loads(pickle.dumps(h))
    assert str(loaded.captured) == str(h.captured) and str(loaded.graph) == str(h.graph)
    assert str(h.renamed("layers.1").captured).startswith("# layers.1\n")


def test_explain_builds_no_captured_graph(monkeypatch):
    built = []
    monkeypatch.setattr(block_compiler, "build_captured_graph", lambda *args: built.append(args))
    assert moefx.explain(Gated(tuple), example_inputs=(torch.randn(9, D),)).matched and not built
    moefx.compile(Gated(tuple), example_inputs=(torch.randn(9, D),))
    assert len(built) == 1


@pytest.mark.parametrize("kind", [dict, tuple])
@pytest.mark.parametrize("with_block", [False, True])
def test_a_repro_of_modules_that_return_containers(kind, with_block, tmp_path):
    model, path = Gated(kind), tmp_path / "repro.py"
    compiled = moefx.compile(model, example_inputs=(torch.randn(9, D),))
    moefx.history(compiled, "").repro(path, block=model if with_block else None)
    assert torch.equal(runpy.run_path(str(path))["result"], runpy.run_path(str(path))["reference"][0])


def test_a_repro_needs_shapes(tmp_path):
    with pytest.raises(ValueError, match=r"shape of experts\.0\.gate\.weight is unknown; pass the block"):
        make_history(4).repro(tmp_path / "repro.py")


def test_every_snapshot_runs():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, D)
    for snapshot in make_history(4):
        torch.testing.assert_close(snapshot.graph.compile()(block, x), block(x))
