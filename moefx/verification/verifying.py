"""The comparison of two models and of their blocks, on one set of inputs after the other."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ..runtime.module import BlockForward, CallCounts, rewritten_blocks
from .bisect import first_bad_snapshot, program_for
from .compare import Comparison, Subject, compare
from .policy import Row
from .routing import RoutingRow, Scope
from .sandbox import Call, Casts, Inputs, Options, call_forward, call_module
from .shares import Shares, local
from .states import GIVEN, router_states
from .table import NOTHING_REWRITTEN, OTHER_VALUES
from .watching import watch_compiled, watch_original


class Verifying:
    """What was compared so far.

    Args:
        watch: told of each sandbox of the compiled model, with its scope; which rewritten blocks it has.
        call: how to call one.
        shares: what of it this rank has, under expert parallelism.

    Attributes:
        first: the first block, in order of execution, that differs on inputs of its own, and the pass that broke it.
    """

    def __init__(
        self,
        compiled: nn.Module,
        reference: nn.Module,
        dtype: torch.dtype | None,
        shares: Shares | None = None,
        watch: Callable[[nn.Module, Scope], dict[str, BlockForward]] = watch_compiled,
        call: Call = call_module,
    ):
        self.compiled, self.reference, self.watch, self.call = compiled, reference, watch, call
        self.working, self.exact = Casts(dtype), Casts(torch.float64)
        self.names = list(rewritten_blocks(compiled))
        self.shares = shares
        self.rows: list[Row] = _held_alike(compiled, reference, self.shares)
        self.routing: list[RoutingRow] = []
        self.notes: list[str] = []
        self.first: tuple[str, str] | None = None
        self.calls: dict[str, Inputs] = {}  # by block, in order of execution, for the current case
        self.ran: dict[str, Counter[str]] = {name: Counter() for name in self.names}

    def models(self, sets: list[Inputs], seeds: Sequence[int], grads: bool, loss: Any, routings: bool) -> None:
        """Both models on all inputs, and their blocks on what the reference's are given."""
        for i, inputs in enumerate(sets):
            for seed in seeds:
                case = f"inputs {i}, seed {seed}"
                self.calls = {}
                self.model(inputs, self.options(seed, grads, loss), case)
                self.blocks(self.calls, self.options(seed, grads, None), case, routings)
        self.rows += paths(self.ran, NOTHING_REWRITTEN)

    def options(self, seed: int, grads: bool, loss: Any) -> Options:
        """How to run the models. Over a mesh a second backward would need collectives that the user may not allow."""
        return Options(seed, grads, loss, again=grads and self.shares is None)

    def blocks(self, calls: Mapping[str, Inputs], options: Options, case: str, routings: bool) -> None:
        for name, call in calls.items():
            for state, inputs in self.states(name, call, options.seed, routings):
                self.block(name, inputs, options, f"{case}{state}")

    def model(self, inputs: Inputs, options: Options, case: str) -> None:
        forwards: dict[str, BlockForward] = {}
        before: dict[str, CallCounts] = {}

        def prepare(box: nn.Module, which: str, scope: Scope) -> None:
            if which == "compiled":
                forwards.update(self.watch(box, scope))
                before.update({name: copy.copy(forward.counts) for name, forward in forwards.items()})
            else:
                watch_original(box, self.names, scope, self.calls if which == "original" else None)

        subject = Subject(
            self.reference, self.compiled, self.working, self.exact,
            call_compiled=self.call, prepare=prepare, shares=self.shares,
        )  # fmt: skip
        comparison = self.compared(subject, inputs, options, case)
        for name, forward in forwards.items():
            add_calls(self.ran[name], forward.counts, before[name])
        if "" in forwards and not comparison.ok and self.first is None:
            call = self.calls.get("", inputs)
            self.first = "", self.bisect(forwards[""], self.reference, call, options)

    def states(self, name: str, call: Inputs, seed: int, routings: bool) -> Iterator[tuple[str, Inputs]]:
        """What to compare a block on. Where the model is the block (""), its own call was compared before."""
        for state, inputs in router_states(call, seed):
            if state == GIVEN and name:
                yield "", inputs
            elif state != GIVEN and routings:
                yield f", {state}", inputs

    def block(self, name: str, call: Inputs, options: Options, case: str) -> None:
        """Both blocks on the inputs that the reference's block got, so that errors before it do not count."""
        forwards: dict[str, BlockForward] = {}

        def prepare(box: nn.Module, which: str, scope: Scope) -> None:
            if which == "compiled":
                forwards.update(watch_compiled(box, Scope()))  # nothing to tell apart in one block

        original, compiled = (model.get_submodule(name) for model in (self.reference, self.compiled))
        subject = Subject(
            original, compiled, self.working, self.exact, block=name,
            call_original=call_forward, call_compiled=call_forward, prepare=prepare, shares=Shares.of(compiled),
        )  # fmt: skip
        comparison = self.compared(subject, call, options, case)
        if not comparison.ok and self.first is None:
            self.first = name, self.bisect(forwards[""], original, call, options)

    def compared(self, subject: Subject, inputs: Inputs, options: Options, case: str) -> Comparison:
        comparison = compare(subject, inputs, options, case)
        self.rows += comparison.rows
        self.routing += comparison.routing
        self.notes += comparison.notes
        return comparison

    def bisect(self, forward: BlockForward, original: nn.Module, call: Inputs, options: Options) -> str:
        program = program_for(forward, call, options)
        if program is None:
            return ""
        snapshot = first_bad_snapshot(original, program, call, options, self.working, self.exact)
        if snapshot is None:
            return "none: the graphs after all passes are right, so what runs is not the last of them"
        return f"{snapshot.pass_name} ({snapshot.rule})" if snapshot.rule else snapshot.pass_name


