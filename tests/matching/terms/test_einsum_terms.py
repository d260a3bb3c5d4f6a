"""Equal contractions have one term in every notation."""

from __future__ import annotations

import pytest

from moefx.matching.terms.normal_form import Terms

T = Terms()
X, W = T.make("node", ("x",), (5, 4)), T.make("param", ("w",), (3, 4))
PRODUCT = T.einsum(("td", "fd"), "tf", (X, W))

SPELLINGS = {
    "other labels": T.einsum(("ab", "cb"), "ac", (X, W)),
    "a transposed weight": T.einsum(("td", "df"), "tf", (X, T.permute(W, (1, 0)))),
    "an axis of one": T.reshape(T.einsum(("utd", "fd"), "utf", (T.reshape(X, (1, 5, 4)), W)), (5, 3)),
    "a factor of one": T.einsum(("td", "fd", ""), "tf", (X, W, T.const(1))),
}


@pytest.mark.parametrize("term", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_a_product_are_one_term(term):
    assert term is PRODUCT


def test_other_contractions_differ():
    assert T.einsum(("td", "fd"), "ft", (X, W)) is not PRODUCT


def test_constants_are_factors():
    assert T.einsum(("td", "fd", ""), "tf", (X, W, T.const(2))) is T.pointwise("mul", PRODUCT, T.const(2))
    assert T.einsum(("td", "fd"), "tf", (X, T.const(0, (3, 4)))) is T.const(0, (5, 3))


def test_one_row_is_a_product_of_the_row():
    assert T.pick(PRODUCT, 0, 2) is T.einsum(("d", "fd"), "f", (T.pick(X, 0, 2), W))
