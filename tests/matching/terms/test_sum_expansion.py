"""Sums over an axis that the routing determines are expanded, other sums are not."""

from __future__ import annotations

import torch

from moefx.matching.terms.normal_form import Terms
from moefx.matching.terms.sum_expansion import routed_axes

D, E = 4, 3


def make_sum(T: Terms, mask: list[float]):
    """Build the sum over experts of a masked row of their outputs."""
    weights = T.make("param", ("w",), (E, D, D))
    outputs = T.einsum(("d", "efd"), "ef", (T.make("node", ("x",), (D,)), weights))
    return weights, outputs, T.sum(T.pointwise("mul", outputs, T.reshape(T.array(torch.tensor(mask)), (E, 1))), [0])


def test_a_sum_over_experts_keeps_the_selected_one():
    T = Terms()
    weights, outputs, total = make_sum(T, [0, 1, 0])
    assert T.resolve(total) is T.pick(outputs, 0, 1) and T.resolve(T.pick(outputs, 0, 1)).args[-1] is T.pick(
        weights, 0, 1
    )


def test_a_sum_of_two_selected_experts_is_an_addition():
    T = Terms()
    _, outputs, total = make_sum(T, [1, 0, 1])
    assert T.resolve(total) is T.pointwise("add", T.pick(outputs, 0, 0), T.pick(outputs, 0, 2))


def test_a_parameter_has_routed_axes_once_it_is_marked():
    T = Terms()
    weights, outputs, _ = make_sum(T, [1, 1, 1])
    assert routed_axes(T, weights) == routed_axes(T, outputs) == set()
    T.mark_routed({weights: frozenset({0})})
    assert routed_axes(T, weights) == routed_axes(T, outputs) == {0}


def test_a_contraction_over_features_stays_whole():
    T = Terms()
    product = T.einsum(("d", "fd"), "f", (T.make("node", ("x",), (D,)), T.make("param", ("w",), (D, D))))
    assert T.resolve(product) is product
