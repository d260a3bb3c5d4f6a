"""Each refusal has a cause, which selects the next attempt of a proof."""

from __future__ import annotations

import traceback
import types

import pytest
import torch
from torch import nn

import moefx
from moefx.capture.arguments.argument_interpretations import interpret_arguments
from moefx.capture.arguments.size_collisions import ModelNumbers
from moefx.capture.search.skipped_calls import SkipPlan
from moefx.capture.sizes.size_guards import SizeGuard
from moefx.capture.sizes.symbolic_sizes import NumberNotTaken
from moefx.capture.state.outside_state import ARGUMENT
from moefx.compiler import proof_attempts
from moefx.compiler.block_compiler import rewrite_with_objects
from moefx.compiler.proof_attempts import Failure, prove_and_rewrite
from moefx.errors import CaptureError, Cause, Refused
from moefx.frontends.dynamo.backend import backend
from moefx.matching.lift.lift_options import LiftOptions
from moefx.matching.proof.proof_state import ProofState
from moefx.passes.rewrite import Placeholders
from moefx.util.user_code import PACKAGE_DIR

from ..blocks import Block, D, E, Loop, Mlp, rewritten


def return_norm(b, x):
    w, ids = b.route(x)
    out, norm = torch.zeros_like(x), x.new_zeros(())
    for e in range(E):
        t, k = torch.where(ids == e)
        y = b.expert(e, x[t], w[t, k, None])
        norm = norm + y.square().sum()
        out = out.index_add(0, t, y)
    return out, norm


def take_neighbours_expert(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1)
    ids = ids[:, 0].tolist()
    return torch.stack([b.experts[ids[t - 1] if t % 5 == 4 else e](x[t]) * w[t] for t, e in enumerate(ids)])


def add_first_row(b, x):
    w, ids = b.route(x)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t, b.expert(e, x[t] + x[:1], w[t, k, None]))
    return out


def sum_experts(b, x, w, ids):
    gates = torch.zeros(len(x), E).scatter(-1, ids, w)
    return sum(gates[:, e, None] * b.experts[e](x) for e in range(E))


def select_top_experts(b, x):
    return sum_experts(b, x, *b.route(x))


def select_largest_and_furthest(b, x):
    scores = b.gate(x)
    ids = torch.stack([scores.argmax(-1), scores.square().argmax(-1)], -1)
    return sum_experts(b, x, scores.softmax(-1).gather(-1, ids), ids)


def keep_last_rows(b, x):
    w, ids = b.gate(x).softmax(-1).topk(1)
    out = torch.zeros_like(x)
    for e in range(E):
        t, k = torch.where(ids == e)
        out = out.index_add(0, t[-3:], b.expert(e, x[t[-3:]], w[t[-3:], k[-3:], None]))
    return out


class Series(nn.Module):
    """Each sample of [B, L, C] selects experts for its whole series."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(12, E), nn.ModuleList(nn.Linear(12, 12) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.mean(-1)).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b = torch.where(ids[:, 0] == e)[0]
            out = out.index_add(0, b, expert(x[b].transpose(1, 2)).transpose(1, 2) * w[b, :, None])
        return out


class Pixels(nn.Module):
    """Each pixel of an image selects convolutions."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, E), nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(E))

    def forward(self, x):
        w, ids = self.gate(x.movedim(1, -1)).softmax(-1).topk(2)
        gates = torch.zeros(*ids.shape[:-1], E).scatter(-1, ids, w).movedim(-1, 1)
        return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(self.experts))


BLOCKS = {
    Cause.NOT_ROUTED: (Mlp, (5, D)),
    Cause.NOT_TOGETHER: (lambda: Block(return_norm), (5, D)),
    Cause.UNEXPLAINED_INDEX: (lambda: Block(take_neighbours_expert), (29, D)),
    Cause.FOREIGN_ROW: (lambda: Block(add_first_row), (40, D)),
    Cause.SINGLE_ELEMENTS: (lambda: Loop(lambda: Mlp(lambda h: h.sort(-1).values)), (40, D)),
    Cause.REPEATED_CHOICE: (lambda: Block(select_largest_and_furthest), (40, D)),
    Cause.UNEXPLAINED_DROPS: (lambda: Block(keep_last_rows), (40, D)),
    Cause.MIXED_POSITIONS: (Series, (9, 12, 4)),
    Cause.CONVOLUTIONS: (Pixels, (2, 4, 32, 32)),
}


