"""Built, selected and resolved terms evaluate to torch's results."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moefx.matching.terms.normal_form import Terms
from moefx.matching.terms.term import OVERWRITTEN, Term, TooLarge, format_term, is_const, is_pointwise_term

from ..numeric import check, evaluate

Pair = tuple[Term, torch.Tensor]
MOST = 200  # elements of an intermediate result


class Builder:
    """Build a term and the equal tensor together, from drawn decisions."""

    def __init__(self, data: st.DataObject):
        self.terms, self.data = Terms(), data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
        self.values: dict[str, torch.Tensor] = {}

    def draw(self, strategy: st.SearchStrategy):
        return self.data.draw(strategy)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def distinct(self, high: int, n: int) -> torch.Tensor:
        return torch.randperm(high, generator=self.generator)[:n]

    def param(self, *shape: int) -> Pair:
        name = f"p{len(self.values)}"
        self.values[name] = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return self.terms.make("param", (name,), shape), self.values[name]

    def leaf(self, *shape: int) -> Pair:
        """Draw a parameter, known numbers including zeros, or a constant."""
        kind = self.draw(st.sampled_from(("param", "param", "array", "zero", "one")))
        if kind == "param":
            return self.param(*shape)
        value = (
            self.integers(3, *shape).double()
            if kind == "array"
            else torch.full(shape, float(kind == "one"), dtype=torch.float64)
        )
        return self.terms.array(value), value

    def step(self, pair: Pair) -> Pair:
        steps: list[Callable[[Pair], Pair]] = [
            self.reshape,
            self.permute,
            self.slice,
            self.cat,
            self.index,
            self.index_many,
            self.put,
            self.put_many,
            self.gather,
            self.arithmetic,
            self.where,
            self.expand,
            self.sum,
            self.einsum,
            self.softmax,
            self.unary,
        ]
        t, x = self.draw(st.sampled_from(steps))(pair)
        assert t.shape == tuple(x.shape)
        return (t, x) if 0 < x.numel() <= MOST else pair

    def dim(self, x: torch.Tensor) -> int:
        return self.draw(st.integers(0, x.dim() - 1)) if x.dim() else 0

    # ------------------------------------------------------------------ views
    def reshape(self, pair: Pair) -> Pair:
        t, x = pair
        shapes = [(x.numel(),), (1, *x.shape), (*x.shape, 1)]
        for n in (2, 3, 4):
            if x.numel() % n == 0:
                shapes += [(n, x.numel() // n), (x.numel() // n, n), (n, 1, x.numel() // n)]
                if x.numel() % (2 * n) == 0:
                    shapes.append((2, n, x.numel() // (2 * n)))
        if x.dim() > 1:
            shapes.append((x.shape[0] * x.shape[1], *x.shape[2:]))
        shape = self.draw(st.sampled_from(shapes))
        return self.terms.reshape(t, shape), x.reshape(shape)

    def permute(self, pair: Pair) -> Pair:
        t, x = pair
        order = self.draw(st.permutations(range(x.dim())))
        return self.terms.permute(t, order), x.permute(order)

    def slice(self, pair: Pair) -> Pair:
        t, x = pair
        if not x.dim():
            return pair
        dim = self.dim(x)
        start, stop = sorted((self.draw(st.integers(0, x.shape[dim])), self.draw(st.integers(0, x.shape[dim]))))
        step = self.draw(st.integers(1, 3))
        return self.terms.slice(t, dim, start, stop, step), x[(slice(None),) * dim + (slice(start, stop, step),)]

    def cat(self, pair: Pair) -> Pair:
        t, x = pair
        if not x.dim():
            return pair
        dim = self.dim(x)
        shape = list(x.shape)
        shape[dim] = self.draw(st.integers(1, 2))
        other, y = self.leaf(*shape)
        if self.draw(st.booleans()):
            return self.terms.cat([t, other], dim), torch.cat([x, y], dim)
        return self.terms.cat([other, t, other], dim), torch.cat([y, x, y], dim)

    def expand(self, pair: Pair) -> Pair:
        t, x = pair
        shape = (2, *[3 if n == 1 else n for n in x.shape])
        return self.terms.expand(t, shape), x.expand(shape)

    # ------------------------------------------------------------------ indexing
    def index(self, pair: Pair) -> Pair:
        t, x = pair
        if not x.dim():
            return pair
        dim, shape = self.dim(x), self.draw(st.sampled_from([(2,), (4,), (2, 2)]))
        ids = self.integers(x.shape[dim], *shape)
        return self.terms.index(t, (dim,), ids[None], dim), x[(slice(None),) * dim + (ids,)]

    def index_many(self, pair: Pair) -> Pair:
        t, x = pair
        if x.dim() < 2:
            return pair
        a, b = self.integers(x.shape[0], 3), self.integers(x.shape[1], 3) - x.shape[1]
        return self.terms.index(t, (0, 1), torch.stack([a, b]), 0), x[a, b]

    def gather(self, pair: Pair) -> Pair:
        """Express `x.gather(0, ids)` as indexing of all axes."""
        t, x = pair
        if x.dim() != 2:
            return pair
        ids = self.integers(x.shape[0], 2, x.shape[1])
        columns = torch.arange(x.shape[1]).expand_as(ids)
        return self.terms.index(t, (0, 1), torch.stack([ids, columns]), 0), x.gather(0, ids)

    def put(self, pair: Pair) -> Pair:
        """Apply `index_add` or `index_copy` along any axis."""
        t, x = pair
        if not x.dim():
            return pair
        dim, accumulate = self.dim(x), self.draw(st.booleans())
        n = self.draw(st.integers(1, x.shape[dim]))
        ids = self.integers(x.shape[dim], n) if accumulate else self.distinct(x.shape[dim], n)
        source, y = self.leaf(n, *x.shape[:dim], *x.shape[dim + 1 :])
        moved = y.movedim(0, dim)
        out = x.index_add(dim, ids, moved) if accumulate else x.index_copy(dim, ids, moved)
        return self.terms.index_put(t, (dim,), ids[None], source, accumulate), out

    def put_many(self, pair: Pair) -> Pair:
        """Apply `index_put` to the first two axes."""
        t, x = pair
        if x.dim() < 2:
            return pair
        accumulate = self.draw(st.booleans())
        n = self.draw(st.integers(1, x.shape[0] * x.shape[1]))
        flat = self.integers(x.shape[0] * x.shape[1], n) if accumulate else self.distinct(x.shape[0] * x.shape[1], n)
        a, b = flat // x.shape[1], flat % x.shape[1]
        source, y = self.leaf(n, *x.shape[2:])
        indices = torch.stack([a, b])
        return self.terms.index_put(t, (0, 1), indices, source, accumulate), x.index_put((a, b), y, accumulate)

    # ------------------------------------------------------------------ arithmetic
    def partner(self, x: torch.Tensor) -> Pair:
        keep = self.draw(st.integers(0, x.dim()))
        return self.leaf(*[n if self.draw(st.booleans()) else 1 for n in x.shape[keep:]])

    def arithmetic(self, pair: Pair) -> Pair:
        (t, x), (u, y) = pair, self.partner(pair[1])
        name = self.draw(st.sampled_from(("add", "sub", "mul")))
        if self.draw(st.booleans()):
            (t, x), (u, y) = (u, y), (t, x)
        return self.terms.pointwise(name, t, u), getattr(torch, name)(x, y)

    def where(self, pair: Pair) -> Pair:
        t, x = pair
        mask = self.integers(2, *x.shape).bool()
        (u, y) = self.partner(x)
        return self.terms.expand(self.terms.pointwise("where", self.terms.array(mask), t, u), x.shape), torch.where(
            mask, x, y
        )

    def unary(self, pair: Pair) -> Pair:
        t, x = pair
        name = self.draw(st.sampled_from(("tanh", "sigmoid", "relu")))
        return self.terms.pointwise(f"{name}.default", t), getattr(torch, name)(x)

    def sum(self, pair: Pair) -> Pair:
        t, x = pair
        dims = self.draw(st.sets(st.integers(0, max(0, x.dim() - 1)), max_size=2)) if x.dim() else set()
        return (self.terms.sum(t, dims), x.sum(tuple(dims))) if dims else pair

    def einsum(self, pair: Pair) -> Pair:
        """Contract with a second operand, possibly a one-hot mask. Shared labels are summed or kept."""
        t, x = pair
        labels = "abcdefgh"[: x.dim()]
        own_labels = "".join(c for c in labels if self.draw(st.booleans()))
        extra = "z" if self.draw(st.booleans()) else ""
        size = dict(zip(labels, x.shape, strict=True)) | {"z": 2}
        u, y = self.leaf(*[size[c] for c in own_labels + extra])
        out = "".join(
            c for c in self.draw(st.permutations(labels + extra)) if c not in own_labels or self.draw(st.booleans())
        )
        return self.terms.einsum([labels, own_labels + extra], out, [t, u]), torch.einsum(
            f"{labels},{own_labels + extra}->{out}", x, y
        )

    def softmax(self, pair: Pair) -> Pair:
        t, x = pair
        if not x.dim():
            return pair
        dim = self.dim(x)
        if self.draw(st.booleans()):
            return self.terms.axis_op("softmax", [dim], True, (), t), x.softmax(dim)
        return self.terms.axis_op("amax", [dim], False, (), t), x.amax(dim)


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), shape=SHAPES, steps=st.integers(1, 5))
def test_compositions_equal_torch(data, shape, steps):
    builder = Builder(data)
    pair = builder.leaf(*shape)
    for _ in range(steps):
        pair = builder.step(pair)
    check(builder.terms, *pair, builder.values)


@pytest.mark.parametrize(
    "name",
    [
        "reshape",
        "permute",
        "slice",
        "cat",
        "expand",
        "index",
        "index_many",
        "gather",
        "put",
        "put_many",
        "arithmetic",
        "where",
        "unary",
        "sum",
        "einsum",
        "softmax",
    ],
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), shape=SHAPES)
def test_each_op_on_a_parameter(name, data, shape):
    builder = Builder(data)
    pair = getattr(builder, name)(builder.param(*shape))
    if pair[1].numel():
        check(builder.terms, *pair, builder.values)


class TestNormalForm:
    def test_equal_terms_are_one_object(self):
        T = Terms()
        a = T.make("param", ("a",), (2, 3))
        assert T.make("param", ("a",), (2, 3)) is a
        assert T.permute(T.permute(a, (1, 0)), (1, 0)) is a
        assert T.reshape(T.reshape(a, (6,)), (2, 3)) is a
        assert T.slice(a, 0, 0, 2) is a and T.expand(a, (2, 3)) is a and T.sum(a, ()) is a

    def test_a_slice_of_a_slice_is_one_slice(self):
        T = Terms()
        a = T.make("param", ("a",), (12,))
        assert T.slice(T.slice(a, 0, 2, 12, 2), 0, 1, 4, 2) is T.slice(a, 0, 4, 9, 4)

    def test_a_run_of_indices_is_a_slice(self):
        T = Terms()
        a = T.make("param", ("a",), (8, 2))
        assert T.index(a, (0,), torch.tensor([[2, 3, 4]]), 0) is T.slice(a, 0, 2, 5)

    def test_a_slice_of_joined_tensors_is_one_of_them(self):
        T = Terms()
        a, b = T.make("param", ("a",), (3, 2)), T.make("param", ("b",), (2, 2))
        joined = T.cat([a, b], 0)
        assert T.slice(joined, 0, 0, 3) is a and T.slice(joined, 0, 3, 5) is b
        assert T.pick(joined, 0, 4) is T.pick(b, 0, 1)

    @pytest.mark.parametrize("name", ["mul", "div"])
    def test_an_operation_on_zero_is_zero(self, name):
        T = Terms()
        a, zero = T.make("param", ("a",), (3,)), T.const(0, (3,))
        assert is_const(T.pointwise(name, zero, a), 0)

    def test_neutral_elements_fold(self):
        T = Terms()
        a = T.make("param", ("a",), (3,))
        assert (
            T.pointwise("add", a, T.const(0)) is a
            and T.pointwise("mul", T.const(1), a) is a
            and T.pointwise("div", a, T.const(1)) is a
        )
        assert T.pointwise("sub", a, T.const(0, (3,))) is a
        assert T.pointwise("sub", T.const(0, (3,)), a) is not a
        assert T.pointwise("add", a, T.const(0, (2, 3))).shape == (2, 3)

    def test_where_folds_to_its_branch(self):
        T = Terms()
        a, b = T.make("param", ("a",), (3,)), T.make("param", ("b",), (3,))
        assert T.pointwise("where", T.const(1), a, b) is a and T.pointwise("where", T.const(0), a, b) is b

    def test_constants_are_computed(self):
        T = Terms()
        assert is_const(T.pointwise("exp.default", T.const(0, (2,))), 1)
        assert T.pointwise("mul", T.array(torch.tensor([1.0, 2.0])), T.const(3)).op == "array"
        assert is_const(T.array(torch.full((2, 2), 5)), 5)

    def test_nan_is_one_constant(self):
        T = Terms()
        assert T.const(math.nan, (2,)) is T.const(math.nan, (2,))
        assert T.array(torch.full((2,), math.nan)) is T.const(math.nan, (2,))

    def test_one_hot_contraction_is_the_row(self):
        T = Terms()
        w = T.make("param", ("w",), (3, 4))
        rows = T.einsum(["te", "ed"], "td", [T.array(torch.eye(3)[[2, 0]]), w])
        assert T.resolve(T.pick(rows, 0, 0)) is T.pick(w, 0, 2) and T.resolve(T.pick(rows, 0, 1)) is T.pick(w, 0, 0)

    def test_masked_sum_over_experts_is_one_summand(self):
        T = Terms()
        y, mask = T.make("param", ("y",), (2, 3, 4)), T.array(torch.tensor([[0.0, 1, 0], [1, 0, 1]]))
        out = T.sum(T.pointwise("mul", y, T.reshape(mask, (2, 3, 1))), [1])
        assert T.resolve(T.pick(out, 0, 0)) is T.pick_axes(y, {0: 0, 1: 1})
        assert T.resolve(T.pick(out, 0, 1)).args[0] == "add"

    def test_masked_softmax_entry_is_zero(self):
        T = Terms()
        scores = T.make("param", ("s",), (2, 3))
        masked = T.pointwise("where", T.array(torch.tensor([[1, 0, 1], [1, 1, 0]])), scores, T.const(-math.inf))
        weights = T.axis_op("softmax", [1], True, (), masked)
        assert is_const(T.pick_axes(weights, {0: 0, 1: 1}), 0) and not is_const(T.pick_axes(weights, {0: 0, 1: 0}))

    def test_repeated_detaches_are_merged_and_casts_are_not(self):
        T = Terms()
        a = T.make("param", ("a",), (3,))
        once = T.pointwise("detach", a)
        assert (
            T.pointwise("detach", once) is once
            and is_pointwise_term(once, "detach")
            and not is_pointwise_term(a, "detach")
        )
        assert T.pointwise("cast", T.const(2), dtype="float32") is T.const(2)
        assert T.pointwise("cast", a, dtype="float32") is not T.pointwise("cast", a, dtype="bfloat16")

    def test_rows_that_are_overwritten_at_once_are_distinguished(self):
        """Distinguish rows that one op writes to the same position: gradients reach all of them, not only the last."""
        T = Terms()
        base, new = T.make("param", ("b",), (3, 2)), T.make("param", ("n",), (2, 2))
        out = T.index_put(base, (0,), torch.tensor([[1, 1]]), new, False)
        both = T.pick(new, 0, 0), T.pick(new, 0, 1)
        assert T.pick(out, 0, 1) is T.pointwise(OVERWRITTEN, *both) and T.pick(out, 0, 0) is T.pick(base, 0, 0)
        again = T.index_put(
            T.index_put(base, (0,), torch.tensor([[1]]), new, False), (0,), torch.tensor([[1]]), both[1], False
        )
        assert T.pick(again, 0, 1) is both[1]

    def test_long_chain_of_adds_does_not_recurse(self):
        T = Terms()
        out = T.const(0, (4, 2))
        for e in range(3000):
            out = T.index_put(out, (0,), torch.tensor([[e % 4]]), T.make("param", (f"e{e}",), (1, 2)), True)
        assert format_term(T.pick(out, 0, 3), 1).startswith("add(")

    def test_columns_of_several_slots(self):
        """Split a product with the gathered weights of all slots into one product per slot."""
        T = Terms()
        x, w = T.make("param", ("x",), (4, 3)), T.make("param", ("w",), (5, 3, 2))
        chosen = torch.tensor([[[0, 3], [4, 1], [2, 2], [1, 0]]])  # [1, T, K]
        gathered = T.index(w, (0,), chosen, 0)  # [T, K, 3, 2]
        for order, sizes in (((0, 2, 1, 3), (2, 2)), ((0, 2, 3, 1), (2, 2))):
            wide = T.reshape(T.permute(gathered, order), (4, 3, 4))
            for act in (
                lambda t: t,
                lambda t: T.pointwise("relu.default", T.pointwise("add", t, T.make("param", ("b",), (1,)))),
            ):
                h = T.reshape(act(T.einsum(("nd", "ndm"), "nm", (x, wide))), (4, *sizes))
                for t, k in ((0, 1), (1, 0), (2, 1)):
                    slot = 1 if order[2] == 1 else 2
                    found = T.pick(T.pick(h, 0, t), slot - 1, k)
                    expert = T.pick(w, 0, int(chosen[0, t, k]))
                    assert found is act(T.einsum(("d", "df"), "f", (T.pick(x, 0, t), expert)))

    def test_too_many_picks_raise(self):
        T = Terms(max_picks=3)
        a = T.make("param", ("a",), (9,))
        with pytest.raises(TooLarge):
            for i in range(9):
                T.pick(a, 0, i)

    def test_terms_print_shortened(self):
        T = Terms()
        a = T.make("param", ("gate.weight",), (3,))
        assert repr(T.pointwise("mul", a, T.const(2.5))) == "mul(gate.weight, 2.5)"
        assert "..." in format_term(T.pointwise("exp.default", T.pointwise("exp.default", a)), 1)
        assert "row" not in format_term(T.axis_op("softmax", [0], True, (), a))

    def test_evaluator_agrees_with_itself(self):
        T = Terms()
        assert evaluate(T.make("param", ("a",), (2,)), {"a": torch.ones(2)}).tolist() == [1.0, 1.0]
