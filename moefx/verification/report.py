"""`moefx.verify`: is the compiled model equivalent to the original, and if not, which block and which pass
broke it?"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, VerificationFailed
from ..runtime.module import BlockForward, CallCounts, rewritten_blocks
from .bisect import first_bad_snapshot, program_for
from .compare import Comparison, Subject, compare
from .policy import Row
from .routing import RoutingRow, Scope
from .sandbox import Casts, Inputs, Options, call_forward
from .shares import Shares, local
from .states import GIVEN, router_states
from .table import OTHER_VALUES, text
from .watching import watch_compiled, watch_original


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` found; `str()` is a table.

    Attributes:
        rows: every compared tensor, see `Row`. Block "" is the whole model.
        routing: how each router decided, see `RoutingRow`.
        first_block: name of the first block, in order of execution, that differs on inputs of its own.
        first_pass: the first pass whose snapshot of that block differs, with the pass's file and line.
        notes: what could not be checked as the rule says.
    """

    rows: tuple[Row, ...]
    routing: tuple[RoutingRow, ...] = ()
    first_block: str | None = None
    first_pass: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.ok)

    def raise_if_failed(self) -> VerifyReport:
        """Itself, if all is well.

        Raises:
            VerificationFailed: with the report as its message.
        """
        if not self.ok:
            raise VerificationFailed(str(self))
        return self

    def to_json(self) -> str:
        """The report as JSON; infinite errors (what cannot be compared at all) are null."""
        return json.dumps(_finite(dataclasses.asdict(self) | {"ok": self.ok}))

    def __str__(self) -> str:
        return text(self)


def verify(
    compiled: nn.Module,
    reference: nn.Module,
    inputs: Any,
    *,
    dtype: torch.dtype | None = None,
    grads: bool = True,
    seeds: Sequence[int] = (0,),
    loss: Callable[[Any], Tensor] | None = None,
    routings: bool = True,
) -> VerifyReport:
    """Compare a compiled model with its reference: outputs, gradients of inputs and of every parameter,
    buffers and other state after the call (design section 9, the float64 rule of `verification.policy`).

    Neither model is touched: `.grad`, buffers, modes, attributes and random numbers stay. Runs in the modes
    that the models are in, under the autocast that is active.

    Args:
        inputs: a tuple of positional or a dict of keyword arguments, one tensor, or a list of these (several
            shapes).
        dtype: precision to verify in; None: the models' own. In half precision what is smaller than rounding
            cannot be seen: verify in float64 too.
        grads: also compare gradients; False runs under `torch.no_grad()`.
        seeds: one comparison for each, of the random numbers that the models draw and of the cotangents.
        loss: `loss(output) -> scalar` to differentiate; by default every output gets a random cotangent.
        routings: also compare each block on hidden states that starve most experts, and on unrelated ones.

    Raises:
        InvalidInput: models on the meta device, of different structure, or inputs that the reference does not take;
            over a mesh, where every rank calls it, ranks that would not compare as often and in the same way, or that
            share their tokens (`Plan(sequence_axis=...)`) and have other inputs.
    """
    for model in (compiled, reference):
        if hasattr(model, "_orig_mod"):
            raise InvalidInput("verify: give the model that torch.compile was called on; its result cannot be copied")
    shares = Shares.of(compiled)
    try:
        sets = _checked(compiled, reference, inputs)
    except InvalidInput as error:
        if shares is not None:
            shares.agree(f"{type(error).__name__}: {error}")
        raise
    if shares is not None:
        asked = {"sets of inputs": len(sets), "seeds": len(seeds), "dtype": dtype, "grads": grads, "routings": routings}
        shares.agree(", ".join(f"{what}: {value}" for what, value in asked.items()))
        shares.check_tokens(sets)
    if not _regions_without_reference(compiled, reference):
        return _Verifying(compiled, reference, dtype, shares).report(sets, seeds, grads, loss, routings)
    # A graph's regions have no module in the reference: their own original code is that, once it is the reference's.
    plain = _with_original_regions(compiled)
    taken_out = _Verifying(plain, reference, dtype, shares).report(sets, seeds, grads, loss, routings=False)
    found = _Verifying(compiled, plain, dtype, shares).report(sets, seeds, grads, loss, routings)
    rows = [dataclasses.replace(row, block="(graph)") for row in taken_out.rows if row.kind != "path"]
    return dataclasses.replace(found, rows=(*rows, *found.rows))


def _regions_without_reference(compiled: nn.Module, reference: nn.Module) -> list[str]:
    known = dict(reference.named_modules())
    return [n for n in rewritten_blocks(compiled) if n not in known and _is_region(compiled.get_submodule(n))]


def _is_region(block: nn.Module) -> bool:
    """Whether a block is called with its weights and was no module of the original's."""
    return getattr(type(block), "is_region", False)


def _with_original_regions(compiled: nn.Module) -> nn.Module:
    """A copy, around the same weights, in which the regions of a graph run what they ran."""
    held = (*compiled.parameters(), *compiled.buffers())
    plain = copy.deepcopy(compiled, {id(t): t for t in held})
    for name in rewritten_blocks(plain):
        block = plain.get_submodule(name)
        if _is_region(block):
            vars(block).pop("forward")
    return plain


def _checked(compiled: nn.Module, reference: nn.Module, inputs: Any) -> list[Inputs]:
    """The sets of inputs, if the models can be compared on them."""
    if any(p.is_meta for m in (compiled, reference) for p in (*m.parameters(), *m.buffers())):
        raise InvalidInput("verify: a model is on the meta device and has no numbers; give it weights with to_empty()")
    sets = _input_sets(inputs)
    known = {*dict(reference.named_modules()), *_regions_without_reference(compiled, reference)}
    missing = [name for name in rewritten_blocks(compiled) if name not in known]
    if missing:
        raise InvalidInput(
            f"verify: the reference has no module {missing[0]!r}; it must be the model that was compiled"
        )
    _check_shapes(compiled, reference)
    _check_binds(reference, sets)
    return sets


