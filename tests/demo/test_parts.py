"""Parts of the demo: text, model, measurements, terminal."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from moefx.demo import terminal
from moefx.demo.model import Config, LanguageModel
from moefx.demo.stdlib_text import batches, standard_library_text
from moefx.demo.step_cost import block_inputs, parameters_and_buffers, saved_bytes, side_by_side

TINY = Config(dim=32, layers=2, heads=2, dense_hidden=32, num_experts=8, expert_hidden=16, top_k=3, context=16)


def test_the_text_is_real_and_the_same_every_time():
    text = standard_library_text(50_000)
    assert len(text) == 50_000
    assert text == standard_library_text(50_000)
    assert b"def " in text


def test_batches_are_deterministic_and_shifted_by_one():
    text = standard_library_text(10_000)
    pairs = [list(itertools.islice(batches(text, batch=2, context=16, seed=s), 3)) for s in (0, 0, 1)]
    (ids, labels), again, other = (p[1] for p in pairs)
    assert ids.shape == labels.shape == (2, 16)
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    assert torch.equal(ids, again[0])
    assert not torch.equal(ids, other[0])


def test_the_model_is_causal_and_routes_to_top_k():
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    ids = torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 10:] = 0
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])
    (router,) = model.routers()
    assert router.load.sum() == 2 * 16 * TINY.top_k


def test_the_model_learns():
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, labels in itertools.islice(batches(standard_library_text(50_000), batch=8, context=16, seed=0), 40):
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


def test_rebalance_moves_the_choice_towards_idle_experts():
    torch.manual_seed(0)
    (router,) = LanguageModel(TINY).routers()
    x = torch.randn(64, TINY.dim) + 0.5
    router(x)
    idle, before = int(router.load.argmin()), router.load.min()
    router.rebalance(rate=1.0)
    assert router.balance_bias[idle] == 1.0
    assert router.load.sum() == 0
    router(x)
    assert router.load[idle] > before


def test_saved_bytes_counts_storages_once_and_no_parameters():
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def forward():
        y = layer(x)
        return (y.exp() * y.relu()).sum()  # keeps x, exp's output, relu's output: 3 storages of 4x8 floats

    assert saved_bytes(forward, parameters_and_buffers(layer)) == 3 * 4 * 8 * 4


def test_models_are_timed_in_alternation():
    order = []
    seconds = side_by_side({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=2)
    assert order == ["a", "b"] * 3  # one warm-up
    assert set(seconds) == {"a", "b"}


def test_block_inputs_are_detached_leaves():
    model = LanguageModel(TINY)
    inputs = block_inputs(model, ["layers.1.mlp"], torch.randint(256, (2, 16)))
    ((x,), kwargs) = inputs["layers.1.mlp"]
    assert x.shape == (2, 16, TINY.dim) and x.requires_grad and x.is_leaf and not kwargs
    assert not model.get_submodule("layers.1.mlp")._forward_pre_hooks


def test_chart_marks_differing_curves():
    same = terminal.chart([3.0, 2.0, 1.0], [3.0, 2.0, 1.0], width=8, height=4)
    assert "1" not in "".join(line[11:] for line in same.splitlines()[:4])
    different = terminal.chart([3.0, 2.0, 1.0], [3.0, 3.0, 3.0], width=8, height=4)
    assert "1" in different.splitlines()[3][11:] and "2" in different.splitlines()[0][11:]
    assert terminal.chart([float("nan")], [float("nan")]) == "(no finite values)"


def test_progress_in_a_pipe_is_about_ten_lines(capsys):
    progress = terminal.Progress("work", 200)
    for step in range(200):
        progress.update(step + 1)
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 11
    assert "200/200" in lines[-1]


def test_columns_of_a_table_are_aligned():
    assert terminal.table(("", "a"), [("x", "1"), ("yy", "23")]) == "       a\n  x    1\n  yy  23"
