"""Reports of `verify` for models whose blocks run dialect graphs built by hand."""

from __future__ import annotations

import json

import pytest
import torch

from moefx.errors import InvalidInput, VerificationFailed
from moefx.runtime.block_forward import get_rewritten_forward
from moefx.verification.verify_report import VerifyReport, verify

from .compiled import Model, break_op, build_compiled_pair

IDS = torch.arange(24).view(2, 12)


def swap_two_experts(graph):
    """Swap the weights of two experts."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and node.target.startswith(("experts.0.", "experts.1.")):
            node.target = f"experts.{1 - int(node.target[8])}{node.target[9:]}"
    return graph


def list_kinds(report: VerifyReport) -> set[tuple[str, str]]:
    return {(row.block, row.kind) for row in report.failed}


def test_an_equal_model_passes():
    original, compiled = build_compiled_pair()
    report = verify(compiled, original, (IDS,))
    assert report.ok and report.raise_if_failed() is report and not report.notes, str(report)
    assert report.first_block is None and report.first_pass is None
    assert {row.block for row in report.rows} == {"", "layers.0", "layers.1"}
    paths = [row for row in report.rows if row.kind == "path"]
    assert [row.note for row in paths] == ["1 calls ran rewritten, 0 ran the original"] * 2
    assert [(row.block, row.tokens, row.identical) for row in report.routing if "call" not in row.case] == [
        ("layers.0", 24, 1.0), ("layers.1", 24, 1.0),
    ]  # fmt: skip
    assert all(row.identical == 1.0 for row in report.routing)
    for block in ("layers.0", "layers.1"):
        found = {row.kind for row in report.rows if row.block == block}
        assert found == {"output", "grad_input", "grad_param", "path"}
    text = str(report)
    assert text.startswith("moefx.verify: passed") and "layers.1" in text and "smallest margin" in text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_precision_than_compiled_is_a_reported_fallback(dtype):
    original, compiled = build_compiled_pair()
    report = verify(compiled, original, (IDS,), dtype=dtype)
    assert list_kinds(report) == {("layers.0", "path"), ("layers.1", "path")}
    assert "0 calls ran rewritten, 1 ran the original" in str(report)


def test_several_inputs_and_seeds_and_a_loss():
    original, compiled = build_compiled_pair()
    inputs = [(IDS,), {"ids": IDS[:1, :1], "labels": IDS[:1, :1]}, IDS.view(3, 8)]
    report = verify(compiled, original, inputs, seeds=(0, 1))
    assert report.ok, str(report)
    cases = {row.case for row in report.rows if row.case and not row.block}
    later = {f"inputs 0, seed 0, {label}" for label in report.covered}
    assert cases == {f"inputs {i}, seed {s}" for i in range(3) for s in range(2)} | later
    report = verify(compiled, original, {"ids": IDS, "labels": IDS}, loss=lambda out: out["loss"])
    assert report.ok and ("", "output", "loss") in {(r.block, r.kind, r.name) for r in report.rows}
    report = verify(compiled, original, IDS, grads=False)
    assert report.ok and {row.kind for row in report.rows} == {"output", "path"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pass_name", ["rewrite", "fuse", "checkpoint"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_block_and_the_first_pass_that_differ_are_named(pass_name, layer):
    original, compiled = build_compiled_pair({pass_name: swap_two_experts}, layer)
    report = verify(compiled, original, (IDS,))
    assert not report.ok and report.first_block == f"layers.{layer}"
    assert report.first_pass == f"{pass_name} (passes/{pass_name}.py:1)"
    assert {row.block for row in report.failed} == {"", f"layers.{layer}"}, "the other block is right by itself"
    with pytest.raises(VerificationFailed, match=f"First block that differs: layers.{layer}; first pass"):
        report.raise_if_failed()


def test_a_wrong_kernel_is_found_in_the_pass_that_brought_it_in():
    original, compiled = build_compiled_pair()
    with break_op("expert_mlp_backward", lambda grads, *_, **__: [*grads[:-1], grads[-1] * 1.01]):
        report = verify(compiled, original, (IDS,))
    assert report.first_block == "layers.0" and report.first_pass == "fuse (passes/fuse.py:1)"
    assert all("down" in row.name for row in report.failed if row.block == "layers.0")
    assert report.not_covered == ("calls after the given one: the given call already differs",)


def test_other_routings_than_the_inputs_choose():
    """Find a graph that loses rows only if an expert gets most of the tokens."""

    def capped(graph):
        for node in graph.graph.nodes:
            if node.target is torch.ops.moefx.build_pft.default:
                node.kwargs = {**node.kwargs, "capacity": 20, "drop": "position_token"}
        return graph

    original, compiled = build_compiled_pair({"fuse": capped})
    assert verify(compiled, original, (IDS,), routings=False, token_counts=()).ok
    report = verify(compiled, original, (IDS,), token_counts=())
    assert report.first_block == "layers.1" and report.first_pass == "fuse (passes/fuse.py:1)"
    assert {row.case for row in report.failed} == {"inputs 0, seed 0, inputs that starve experts"}


def test_a_difference_outside_of_the_blocks():
    original, compiled = build_compiled_pair()
    compiled.norms[1].eps = 1e-2
    report = verify(compiled, original, (IDS,))
    assert not report.ok and report.first_block is None
    assert "No rewritten block differs on the reference's own inputs" in str(report)


def test_a_program_that_is_not_its_last_graph():
    original, compiled = build_compiled_pair()
    program = get_rewritten_forward(compiled.layers[0]).programs[0]
    right, program.fn = program.fn, lambda block, x: right(block, x) * 1.1
    report = verify(compiled, original, (IDS,))
    assert report.first_block == "layers.0" and report.first_pass.startswith("none: the graphs after all passes")


def test_a_model_without_rewritten_blocks_fails():
    original, _ = build_compiled_pair()
    report = verify(Model(), Model().requires_grad_(False), (IDS,))
    assert not report.ok
    report = verify(original, original, (IDS,))
    assert [row.kind for row in report.failed] == ["path"]
    assert "no rewritten block" in report.failed[0].note
    assert "The two models agree" in str(report) and "verify(compiled, model, inputs)" in str(report)
    assert "the difference lies outside" not in str(report)


def test_a_compiled_reference_is_refused():
    original, compiled = build_compiled_pair()
    for first in (original, compiled):
        with pytest.raises(InvalidInput, match=r"the reference, a Model, is compiled itself: its block 'layers.0'"):
            verify(first, compiled, (IDS,))


def test_blocks_that_did_not_run_are_not_verified():
    class Skips(Model):
        def forward(self, ids):
            return self.head(self.embed(ids) + self.layers[0](self.embed(ids)))

    original, compiled = build_compiled_pair()
    original.__class__ = compiled.__class__ = Skips
    assert list_kinds(verify(compiled, original, (IDS,))) == {("layers.1", "path")}


def test_other_weights_modes_and_names_are_reported():
    original, compiled = build_compiled_pair()
    with torch.no_grad():
        compiled.head.weight = torch.nn.Parameter(compiled.head.weight * 2)
    compiled.layers[1].eval()
    compiled.head.register_buffer("extra", torch.zeros(1))
    report = verify(compiled, original, (IDS,))
    notes = {row.name: row.note for row in report.failed}
    assert notes["head.weight"] == "the two models hold different values before they run"
    assert notes["layers.1.training"] == "compiled is in eval mode, the reference in train mode"
    assert notes["head.extra"] == "only the compiled model has it"


def test_equal_weights_need_not_be_shared():
    original, compiled = build_compiled_pair()
    other = Model()
    other.load_state_dict(original.state_dict())
    assert verify(compiled, other, (IDS,)).ok


def test_nothing_is_touched():
    original, compiled = build_compiled_pair()
    for p in original.parameters():
        p.grad = torch.ones_like(p)
    forward = get_rewritten_forward(compiled.layers[0])
    before = torch.get_rng_state(), forward.counts.rewritten, [dict(vars(m)) for m in compiled.modules()]
    assert verify(compiled, original, (IDS,)).ok
    assert torch.equal(before[0], torch.get_rng_state())
    assert forward.counts.rewritten == before[1] and get_rewritten_forward(compiled.layers[0]) is forward
    assert before[2] == [dict(vars(m)) for m in compiled.modules()]
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in original.parameters())


def test_a_lazy_specialization_is_captured_unseen():
    """Capture runs its own ops, which the modes of `verify` must ignore."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from moefx.runtime.block_forward import install_forward

    original, compiled = build_compiled_pair()
    seen = []

    def specialize(block, call, args, kwargs):
        seen.append(_get_current_dispatch_mode())
        torch.linspace(0, 1, 96).view(24, 4).topk(2)
        return programs[0]

    for i, block in enumerate(compiled.layers):
        programs = get_rewritten_forward(block).programs
        install_forward(block, [], name=f"layers.{i}", specialize=specialize)
    assert verify(compiled, original, (IDS,)).ok
    assert seen and set(seen) == {None}