class _Verifying:
    def __init__(self, compiled: nn.Module, reference: nn.Module, dtype: torch.dtype | None, shares: Shares | None):
        self.compiled, self.reference = compiled, reference
        self.working, self.exact = Casts(dtype), Casts(torch.float64)
        self.names = list(rewritten_blocks(compiled))
        self.shares = shares
        self.rows: list[Row] = _held_alike(compiled, reference, self.shares)
        self.routing: list[RoutingRow] = []
        self.notes: list[str] = []
        self.first: tuple[str, str] | None = None  # block, pass
        self.calls: dict[str, Inputs] = {}  # by block, in order of execution, for the current case
        self.ran: dict[str, Counter[str]] = {name: Counter() for name in self.names}

    def report(
        self, input_sets: list[Inputs], seeds: Sequence[int], grads: bool, loss: Any, routings: bool
    ) -> VerifyReport:
        for i, inputs in enumerate(input_sets):
            for seed in seeds:
                case = f"inputs {i}, seed {seed}"
                self.calls = {}
                self.model(inputs, Options(seed, grads, loss), case)
                for name, call in self.calls.items():
                    for state, inputs_of_block in self.states(name, call, seed, routings):
                        self.block(name, inputs_of_block, Options(seed, grads), f"{case}{state}")
        self.rows += self.paths()
        block, broken = self.first or (None, None)
        notes = tuple(dict.fromkeys(self.notes))
        return VerifyReport(tuple(self.rows), tuple(self.routing), block, broken, notes)

    def model(self, inputs: Inputs, options: Options, case: str) -> None:
        forwards: dict[str, BlockForward] = {}
        before: dict[str, CallCounts] = {}

        def prepare(box: nn.Module, which: str, scope: Scope) -> None:
            if which == "compiled":
                forwards.update(watch_compiled(box, scope))
                before.update({name: copy.copy(forward.counts) for name, forward in forwards.items()})
            else:
                watch_original(box, self.names, scope, self.calls if which == "original" else None)

        subject = Subject(self.reference, self.compiled, self.working, self.exact, prepare=prepare, shares=self.shares)
        comparison = self.compared(subject, inputs, options, case)
        for name, forward in forwards.items():
            self.ran[name]["rewritten"] += forward.counts.rewritten - before[name].rewritten
            self.ran[name]["original"] += forward.counts.original - before[name].original
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

    def paths(self) -> list[Row]:
        """Did the rewritten code run at all, and only it?"""
        if not self.names:
            note = "the compiled model has no rewritten block: nothing of moefx ran"
            return [Row("", "rewritten blocks", "path", ok=False, error=math.inf, note=note)]
        rows = []
        for name, ran in self.ran.items():
            note = f"{ran['rewritten']} calls ran rewritten, {ran['original']} ran the original"
            ok = ran["rewritten"] > 0 and not ran["original"]
            rows.append(Row(name, "rewritten path", "path", ok, float(ran["original"]), note=note))
        return rows


def _input_sets(inputs: Any) -> list[Inputs]:
    sets = inputs if isinstance(inputs, list) else [inputs]
    if not sets:
        raise InvalidInput("verify: no inputs; give a tuple, a dict, a tensor, or a list of these")
    return [_one_call(i) for i in sets]


def _check_binds(reference: nn.Module, sets: Sequence[Inputs]) -> None:
    signature = inspect.signature(reference.forward)
    for args, kwargs in sets:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(
                f"verify: {type(reference).__name__}.forward{signature} does not take these inputs: {error}"
            ) from error


def _one_call(inputs: Any) -> Inputs:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    raise InvalidInput(
        f"verify: inputs are a tuple (positional), a dict (keyword) or a tensor, or a list of these; "
        f"got {type(inputs).__name__}"
    )


def _check_shapes(compiled: nn.Module, reference: nn.Module) -> None:
    held = dict(compiled.named_parameters(remove_duplicate=False))
    for name, theirs in reference.named_parameters(remove_duplicate=False):
        if name in held and held[name].shape != theirs.shape:
            raise InvalidInput(
                f"verify: {name} has shape {tuple(held[name].shape)} in the compiled model and {tuple(theirs.shape)} "
                "in the reference, which must be the model that was compiled, or a copy of it"
            )


def _held_alike(compiled: nn.Module, reference: nn.Module, shares: Shares | None) -> list[Row]:
    """Failed rows where the two models already differ before they run: other names, weights, buffers or
    modes."""
    rows = []
    stacked, elsewhere = (shares.stacked, shares.elsewhere) if shares else ({}, frozenset())
    for kind, held in (("grad_param", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers)):
        ours, theirs = (dict(held(model, remove_duplicate=False)) for model in (compiled, reference))
        for name in ours.keys() ^ theirs.keys() - elsewhere:
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
    other = [n for n, m in compiled.named_modules() if n in modes and modes[n].training != m.training]
    for name in [n for n in other if not n or n.rpartition(".")[0] not in other]:  # not what is inside of one
        ours, theirs = _mode(compiled.get_submodule(name)), _mode(modes[name])
        note = f"compiled is in {ours} mode, the reference in {theirs} mode"
        rows.append(Row("", f"{name or 'model'}.training", "state", ok=False, error=1.0, note=note))
    return sorted(rows, key=lambda row: row.name)


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
