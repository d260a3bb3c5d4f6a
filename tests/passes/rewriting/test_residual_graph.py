"""The user's code around the experts: sizes, constants, and refusals."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import moefx
from moefx.errors import Refused

from ...blocks import D, E, Loop, rewritten


def check_sizes(block: nn.Module, *shapes: tuple[int, ...]) -> None:
    """Check that one program equals the original at every size, and that the original never runs."""
    torch.manual_seed(0)
    model = nn.Sequential(block).double()
    compiled = moefx.compile(model, example_inputs=(torch.randn(shapes[0], dtype=torch.float64),))
    for shape in shapes:
        x = torch.randn(shape, dtype=torch.float64)
        found, expected = compiled(x), model(x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert moefx.blocks(compiled)[0].fallbacks == 0


class Averaged(Loop):
    """Compute numbers from the size in several ways."""

    def forward(self, x):
        n = x.shape[0]
        out = super().forward(x)
        place = torch.arange(n, dtype=x.dtype) / (2 * n + 3)
        return out / n + place[:, None] + torch.full((n, 1), n // 2, dtype=x.dtype)


class Sequences(Loop):
    """Split batch and sequence, and return a result for each, and Python numbers."""

    def forward(self, x):
        batch, length, dim = x.shape
        out = super().forward(x.reshape(batch * length, dim)).view(batch, length, dim)
        load = torch.zeros(E, dtype=x.dtype).index_add(
            0, self.route(x.reshape(-1, dim))[1].flatten(), torch.ones(batch * length * self.k, dtype=x.dtype)
        )
        return out, load / (batch * length), batch * length, {"pairs": (length, None, 2.5)}


class Constants(Loop):
    """Create tensors from Python numbers in forward."""

    def forward(self, x):
        tilt = torch.tensor([0.5, -0.25, 0.125, 1.0, 2.0, -1.0], dtype=x.dtype)
        return super().forward(x) * tilt + torch.tensor(3.0, dtype=x.dtype)


def test_numbers_computed_from_the_size():
    check_sizes(Averaged(), *((n, D) for n in (5, 1, 12, 31)))


def test_several_results_and_python_numbers():
    check_sizes(Sequences(), (2, 5, D), (1, 1, D), (3, 4, D), (5, 7, D))


def test_tensors_that_a_forward_makes_are_in_the_residual():
    check_sizes(Constants(), *((n, D) for n in (5, 1, 12)))


class Lists(Loop):
    """Compute one value outside the experts per selected expert."""

    def forward(self, x):
        hit = self.route(x)[1].unique().tolist()
        return super().forward(x), torch.stack([x.mean() * e for e in hit]).sum()


class Chosen(Loop):
    """Select a parameter by the first token's expert."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(E))

    def forward(self, x):
        return super().forward(x) * self.scales[int(self.route(x)[1][0, 0])]


class TestRefused:
    def refusal(self, block: nn.Module, reason: str) -> None:
        with pytest.raises(Refused, match=reason):
            rewritten(block)

    def test_a_value_from_inside_the_experts(self):
        """Refuse rows of single experts outside the mixture: they do not exist after the rewrite."""

        class Leaks(Loop):
            def forward(self, x):
                w, ids = self.route(x)
                out, norm = torch.zeros_like(x), x.new_zeros(())
                for e in range(E):
                    t, k = torch.where(ids == e)
                    y = self.expert(e, x[t], w[t, k, None])
                    norm = norm + y.square().sum()
                    out = out.index_add(0, t, y)
                return out, norm

        self.refusal(Leaks(), "the experts' results do not come together in one tensor")

    def test_a_number_that_depends_on_the_routing(self):
        class Counted(Loop):
            def forward(self, x):
                busiest = int(self.route(x)[1].flatten().bincount(minlength=E).max())
                return super().forward(x) * busiest

        self.refusal(Counted(), "a number depends on the routing")

    def test_a_branch_on_activations_is_named(self):
        class Halved(Loop):
            def forward(self, x):
                out = super().forward(x)
                return out / 2 if out.abs().max() > 30 else out

        self.refusal(Halved(), "a value that Python reads from a tensor: return out / 2 if out.abs")

    def test_a_branch_on_a_buffer_is_named(self):
        class Warm(Loop):
            def __init__(self):
                super().__init__()
                self.register_buffer("step", torch.zeros((), dtype=torch.long))

            def route(self, x):
                return super().route(x * 0 if self.step < 100 else x)

        self.refusal(Warm(), "code outside the experts depends on the buffer step: return super")

    def test_list_length_that_depends_on_the_routing_is_refused(self):
        self.refusal(Lists(), "code outside the experts depends on the routing")


class TestSources:
    """Refusals name the user's line."""

    def test_a_list_of_another_length(self):
        with pytest.raises(Refused, match="different number of arguments") as refusal:
            rewritten(Lists())
        assert refusal.value.source.startswith("test_residual_graph.py:")

    def test_a_parameter_by_routing(self):
        with pytest.raises(Refused, match=r"different parameters are used under .* routings \[scales\.") as refusal:
            rewritten(Chosen())
        assert refusal.value.source.startswith("test_residual_graph.py:")


class Counting(Loop):
    """Return the token counts of experts as a Python list, like labml's Switch layer."""

    def forward(self, x):
        w, ids = self.route(x)
        rows = [torch.where(ids == e) for e in range(E)]
        counts, out = x.new_tensor([len(t) for t, _ in rows]), torch.zeros_like(x)
        for e, (t, k) in enumerate(rows):
            out = out.index_add(0, t, self.expert(e, x[t], w[t, k, None]))
        return out, counts


class Entropy(Loop):
    """Compute floats from the number of tokens."""

    def forward(self, x):
        scores = self.gate(x).log_softmax(-1).logsumexp(0) - math.log(x.shape[0])
        return super().forward(x), scores, scores - x.shape[0] * self.k / E


class Updated(Loop):
    """Update a bias through `.data`, as DeepSeek-V3 does."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(E), requires_grad=False)

    def route(self, x):
        scores = self.gate(x).sigmoid()
        ids = (scores + self.bias).topk(self.k, -1).indices
        self.bias.data -= 0.01 * (torch.bincount(ids.flatten(), minlength=E) - ids.numel() / E).sign()
        return scores.gather(-1, ids), ids


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [Counting, Entropy, Updated])
def test_values_computed_from_sizes_and_counts(block):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = block()

        def forward(self, x):
            return self.moe(x)

    torch.manual_seed(0)
    original = Both().double()
    compiled = moefx.compile(copy.deepcopy(original), example_inputs=(torch.randn(9, D).double(),))
    for tokens in (9, 1, 50):
        x = torch.randn(tokens, D).double()
        torch.testing.assert_close(compiled(x), original(x), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(dict(compiled.state_dict()), dict(original.state_dict()))
    assert moefx.blocks(compiled)[0].fallbacks == 0