@pytest.mark.parametrize("cause", BLOCKS, ids=lambda cause: cause.name)
def test_a_refused_block_has_the_cause(cause):
    make, shape = BLOCKS[cause]
    with pytest.raises(Refused) as raised:
        rewritten(make(), torch.zeros(shape))
    assert raised.value.cause is cause, raised.value
    assert cause.name not in str(raised.value)


def test_guards_without_a_size_are_refused():
    block, x = Loop(Mlp), torch.zeros(5, D)
    arguments = next(iter(interpret_arguments((x,), {}, ModelNumbers.of(block))))
    state = ProofState(block, arguments, size_restrictions=(SizeGuard(next(iter(arguments.sizes)), "lt", "1", True),))
    with pytest.raises(Refused) as raised:
        state.size_choice.choose(64, 0)
    assert raised.value.cause is Cause.NO_SIZES


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_graph_of_one_token_or_none_is_refused(tokens):
    torch._dynamo.reset()
    block = Block(select_top_experts)
    compiled = torch.compile(block, backend=backend, options={"backend": "eager"}, dynamic=False)
    compiled(torch.randn(tokens, D))
    refused = moefx.explain(compiled).refused
    assert [r.cause for r in refused] == [Cause.FEW_TOKENS]
    assert "cause" not in repr(refused[0]) and "FEW_TOKENS" not in moefx.explain(compiled).to_json()


def test_every_cause_has_a_program():
    assert {*BLOCKS, Cause.NO_SIZES, Cause.FEW_TOKENS, Cause.OTHER} == {*Cause}
    assert Refused("it counts to three").cause is Cause.OTHER


def raise_error(error):
    raise error


def make_bug():
    """Return a failing function whose file belongs to moefx."""
    found = {}
    exec(compile("def fail(*args): assert not args", f"{PACKAGE_DIR}/bug.py", "exec"), found)
    return found["fail"]


def prove(monkeypatch, outcomes, *tensors):
    """Run the loop with a prover that returns `outcomes` in order. Return its result or error, and the attempts."""
    ran = []

    def run_attempt(block, attempt, max_experts, names):
        ran.append(attempt)
        return outcomes[len(ran) - 1]

    monkeypatch.setattr(proof_attempts, "run_attempt", run_attempt)
    monkeypatch.setattr(proof_attempts, "list_other_options", lambda state: iter(state.options))
    log, result = [], None
    try:
        result = prove_and_rewrite(Loop(Mlp), tensors or (torch.zeros(5, D),), {}, Placeholders([], {}), log)
    except Exception as error:
        result = error
    assert [run.name for run in log] == [attempt.name for attempt in ran]
    assert [bool(run.failure) for run in log] == [isinstance(outcome, Failure) for outcome in outcomes[: len(ran)]]
    return result, ran


def fail(error, restrictions=(), options=(), failed=()):
    evidence = types.SimpleNamespace(list_comparisons_unlike=lambda sizes: restrictions)
    state = types.SimpleNamespace(evidence=evidence, arguments=types.SimpleNamespace(sizes={}), options=options)
    return Failure(error, state, failed)


def catch(function, *args):
    """Return the error that a function raises, with its traceback."""
    with pytest.raises(Exception) as raised:
        function(*args)
    return raised.value


PROOF = object()
RESTRICTIONS = (SizeGuard("S", "lt", "32", True),)
OPTIONS = [("one", LiftOptions(keeps_comparisons=True)), ("two", LiftOptions(cut_preference="last_node"))]
NO, OTHER = Refused("no"), Refused("other")
ASSERTION = catch(raise_error, AssertionError("no"))
FAILING_OP = RuntimeError("no")  # without a frame of the program
BATCH_OF_ONE = torch.zeros(1, 5, D), torch.zeros(1, D)


def test_a_proof_ends_the_attempts(monkeypatch):
    result, ran = prove(monkeypatch, [PROOF])
    assert result is PROOF and [attempt.name for attempt in ran] == [f"[S, {D}]"]


@pytest.mark.parametrize("error", [NO, ASSERTION], ids=str)
def test_the_examples_side_follows_a_failure(monkeypatch, error):
    result, ran = prove(monkeypatch, [fail(error, RESTRICTIONS), PROOF])
    assert result is PROOF and [attempt.size_restrictions for attempt in ran] == [(), RESTRICTIONS]
    assert ran[1].name == f"[S, {D}], S < 32"