def add_calls(ran: Counter[str], now: CallCounts, before: CallCounts) -> None:
    ran["rewritten"] += now.rewritten - before.rewritten
    ran["original"] += now.original - before.original


def paths(ran: Mapping[str, Counter[str]], nothing: str) -> list[Row]:
    """Did the rewritten code of each block run at all, and only it? `nothing`: what to say where there is no block."""
    if not ran:
        return [Row("", "rewritten blocks", "path", ok=False, error=math.inf, note=nothing)]
    rows = []
    for name, counts in ran.items():
        note = f"{counts['rewritten']} calls ran rewritten, {counts['original']} ran the original"
        ok = counts["rewritten"] > 0 and not counts["original"]
        rows.append(Row(name, "rewritten path", "path", ok, float(counts["original"]), note=note))
    return rows


def _held_alike(compiled: nn.Module, reference: nn.Module, shares: Shares | None) -> list[Row]:
    """Failed rows where the two models already differ before they run: other names, weights, buffers or
    modes."""
    rows = []
    is_graph_of_it = isinstance(compiled, fx.GraphModule) and not isinstance(reference, fx.GraphModule)
    stacked, elsewhere = (shares.stacked, shares.elsewhere) if shares else ({}, frozenset())
    for kind, held in (("grad_param", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers)):
        ours, theirs = (dict(held(model, remove_duplicate=False)) for model in (compiled, reference))
        unlike = ours.keys() ^ theirs.keys() - elsewhere
        if is_graph_of_it:  # without what it does not use; gradients and changes of these are compared
            unlike &= ours.keys()
        for name in unlike:
            note = f"only the {'compiled model' if name in ours else 'reference'} has it"
            rows.append(Row("", name, kind, ok=False, error=math.inf, note=note))
        for name in ours.keys() & theirs.keys():
            a: Any = local(ours[name])
            b = theirs[name]
            if name in stacked:
                b = stacked[name].own_part(b.detach())
            if a is not b and not (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))):
                rows.append(Row("", name, "state", ok=False, error=math.inf, note=OTHER_VALUES))
    modes = dict(reference.named_modules())
    if is_graph_of_it:
        modes = {}  # it has the mode that it was captured in, whatever its flag says
    other = [n for n, m in compiled.named_modules() if n in modes and modes[n].training != m.training]
    for name in [n for n in other if not n or n.rpartition(".")[0] not in other]:  # not what is inside of one
        ours, theirs = _mode(compiled.get_submodule(name)), _mode(modes[name])
        note = f"compiled is in {ours} mode, the reference in {theirs} mode"
        rows.append(Row("", f"{name or 'model'}.training", "state", ok=False, error=1.0, note=note))
    return sorted(rows, key=lambda row: row.name)


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def is_region(block: nn.Module) -> bool:
    """Whether a block is called with its weights and was no module of the original's."""
    return getattr(type(block), "is_region", False)


def with_original_regions(compiled: nn.Module) -> nn.Module:
    """A copy, around the same weights, in which the regions of a graph run what they ran."""
    held = (*compiled.parameters(), *compiled.buffers())
    plain = copy.deepcopy(compiled, {id(t): t for t in held})
    for name in rewritten_blocks(plain):
        block = plain.get_submodule(name)
        if is_region(block):
            vars(block).pop("forward")
    return plain
