"""Strings of users become code only if every part of them is allowed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefx.errors import InvalidInput
from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.expressions.expression_check import MAX_PARTS, check_expression
from moefx.ir.expressions.pointwise_expression import compile_expression, to_canonical_text
from moefx.ir.ops import dialect

BODY = ExpertBody((Gemm(1, False), Gemm(1, False)), ((0, None, None, 1), (1, None, None, 1)), "a0", Gemm(1, False))
CALLED: list[str] = []
CODE = "__import__('tests.ir.test_expression_check', fromlist=['x']).CALLED.append('here')"


@pytest.mark.parametrize(
    "expr",
    [
        ["silu", "a0", {f"x={CODE}, y": 1}],
        ["_to_copy", "a0", {"dtype": CODE}],
        ["_to_copy", "a0", {"dtype": "load"}],
        ["__class__", "a0"],
        ["mul.__class__", "a0", "a0"],
        ["mul.Tensor.__init__", "a0", "a0"],
        [f"silu({CODE})", "a0"],
        ["from_file", "a0"],
        ["add_.Tensor", "a0", "a0"],
        ["sum", "a0"],
        ["silu", f"a0]; {CODE}; ["],
        ["silu", "__builtins__"],
        ["silu", "a0", 1 << 70],
        ["silu", "a0", {"dtype": ["float32"]}],
        ["silu", {"a0": 1}, "a0"],
        {"a": 1},
        ["silu"] + ["a0"] * MAX_PARTS,
    ],
    ids=lambda expr: json.dumps(expr)[:40],
)
def test_unexpected_parts_are_refused(expr):
    with pytest.raises(InvalidInput, match=r"expression"):
        compile_expression(to_canonical_text(expr))
    assert not CALLED


def test_deep_nesting_is_refused():
    expr = "a0"
    for _ in range(500):
        expr = ["neg", expr]
    with pytest.raises(InvalidInput, match="levels"):
        compile_expression(to_canonical_text(expr))
    with pytest.raises(InvalidInput, match="no expert body"):
        ExpertBody.from_json("[" * 100_000 + "]" * 100_000)


@pytest.mark.parametrize(
    "changes",
    [
        {"act": ["silu", "a2"]},
        {"act": ["mul.Tensor", "a0", "y"]},
        {"act": ["silu", "class"]},
        {"out": ["mul.Tensor", "y", "a0"]},
        {"down": {"num": 0, "transposed": False}},
        {"down": {"num": 1, "transposed": False, "bias_dtype": "load"}},
        {"down": {"num": 1, "transposed": False, CODE: 1}},
        {"parts": [[0, None, None, 1], [2, None, None, 1]]},
        {"parts": [[0, CODE, None, 1], [1, None, None, 1]]},
        {"parts": 3},
        {"up": None},
        {"more": 1},
    ],
    ids=lambda changes: json.dumps(changes)[:40],
)
def test_bodies_with_other_fields_are_refused(changes):
    fields = json.loads(BODY.to_json())
    assert ExpertBody.from_json(json.dumps(fields)) == BODY
    with pytest.raises(InvalidInput):
        ExpertBody.from_json(json.dumps(fields | changes))
    x, ids = torch.randn(3, 4), torch.arange(3, dtype=torch.int32)
    offsets, weight = torch.tensor([0, 3], dtype=torch.int32), torch.randn(1, 4, 4)
    arguments = (x, ids, offsets, ids[:, None], None, [weight, weight], [], [weight], [])
    dialect.expert_mlp(*arguments, body=json.dumps(fields))
    with pytest.raises(InvalidInput):
        dialect.expert_mlp(*arguments, body=json.dumps(fields | changes))
    assert not CALLED


_texts = st.one_of(
    st.sampled_from(["a0", "y", "silu", "mul.Tensor", "add_", "exec", "__import__", "lambda", "dtype", "alpha", CODE]),
    st.text(max_size=8),
)
_leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _texts)
_expressions = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.builds(lambda head, rest: [head, *rest], _texts, st.lists(inner, max_size=3)),
        st.dictionaries(_texts, inner, max_size=2),
    ),
    max_leaves=12,
)


@given(_expressions)
def test_any_expression_is_refused_or_calls_pointwise_ops(expr):
    try:
        check_expression(expr)
    except InvalidInput:
        return
    compile_expression(to_canonical_text(expr))
    assert not CALLED


@given(_expressions, _expressions, st.integers(), _leaves)
def test_any_body_is_refused_or_is_one(act, out, num, name):
    fields = json.loads(BODY.to_json())
    gemm = {"num": num, "transposed": False, "bias_dtype": name}
    try:
        body = ExpertBody.from_json(json.dumps(fields | {"act": act, "out": out, "down": gemm}))
    except InvalidInput:
        return
    assert ExpertBody.from_json(body.to_json()) == body