def test_the_model_is_the_block():
    original, compiled = build_compiled_pair()
    x = torch.randn(2, 12, 8)
    report = verify(compiled.layers[0], original.layers[0], (x,))
    assert report.ok and {row.block for row in report.rows} == {""}, str(report)
    assert len(report.routing) == 1 + len(report.covered)
    original, compiled = build_compiled_pair({"fuse": swap_two_experts}, 0)
    report = verify(compiled.layers[0], original.layers[0], x)
    assert report.first_block == "" and report.first_pass == "fuse (passes/fuse.py:1)"


def test_calls_without_comparable_inputs_are_refused():
    original, compiled = build_compiled_pair()
    with pytest.raises(InvalidInput, match="meta device"):
        verify(compiled, Model().to("meta"), (IDS,))
    with pytest.raises(InvalidInput, match="no inputs"):
        verify(compiled, original, [])
    with pytest.raises(InvalidInput, match="got int"):
        verify(compiled, original, 3)
    with pytest.raises(InvalidInput, match=r"of torch\.compile is not 'moefx'"):
        verify(torch.compile(original), original, (IDS,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seeds=()), r"seeds=\(\): expected numbers"), (dict(seeds=3), "seeds=3: expected numbers"),
        (dict(seeds=(1.5,)), "seeds="), (dict(seeds=(-1,)), "seeds="), (dict(seeds="0"), "seeds="),
        (dict(token_counts=(0,)), r"token_counts=\(0,\): expected numbers of tokens"),
        (dict(token_counts=5), "token_counts=5"), (dict(token_counts=(2.5,)), "token_counts="),
        (dict(dtype="float64"), "dtype='float64': expected a dtype of floating"),
        (dict(dtype=torch.int32), "dtype=torch.int32"), (dict(dtype=torch.complex64), "dtype=torch.complex64"),
        (dict(grads=1), "grads=1: expected True or False"), (dict(loss=3), "loss is a int; expected a function"),
        (dict(loss=lambda out: 3.0), r"loss\(output\) returned a float, expected a tensor"),
        (
            dict(loss=lambda out: out["logits"].sum().detach()),
            r"cannot compare gradients: the tensor from loss\(output\) requires none",
        ),
    ],
)  # fmt: skip
def test_wrong_options_are_named(options, message):
    original, compiled = build_compiled_pair()
    with pytest.raises(InvalidInput, match=message):
        verify(compiled, original, (IDS,), **options)