def test_no_side_follows_a_failing_op(monkeypatch):
    result, ran = prove(monkeypatch, [fail(FAILING_OP, RESTRICTIONS), PROOF])
    assert result is PROOF and [attempt.size_restrictions for attempt in ran] == [(), ()]  # the next interpretation


@pytest.mark.parametrize(
    ("first", "second", "raised"),
    [
        (NO, OTHER, OTHER),
        (NO, Refused("none", cause=Cause.NOT_ROUTED), NO),
        (NO, Refused("none", cause=Cause.NO_SIZES), NO),
        (NO, ASSERTION, NO),
    ],
)
def test_a_telling_refusal_of_the_side_is_raised(monkeypatch, first, second, raised):
    result, ran = prove(monkeypatch, [fail(first, RESTRICTIONS), fail(second)])
    assert result is raised and len(ran) == 2


def test_any_refusal_of_the_side_replaces_an_error_of_the_program(monkeypatch):
    refusal = Refused("none", cause=Cause.NOT_ROUTED)
    result, ran = prove(monkeypatch, [fail(ASSERTION, RESTRICTIONS, OPTIONS), fail(refusal), fail(NO), fail(NO)])
    assert result is refusal and [attempt.options for attempt in ran[2:]] == [options for _, options in OPTIONS]


def test_other_sizes_follow_a_proof_that_does_not_hold_for_the_example(monkeypatch):
    outcomes = [fail(NO, options=OPTIONS[1:]), fail(OTHER, failed=RESTRICTIONS), fail(OTHER), PROOF]
    result, ran = prove(monkeypatch, outcomes)
    assert result is PROOF and ran[2].size_restrictions == (SizeGuard("S", "lt", "32", False),)
    assert [attempt.arguments.variant_offset for attempt in ran] == [0, 0, 0, 1] and ran[3].name.endswith(
        "two, other sizes"
    )
    assert [attempt.options.cut_preference for attempt in ran] == ["first", "last_node", "last_node", "first"]
    result, ran = prove(monkeypatch, [fail(NO, failed=RESTRICTIONS), fail(OTHER), fail(OTHER)])
    assert result is NO and len(ran) == 3


def test_an_error_after_a_proof_that_does_not_hold_ends_the_interpretation(monkeypatch):
    result, ran = prove(monkeypatch, [fail(NO, options=OPTIONS, failed=RESTRICTIONS), fail(FAILING_OP), PROOF])
    assert result is PROOF and not ran[2].size_restrictions and ran[2].arguments is not ran[0].arguments


def test_other_options_follow_a_refusal(monkeypatch):
    result, ran = prove(monkeypatch, [fail(NO, options=OPTIONS), fail(OTHER), PROOF])
    assert result is PROOF and [attempt.name for attempt in ran[1:]] == [f"[S, {D}], one", f"[S, {D}], two"]
    result, ran = prove(monkeypatch, [fail(NO, options=OPTIONS), fail(OTHER, options=OPTIONS), fail(OTHER)])
    assert result is NO and len(ran) == 3


def test_an_error_under_other_options_ends_the_interpretation(monkeypatch):
    result, ran = prove(monkeypatch, [fail(NO, options=OPTIONS), fail(FAILING_OP), PROOF])
    assert result is PROOF and ran[2].options == LiftOptions()


def test_a_capture_error_is_raised_at_once(monkeypatch):
    error = CaptureError("no")
    result, ran = prove(monkeypatch, [fail(error, options=OPTIONS)])
    assert result is error and len(ran) == 1


@pytest.mark.parametrize("error", [OTHER, CaptureError("no"), RuntimeError("no"), ASSERTION, NumberNotTaken("no")])
def test_a_batch_of_one_follows_a_refusal(monkeypatch, error):
    result, ran = prove(monkeypatch, [fail(NO), fail(error)], *BATCH_OF_ONE)
    assert result is NO and [attempt.name for attempt in ran] == [f"[B, S, {D}] [1, {D}]", f"[B, S, {D}] [B, {D}]"]


def test_a_bug_in_another_interpretation_is_not_hidden(monkeypatch):
    bug = catch(make_bug(), 1)
    assert prove(monkeypatch, [fail(NO), fail(bug)], *BATCH_OF_ONE)[0] is bug


