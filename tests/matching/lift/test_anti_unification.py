"""Anti-unification of summands: equal parts remain, different parts become values or tables."""

from __future__ import annotations

import types
from typing import Any

import pytest
from torch import fx

from moefx.errors import Cause, Refused
from moefx.matching.lift.anti_unification import Skeletons, Unifier
from moefx.matching.lift.canonical_form import Body, NodeRef
from moefx.matching.terms.normal_form import Terms

D, E = 4, 3
IDS = [[2], [0], [1]]  # the experts of three tokens
T = Terms()
X = fx.Graph().placeholder("x")
X.meta["source"] = "here"
ROWS = [T.pick(T.make("node", (X,), (3, D)), 0, t) for t in range(3)]
WEIGHTS = [T.make("param", (f"experts.{e}.weight",), (D, D)) for e in range(E)]


def unify(summands, ids=IDS):
    """Anti-unify one summand per token. The lookup only finds the row of each token itself."""

    def find(where, terms, **options):
        is_own = all(ROWS[t] is term for (t, _, _), term in zip(where, terms, strict=True))
        return NodeRef(X, ("t",)) if is_own else None

    lookup: Any = types.SimpleNamespace(find=find, hint_positions=set())
    owners: Any = types.SimpleNamespace(experts={w.args[0] for w in WEIGHTS}, find_key=lambda t: ())
    return Unifier(owners, lookup, set()).unify_group([(t, 0, s) for t, s in enumerate(summands)], ids)


def make_product(t, row=None):
    return T.einsum(("d", "fd"), "f", (ROWS[t if row is None else row], WEIGHTS[IDS[t][0]]))


def test_rows_become_values_and_parameters_tables():
    group = unify([T.pointwise("mul", make_product(t), T.const(2)) for t in range(3)])
    assert group.ids == [0, 1, 2] and group.values == [NodeRef(X, ("t",))]
    assert [str(group.tables[0][e]) for e in group.ids] == [w.args[0] for w in WEIGHTS]
    leaves = [a for a in group.body.args if isinstance(a, Body)]
    assert [leaf.op for leaf in leaves] == ["einsum", "const"] and [a.op for a in leaves[0].args[2:]] == [
        "value",
        "expert",
    ]


def test_an_expert_with_another_op_is_refused():
    summands = [make_product(t) for t in range(2)] + [T.pointwise("relu.default", make_product(2))]
    with pytest.raises(Refused, match="experts do not compute the same function"):
        unify(summands)


def test_a_row_of_another_token_is_refused():
    with pytest.raises(Refused) as raised:
        unify([make_product(0), make_product(1), make_product(2, row=0)])
    assert raised.value.cause is Cause.FOREIGN_ROW


def test_an_expert_has_one_parameter():
    with pytest.raises(Refused, match=r"expert 2 uses experts.0.weight for one token and experts.2.weight for another"):
        unify([make_product(0), make_product(1), make_product(2)], ids=[[2], [2], [1]])


def test_skeletons_ignore_rows_weights_and_parameters():
    skeletons = Skeletons(lambda shape: set(ROWS) if shape == (D,) else set())
    first, second = (T.pointwise("mul", make_product(t), T.make("node", (f"weight {t}",), ())) for t in (0, 1))
    assert skeletons.number_skeleton(first) == skeletons.number_skeleton(second)
    assert skeletons.number_skeleton(first) != skeletons.number_skeleton(T.pointwise("relu.default", first))
    halves = [skeletons.number_skeleton(T.pointwise("mul", first, T.const(factor))) for factor in (-1.0, -2.0)]
    assert halves[0] != halves[1]  # hash(-1.0) == hash(-2.0)
    assert skeletons.number_skeleton(first) != skeletons.number_skeleton(
        T.pointwise("mul", make_product(0), T.const(0.5))
    )
