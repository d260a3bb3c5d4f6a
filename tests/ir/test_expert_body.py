"""Expert bodies: their JSON, their formula, and the dtypes of their parts."""

from __future__ import annotations

import torch

from moefx.ir.expressions.expert_body import ExpertBody, Gemm

BODY = ExpertBody(
    up=(Gemm(4, True), Gemm(1, False, bias=True)),
    parts=((0, None, None, 1), (1, 0, 8, 2)),
    act=("mul.Tensor", ("silu", "a0"), "a1"),
    down=Gemm(4, True),
    out=("mul.Tensor", "y", "w"),
)


def test_a_body_is_read_back_from_its_json():
    again = ExpertBody.from_json(BODY.to_json())
    assert again == BODY
    assert hash(again) == hash(BODY)
    assert again.up[1] == Gemm(1, False, bias=True)


def test_lists_and_tuples_are_the_same_body():
    spelled = ExpertBody(
        list(BODY.up),
        [list(p) for p in BODY.parts],
        ["mul.Tensor", ["silu", "a0"], "a1"],
        BODY.down,
        list(BODY.out),
    )
    assert spelled == BODY
    assert spelled.to_json() == BODY.to_json()


def test_a_body_is_printed_as_a_formula():
    assert BODY.pretty() == "silu(g)*u | y*w"
    assert ExpertBody(BODY.up, BODY.parts, BODY.act, BODY.down).pretty() == "silu(g)*u"


def test_knows_whether_it_uses_the_row_weight():
    assert BODY.uses_row_weight
    assert ExpertBody(BODY.up, BODY.parts, ("mul", "a0", "w"), BODY.down).uses_row_weight
    assert not ExpertBody(BODY.up, BODY.parts, BODY.act, BODY.down).uses_row_weight


def test_the_activation_ends_in_the_dtype_of_the_gemms():
    weighted = ExpertBody(BODY.up, BODY.parts, ("mul", "a0", "w"), BODY.down, BODY.out)
    assert weighted.act_in(torch.bfloat16, torch.bfloat16) == weighted.act
    assert weighted.act_in(torch.bfloat16, torch.float32) == ("_to_copy", weighted.act, {"dtype": "bfloat16"})
    assert weighted.out_dtype(torch.bfloat16, torch.float32) is torch.float32
    assert BODY.act_in(torch.float64, None) == BODY.act


def test_biases_that_are_added_in_another_dtype():
    wide = Gemm(1, True, bias=True, bias_dtype="float32")
    body = ExpertBody((wide,), ((0, None, None, 1),), ("silu", "a0"), wide)
    assert body.act_in(torch.bfloat16, None) == ("_to_copy", ("silu", "a0"), {"dtype": "bfloat16"})
    assert body.out_dtype(torch.bfloat16, None) is torch.float32
    assert body.out_dtype(torch.float64, None) is torch.float32 and body.out_dtype(torch.float32, None) is torch.float32
    assert ExpertBody.from_json(body.to_json()) == body