def test_options_may_be_generators_and_a_loss_without_gradients():
    original, compiled = build_compiled_pair()
    options = dict(seeds=(seed for seed in (0, 1)), token_counts=(count for count in (5,)))
    report = verify(compiled, original, (IDS,), loss=lambda out: out["logits"].sum().detach(), grads=False, **options)
    assert report.ok and any("5 tokens" in call for call in report.covered), str(report)
    assert {row.case for row in report.rows if row.case.endswith("seed 1")}


def test_the_report_as_json_has_results_and_rows():
    original, compiled = build_compiled_pair()
    data = json.loads(verify(compiled, original, (IDS,)).to_json())
    assert data["ok"] is True and data["rows"][0]["kind"] == "output" and data["routing"][0]["block"] == "layers.0"
    data = json.loads(verify(original, original, (IDS,)).to_json())
    assert data["ok"] is False and data["rows"][-1]["error"] is None


def test_an_empty_report_is_not_a_pass():
    assert not VerifyReport(()).ok


def test_the_table_names_differences_and_the_first_pass(golden_text=None):
    original, compiled = build_compiled_pair({"fuse": swap_two_experts})
    lines = str(verify(compiled, original, (IDS,))).splitlines()
    assert lines[0].startswith("moefx.verify: FAILED, ")
    assert lines[1].split() == ["block", "kind", "compared", "worst", "error", "allowed", "norm", "worst", "tensor"]
    assert any(line.split()[:2] == ["layers.1", "grad_param"] and "FAILED" in line for line in lines)
    assert any(line.split()[:2] == ["layers.0", "grad_param"] and line.endswith("ok") for line in lines)
    assert "First block that differs: layers.1; first pass that differs: fuse (passes/fuse.py:1)" in lines
