"""Public functions: errors, modes, copies and unusual inputs of a compiled model."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import moefx
from moefx import Plan
from moefx.errors import CaptureError, InvalidInput, InvalidPlan, MoefxError, NoMoEBlockFound, NoSuchPass

from .blocks import D, E, K, Loop, Mlp


class Model(nn.Module):
    def __init__(self, moe: nn.Module | None = None):
        super().__init__()
        self.inp, self.moe = nn.Linear(D, D), moe if moe is not None else Loop()

    def forward(self, x):
        h = self.inp(x)
        return h + self.moe(h.reshape(-1, D)).view_as(h)


EXAMPLE = (torch.randn(5, D, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def compiled(reference) -> nn.Module:
    return moefx.compile(reference, example_inputs=EXAMPLE)


def assert_same_results(compiled: nn.Module, reference: nn.Module, x: torch.Tensor, **tolerance: float) -> None:
    before = moefx.blocks(compiled)[0].fallbacks
    torch.testing.assert_close(compiled(x), reference(x), equal_nan=True, **tolerance)
    assert moefx.blocks(compiled)[0].fallbacks == before


class TestErrors:
    def test_a_model_without_a_block_is_refused(self):
        with pytest.raises(NoMoEBlockFound, match=r"no MoE block was found in Mlp: no list of equal submodules"):
            moefx.compile(Mlp(), example_inputs=EXAMPLE)

    def test_not_strict_returns_the_model(self):
        model = Mlp()
        assert moefx.compile(model, example_inputs=EXAMPLE, strict=False) is model

    def test_another_plan_for_an_unchanged_model_is_considered(self):
        model = Mlp()
        assert moefx.compile(model, example_inputs=EXAMPLE, strict=False) is model
        assert moefx.explain(model).seconds == moefx.explain(model).seconds  # the record of that call
        with pytest.raises(InvalidPlan, match=r"Plan\(chunks=2\) has no effect"):
            moefx.explain(model, plan=Plan(chunks=2))

    @pytest.mark.parametrize("wrong", [(), {"y": 1}, 3, "x"])
    def test_wrong_example_inputs_are_refused(self, reference, wrong):
        with pytest.raises(InvalidInput):
            moefx.compile(reference, example_inputs=wrong)

    def test_a_failing_forward_raises_invalid_input(self, reference):
        with pytest.raises(CaptureError, match=r"Model does not run on the example inputs: .*Pass example_inputs"):
            moefx.compile(reference, example_inputs=(torch.zeros(5, D + 1),))

    @pytest.mark.parametrize("plan", ["fast", 3, {"fuse": False}])
    def test_a_plan_of_another_type_is_refused(self, reference, plan):
        with pytest.raises(InvalidPlan, match=r"expected a moefx\.Plan"):
            moefx.compile(reference, plan=plan)

    def test_a_mesh_of_another_type_is_refused(self, reference):
        with pytest.raises(InvalidPlan, match=r"mesh is a object; expected a torch\.distributed\.DeviceMesh"):
            moefx.compile(reference, mesh=object())

    def test_unknown_names_are_refused_with_the_known_ones(self, compiled):
        with pytest.raises(MoefxError, match="no rewritten block 'mo'; there is 'moe'"):
            moefx.graph(compiled, "mo")
        with pytest.raises(NoSuchPass, match="no pass 'nothing' ran on moe; there is rewrite_block"):
            moefx.graph(compiled, "moe", after="nothing")
        with pytest.raises(MoefxError, match=r"pass the result of moefx\.compile"):
            moefx.history(Mlp(), "moe")

    @pytest.mark.parametrize("model", [Mlp, len, "moe"], ids=["class", "function", "text"])
    def test_a_model_that_is_no_module_is_refused(self, model):
        for call in (moefx.compile, moefx.explain):
            with pytest.raises(InvalidInput, match=r"an instance of nn\.Module"):
                call(model)

    @pytest.mark.parametrize(
        ("plan", "text"),
        [
            ("fast", r"plan is 'fast'; expected a moefx\.Plan, 'auto' or None"),
            (Plan(disable=("fus",)), "no pass 'fus'; there is fuse, checkpoint"),
        ],
        ids=["text", "disable"],
    )
    def test_other_objects_than_plans_are_refused(self, plan, text):
        for call in (moefx.compile, moefx.explain):
            with pytest.raises(InvalidPlan, match=text):
                call(Mlp(), example_inputs=EXAMPLE, plan=plan)

    @pytest.mark.parametrize(
        "fields",
        [
            *('{"fuse": "no"}', '{"disable": "fuse"}', '{"chk": 1}', "[1]", "{"),
            *('{"tokens": 0}', '{"tokens": 1.5}', '{"memory": -1}', '{"memory": "8 GB"}', '{"zero": 4}'),
        ],
    )
    def test_invalid_fields_raise(self, fields):
        with pytest.raises(InvalidPlan):
            Plan.from_json(fields)

    def test_fields_of_the_planner(self):
        plan = Plan(expert_axis="auto", checkpoint="auto", tokens=8192, memory=64e9, zero=3)
        assert Plan.from_json(plan.to_json()) == plan and plan.is_undecided
        assert Plan(expert_axis="auto").is_undecided and not Plan(tokens=8192, memory=2**36).is_undecided

    def test_functions_accept_results_of_torch_compile(self, compiled):
        wrapped = torch.compile(compiled)
        assert str(moefx.graph(wrapped, "moe")) == str(moefx.graph(compiled, "moe"))
        assert moefx.explain(wrapped).matched and moefx.blocks(wrapped)

    def test_explain_lists_later_specializations(self, reference):
        compiled = moefx.compile(copy.deepcopy(reference), example_inputs=EXAMPLE)
        assert moefx.explain(compiled).matched[0].also_for == ()
        compiled.eval()(torch.randn(2, 5, D))  # the block does not depend on the mode
        assert moefx.explain(compiled).matched[0].also_for == ()
        compiled.double()(torch.randn(2, 5, D, dtype=torch.float64))
        (also,) = moefx.explain(compiled).matched[0].also_for
        assert (
            also.startswith("any mode") and "float64" in also and f"also for    {also}" in str(moefx.explain(compiled))
        )


def test_forward_mode_derivatives_are_the_originals(reference):
    compiled = moefx.compile(reference, example_inputs=EXAMPLE)
    x, tangent = torch.randn(2, 5, D), torch.randn(2, 5, D)
    expected, found = (torch.func.jvp(model, (x,), (tangent,))[1] for model in (reference, compiled))
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected)


class TestInspection:
    def test_explain_before_and_after(self, reference, compiled):
        (before,), (after,) = (
            moefx.explain(reference, example_inputs=EXAMPLE).matched,
            moefx.explain(compiled).matched,
        )
        assert (before.name, before.num_experts, before.top_k) == ("moe", E, K)
        assert after.expert == before.expert and after.validation == before.validation
        assert after.validation.startswith("agrees in")
        assert "1 MoE block(s) rewritten, 0 refused" in str(moefx.explain(compiled))

    def test_graph_after_a_pass(self, compiled):
        assert "expert_mlp" in str(moefx.graph(compiled, "moe"))
        assert "expert_mlp" not in str(moefx.graph(compiled, "moe", after="rewrite_block"))

    def test_loads_are_recorded_on_demand(self, reference):
        compiled = moefx.compile(reference, example_inputs=EXAMPLE)
        (block,) = moefx.blocks(compiled)
        with pytest.raises(MoefxError, match="routing statistics of moe are off"):
            block.load()
        block.record_load()
        compiled(torch.randn(9, D))
        assert block.load().shape == (E,) and block.load().sum() == 9 * K


class TestStays:
    def test_class_parameters_and_state_dict_are_unchanged(self, reference, compiled):
        assert type(compiled) is Model and list(compiled.state_dict()) == list(reference.state_dict())
        assert all(a is b for a, b in zip(compiled.parameters(), reference.parameters(), strict=True))
        assert compiled is not reference and "forward" not in vars(reference.moe)

    @pytest.mark.parametrize(
        "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
    )
    def test_a_copy_runs_rewritten_with_its_own_weights(self, compiled, again):
        twin = again(compiled)
        with torch.no_grad():
            for expert in twin.moe.experts:
                expert.up.weight.mul_(2.0)
        x = torch.randn(9, D)
        assert not torch.equal(twin(x), compiled(x))
        assert moefx.blocks(twin)[0].fallbacks == 0

    def test_optimizer_made_before_trains(self):
        torch.manual_seed(1)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = moefx.compile(model, example_inputs=EXAMPLE)
        before = model.moe.experts[0].up.weight.detach().clone()
        x = torch.randn(40, D)
        first = compiled(x).square().mean()
        first.backward()
        optimizer.step()
        assert not torch.equal(model.moe.experts[0].up.weight, before)
        assert compiled(x).square().mean() < first
        assert_same_results(compiled, model, x)


class TestFound:
    """Errors that reviews found."""

    def test_a_module_under_two_names_is_unchanged(self):
        model = Model()
        model.moe.experts[1] = model.moe.experts[0]
        model.moe.experts[2].up.weight = model.moe.experts[0].up.weight
        before = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
        moefx.explain(model, example_inputs=EXAMPLE)
        assert [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)] == before

    def test_an_expert_without_tokens_in_captures_is_kept(self):
        """Route whole sequences: a few sequences select only some of the experts."""

        class Sentences(Loop):
            def route(self, x):
                w, ids = self.gate(x.mean(1)).softmax(-1).topk(2, -1)
                return w.repeat_interleave(x.shape[1], 0), ids.repeat_interleave(x.shape[1], 0)

            def forward(self, x):
                w, ids = self.route(x)
                t = x.flatten(0, 1)
                out = torch.zeros_like(t)
                for e, expert in enumerate(self.experts):
                    n, k = torch.where(ids == e)
                    out = out.index_add(0, n, expert(t[n]) * w[n, k, None])
                return out.view_as(x)

        model = nn.Sequential(Sentences())
        compiled = moefx.compile(model, example_inputs=(torch.randn(2, 3, D),), plan=moefx.Plan(validation="symbolic"))
        x = torch.randn(64, 3, D)
        torch.testing.assert_close(compiled(x), model(x))


class TestCalls:
    @pytest.mark.parametrize("shape", [(1, D), (0, D), (2, 0, D), (33, D)])
    def test_calls_of_other_sizes_equal_the_original(self, compiled, reference, shape):
        assert_same_results(compiled, reference, torch.randn(shape))

    def test_strided_inputs_give_the_original_results(self, compiled, reference):
        assert_same_results(compiled, reference, torch.randn(D, 9).t())
        assert_same_results(compiled, reference, torch.randn(18, 2 * D)[::2, ::2])

    def test_nan_inputs_equal_the_original(self, compiled, reference):
        x = torch.randn(9, D)
        x[3] = math.nan
        good = [t for t in range(9) if t != 3]
        torch.testing.assert_close(compiled(x)[good], reference(x)[good])
        assert compiled(x)[3].isnan().any()

    def test_a_call_without_gradients_equals_the_original(self, compiled, reference):
        with torch.no_grad():
            assert_same_results(compiled, reference, torch.randn(9, D))

    def test_eval_mode_runs_rewritten(self, reference):
        compiled = moefx.compile(reference, example_inputs=EXAMPLE).eval()
        assert_same_results(compiled, reference, torch.randn(9, D))
        assert moefx.blocks(compiled)[0].fallbacks == 0

    def test_another_dtype_equals_the_original(self):
        model = Model()
        compiled = moefx.compile(model, example_inputs=EXAMPLE)
        assert_same_results(compiled.double(), model.double(), torch.randn(9, D, dtype=torch.float64))

    @pytest.mark.sampled(6)
    @pytest.mark.parametrize(
        ("long", "is_seen"),
        [
            (lambda n: 0.5 * n > 100, True),
            (lambda n: n / 2 > 100.0, True),
            (lambda n: n**2 > 40_000, True),
            (lambda n: n >> 1 > 100, True),
            (lambda n: int(n / 2) > 100, False),
            (lambda n: math.sqrt(n) > 14.2, False),
            (lambda n: max(int(0.5 * n), 8) > 100, False),
        ],
        ids=["float_times", "swapped", "pow", "shift", "int", "sqrt", "max"],
    )
    def test_branch_on_a_computed_size(self, long, is_seen):
        """Build two programs for a comparison of a traced size; run the original if Python computed the number."""

        class Long(Loop):
            def forward(self, x):
                out = super().forward(x)
                return out * 2 if long(x.shape[0]) else out

        model = Model(Long())
        compiled = moefx.compile(model, example_inputs=EXAMPLE)
        for n in (30, 199, 200, 201, 202, 203, 300):
            x = torch.randn(n, D)
            torch.testing.assert_close(compiled(x), model(x))
        (block,) = moefx.blocks(compiled)
        if is_seen:
            assert block.fallbacks == 0 and len(block.forward.programs) == 2
        else:
            assert 3 <= block.fallbacks <= 5 and len(block.forward.programs) == 1


def test_completion_shows_the_public_names_and_no_others():
    assert [name for name in dir(moefx) if not name.startswith("_")] == sorted(set(moefx.__all__))
    assert all(getattr(moefx, name) is not None for name in dir(moefx))
