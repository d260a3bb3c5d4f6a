"""Sizes record their expressions and comparisons."""

from __future__ import annotations

import copy
import math
import operator
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefx.capture.sizes.size_guards import SizeGuard, SizeLog
from moefx.capture.sizes.symbolic_sizes import Ratio, Size, wrap_sizes


def evaluate(expr: str, **dims: int) -> float:
    return eval(expr, {"ceil": math.ceil}, dims)


OPS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.truediv]


class TestArithmetic:
    @settings(max_examples=80, deadline=None)
    @given(
        n=st.integers(1, 500),
        steps=st.lists(st.tuples(st.sampled_from(OPS), st.integers(1, 9), st.booleans()), max_size=4),
    )
    def test_expression_and_value_agree(self, n, steps):
        size = Size(n, "S", SizeLog({"S": n}))
        plain: float = n
        for op, other, swapped in steps:
            if swapped and op is not operator.add and plain == 0:
                return
            size = op(other, size) if swapped else op(size, other)
            plain = op(other, plain) if swapped else op(plain, other)
        assert size == plain
        assert evaluate(size.expr, S=n) == plain

    def test_arithmetic_keeps_whole_numbers_and_ratios_apart(self):
        size = Size(10, "S", SizeLog())
        assert type(size * 2) is Size and type(size / 4) is Ratio
        assert type(math.ceil(size / 4)) is Size and math.ceil(size / 4).expr == "ceil((S/4))"

    @pytest.mark.parametrize(
        "compute",
        [
            lambda s: 1.5 * s,
            lambda s: -s,
            lambda s: s**2,
            lambda s: math.floor(s / 4),
            lambda s: round(s / 4),
            lambda s: s >> 1,
            lambda s: divmod(s, 2)[0],
            lambda s: abs(1 - s) % 7,
            lambda s: math.trunc(2**s / 8),
        ],
        ids=["float_times", "neg", "pow", "floor", "round", "shift", "divmod", "abs", "trunc"],
    )
    def test_every_way_to_compute_is_followed(self, compute):
        log = SizeLog({"S": 10})
        assert compute(Size(10, "S", log)) < 1000
        assert log.guards

    @pytest.mark.parametrize("compute", [lambda s: int(s / 4), math.sqrt, float])
    def test_leaked_sizes_are_logged(self, compute):
        log = SizeLog({"S": 10})
        compute(Size(10, "S", log))
        assert log.leaks and not log.guards

    def test_a_product_of_sizes_has_both_names(self):
        log = SizeLog({"B": 3, "S": 7})
        b, s = Size(3, "B", log), Size(7, "S", log)
        assert (b * s).expr == "(B*S)" and b * s == 21

    def test_a_size_behaves_as_an_int_without_a_hash(self):
        size = Size(4, "S", SizeLog())
        assert isinstance(size, int) and list(range(size)) == [0, 1, 2, 3] and [0] * size == [0] * 4
        with pytest.raises(TypeError, match="unhashable"):
            hash(size)
        assert (size << 1, -size, size**2) == (8, -4, 16)

    def test_copies_are_plain(self):
        size = Size(4, "S", SizeLog())
        for again in (copy.deepcopy(size), pickle.loads(pickle.dumps(size))):
            assert type(again) is int and again == 4

    def test_arithmetic_with_other_types_raises(self):
        assert Size(4, "S", SizeLog()).__add__("x") is NotImplemented
        with pytest.raises(TypeError):
            Size(4, "S", SizeLog()) + "x"


class TestGuards:
    @pytest.mark.parametrize(
        ("op", "text"),
        [
            (operator.lt, "S < 5"),
            (operator.le, "S <= 5"),
            (operator.gt, "S <= 5"),
            (operator.ge, "S < 5"),
            (operator.eq, "S != 5"),
            (operator.ne, "S != 5"),
        ],
    )
    def test_comparisons_are_noted(self, op, text):
        log = SizeLog({"S": 4})
        op(Size(4, "S", log), 5)
        assert [str(g) for g in log.guards] == [text]

    def test_truth_is_a_comparison_with_zero(self):
        log = SizeLog({"S": 4})
        assert bool(Size(4, "S", log))
        assert [str(g) for g in log.guards] == ["S != 0"]

    def test_equal_comparisons_make_one_guard(self):
        log = SizeLog({"S": 4})
        size = Size(4, "S", log)
        assert size > 2 and size > 2
        assert len(log.guards) == 1

    def test_comparing_a_size_with_itself_adds_no_guard(self):
        log = SizeLog({"S": 4})
        assert Size(4, "S", log) == Size(4, "S", log) and not log.guards

    def test_max_and_min_log_guards(self):
        log = SizeLog({"S": 40})
        capacity = int(max(4, Size(40, "S", log) // 8))
        (guard,) = log.guards
        assert capacity == 5
        assert guard.holds({"S": 40}) and not guard.holds({"S": 8})

    @settings(max_examples=60, deadline=None)
    @given(s=st.integers(1, 200), t=st.integers(1, 200), d=st.integers(1, 9), c=st.integers(0, 30))
    def test_holds_equals_the_programs_comparison(self, s, t, d, c):
        log = SizeLog({"S": s})
        first = bool(math.ceil(Size(s, "S", log) / d) > c)
        for guard in log.guards:
            assert guard.holds({"S": s})
            assert guard.holds({"S": t}) == ((math.ceil(t / d) > c) == first)

    def test_a_guard_holds_for_sizes_that_fulfil_it(self):
        guard = SizeGuard("(B*S)", "le", "ceil((S/2))", True)
        assert guard.holds({"B": 1, "S": 1}) and not guard.holds({"B": 2, "S": 5})


class TestSized:
    def test_known_numbers_get_names(self):
        log = SizeLog({"B": 3, "S": 7})
        shape = wrap_sizes(torch.Size([3, 7, 64, 21]), log)
        assert [getattr(n, "expr", None) for n in shape] == ["B", "S", None, "B*S"]
        assert wrap_sizes(64, log) == 64 and type(wrap_sizes(64, log)) is int

    def test_values_without_symbols_are_unchanged(self):
        shape = torch.Size([5, 6])
        assert wrap_sizes(shape, SizeLog({"S": 7})) is shape
        assert wrap_sizes(True, SizeLog({"S": 1})) is True
        assert wrap_sizes("x", SizeLog()) == "x"