def test_other_interpretations_follow_an_error_of_the_program(monkeypatch):
    x = torch.zeros(2, 4, 32, 32)
    result, ran = prove(monkeypatch, [fail(FAILING_OP), PROOF], x)
    assert result is PROOF and [attempt.name for attempt in ran] == ["[B, S, P, 32]", "[B, 4, S, P]"]
    count = len(list(interpret_arguments((x,), {}, ModelNumbers())))
    result, ran = prove(monkeypatch, [fail(FAILING_OP), *[fail(ASSERTION)] * (count - 1)], x)
    assert result is FAILING_OP and len(ran) == count > 3
    result, ran = prove(monkeypatch, [fail(FAILING_OP), fail(NO), fail(CaptureError("no")), *[fail(OTHER)] * count], x)
    assert result is NO and len(ran) == count
    mixed = Refused("mixed", cause=Cause.MIXED_POSITIONS)
    assert prove(monkeypatch, [fail(FAILING_OP), fail(NO), fail(mixed), *[fail(OTHER)] * count], x)[0] is mixed


def test_a_refusal_of_images_is_explained(monkeypatch):
    x, refusal = torch.zeros(2, 4, 32, 32), Refused("no", cause=Cause.FOREIGN_ROW)
    result, ran = prove(monkeypatch, [fail(FAILING_OP), fail(refusal), *[fail(OTHER)] * 12], x)
    assert "whole images" in result.reason and len(ran) > 2


def test_convolutions_end_the_attempts(monkeypatch):
    x, refusal = torch.zeros(2, 4, 32, 32), Refused("no", cause=Cause.CONVOLUTIONS)
    result, ran = prove(monkeypatch, [fail(FAILING_OP), fail(NO), fail(refusal)], x)
    assert result is refusal and len(ran) == 3


def test_few_frames_lie_between_the_survey_and_a_proof(monkeypatch):
    stacks = []

    def refuse(state):
        stacks.append([frame.name for frame in traceback.extract_stack()])
        raise Refused("no")

    monkeypatch.setattr(proof_attempts, "prove", refuse)
    assert moefx.explain(Loop(Mlp), example_inputs=(torch.zeros(5, D),)).refused
    between = stacks[0][stacks[0].index("_survey_model") + 1 : -1]
    assert between[0] == "_prove_candidates" and between[-1] == "run_attempt" and len(between) <= 7


# ------------------------------------------------------------------ stand-ins for objects
HOLDING, EVERY = SkipPlan((), {}, {"holding": None}, [], set()), SkipPlan((), {}, {"every": None}, [], set())
ROUTES_NOTHING = Refused("none", cause=Cause.NOT_ROUTED)
BY_ARGUMENT = Refused("an argument", culprits=(ARGUMENT,))


@pytest.mark.parametrize(
    ("holding", "outcomes", "result"),
    [
        (HOLDING, {"holding": PROOF}, PROOF),
        (HOLDING, {"holding": NO, None: PROOF}, PROOF),
        (HOLDING, {"holding": NO, None: BY_ARGUMENT}, NO),
        (HOLDING, {"holding": ROUTES_NOTHING, None: OTHER}, OTHER),
        (None, {None: PROOF}, PROOF),
        (None, {None: NO}, NO),
        (None, {None: BY_ARGUMENT, "every": PROOF}, PROOF),
        (None, {None: BY_ARGUMENT, "every": NO}, NO),
        (None, {None: BY_ARGUMENT, "every": ROUTES_NOTHING}, BY_ARGUMENT),
    ],
)
def test_stand_ins_are_tried_in_order(holding, outcomes, result):
    ran = []

    def rewrite(args, kwargs, skipped=None):
        ran.append(next(iter(skipped)) if skipped else None)
        outcome = outcomes[ran[-1]]
        return raise_error(outcome) if isinstance(outcome, Exception) else outcome

    def run():
        return rewrite_with_objects(rewrite, (), {}, lambda is_every: EVERY if is_every else holding, ())

    assert (catch(run) if isinstance(result, Exception) else run()) is result
    assert ran == list(outcomes)


def test_a_read_of_a_stand_in_refuses_its_proof():
    read = SkipPlan((), {}, {"holding": None}, [NO], set())

    def rewrite(args, kwargs, skipped=None):
        return PROOF if skipped else raise_error(OTHER)

    assert catch(rewrite_with_objects, rewrite, (), {}, lambda is_every: read, ()) is NO
