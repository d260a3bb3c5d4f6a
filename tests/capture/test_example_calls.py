"""Example inputs: from the caller, from the model, or guessed."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

from moefx.capture.search.example_calls import find_example_calls
from moefx.errors import InvalidInput


def read_example(model, example_inputs):
    return find_example_calls(model, example_inputs)[0]


class Model(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x, mask=None):
        return self.layers(x)


class TestGiven:
    def test_examples_may_be_tensors_sequences_or_mappings(self):
        model, x = Model(nn.Linear(4, 4)), torch.zeros(3, 4)
        assert read_example(model, x) == ((x,), {})
        assert read_example(model, (x, None)) == ((x, None), {})
        assert read_example(model, [x]) == ((x,), {})
        assert read_example(model, {"x": x}) == ((), {"x": x})
        assert read_example(model, UserDict(x=x)) == ((), {"x": x})

    @pytest.mark.parametrize("wrong", [(), (1, 2, 3), {"y": 1}, {"x": 1, "z": 2}])
    def test_examples_that_do_not_fit_the_forward_are_refused(self, wrong):
        with pytest.raises(InvalidInput, match=r"example_inputs do not fit Model\.forward: "):
            read_example(Model(nn.Linear(4, 4)), wrong)

    @pytest.mark.parametrize("wrong", [3, "ids", 2.5])
    def test_other_types_of_examples_are_refused(self, wrong):
        with pytest.raises(
            InvalidInput,
            match=f"example_inputs is a {type(wrong).__name__}; expected a tuple, a dict or a tensor",
        ):
            read_example(Model(nn.Linear(4, 4)), wrong)


class TestDummies:
    def test_a_model_may_bring_its_own_example(self):
        class Own(Model):
            dummy_inputs = {"x": torch.ones(1, 4)}  # noqa: RUF012

        args, kwargs = read_example(Own(nn.Linear(4, 4)), None)
        assert args == () and set(kwargs) == {"x"}

    def test_dummy_inputs_are_called_without_a_cache(self):
        class Own(nn.Module):
            dummy_inputs = {"x": torch.ones(1, 4)}  # noqa: RUF012

            def forward(self, x, use_cache=True):
                return x

        assert read_example(Own(), None)[1]["use_cache"] is False
        assert "use_cache" not in Own.dummy_inputs


class TestGuessed:
    def test_token_ids_for_an_embedding(self):
        (ids,), kwargs = read_example(Model(nn.Embedding(5, 4), nn.Linear(4, 4)), None)
        assert ids.dtype == torch.int64 and ids.dim() == 2 and ids.max() < 5 and kwargs == {}

    def test_hidden_states_for_a_linear(self):
        (x,), _ = read_example(Model(nn.Linear(6, 4).bfloat16()), None)
        assert x.is_meta and x.shape[-1] == 6 and x.dtype == torch.bfloat16 and x.dim() == 3

    def test_a_vector_of_weights(self):
        assert read_example(Model(nn.LayerNorm(6)), None)[0][0].shape[-1] == 6

    @pytest.mark.parametrize("model", [Model(), nn.Identity()])
    def test_model_without_parameters_needs_inputs(self, model):
        with pytest.raises(
            InvalidInput, match=r"no parameters or no arguments to guess .*; pass example_inputs=\(\.\.\.\)"
        ):
            read_example(model, None)

    def test_rows_too_and_other_widths(self):
        shapes = [tuple(args[0].shape) for args, _ in find_example_calls(Model(nn.Linear(6, 4)), None)]
        assert {(2, 7, 6), (14, 6), (2, 7, 4), (14, 4)} == set(shapes) and shapes[0] == (2, 7, 6)
