"""The public functions (design section 2)."""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from ._plan import Plan
from .capture.find import signature
from .capture.inputs import Arguments
from .errors import InvalidInput, InvalidPlan, MoefxError, NoMoEBlockFound, Refused
from .inspection.explain import Explanation, MatchedBlock
from .inspection.history import History
from .ir.attributes import (
    OWN_MODE,
    Where,
    attributes,
    follows_its_mode,
    globals_of,
    is_plain,
    reading,
    same,
    unchanged,
    value_at,
)
from .ir.binding import Guard, Specialisation, call_specialisation, leaves_of
from .ir.block import BlockGraph
from .ir.body import ExpertBody
from .numeric import numeric_check
from .pipeline import PASSES, Result, rewrite_block
from .runtime.copying import copy_model
from .runtime.module import BlockForward, install, rewritten_blocks, signature_binder
from .runtime.program import Program
from .runtime.watch import ReadAttributes, absorbed_names
from .survey import Matched, Refusal, Survey, first_line, survey
from .verification.report import VerifyReport, verify

_RECORD = "_moefx_record"
_UNCHANGED: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()  # given back by `strict=False`


@dataclasses.dataclass(frozen=True)
class Record:
    """What `compile` found, kept on the compiled model: names, texts and numbers, no second model."""

    matched: tuple[MatchedBlock, ...]
    refused: tuple[Refusal, ...]
    seconds: float

    def __deepcopy__(self, memo: dict) -> Record:
        return self


def compile(
    model: nn.Module,
    *,
    mesh: Any = None,
    plan: Plan | str | None = None,
    example_inputs: Any = None,
    strict: bool = True,
) -> nn.Module:
    """Find the MoE blocks of a plain PyTorch model, prove what they compute, rewrite them into padding-free ops.

    Args:
        model: any `nn.Module`; on the meta device too. It stays as it is and serves as the reference.
        mesh: a DeviceMesh for expert parallelism (not available yet).
        plan: a `Plan`, or None for the defaults.
        example_inputs: a tuple of positional or a dict of keyword arguments that `model` accepts. Without them: the
            model's own `dummy_inputs`, else token ids if its first layer is an embedding, else hidden states.
        strict: raise if nothing could be rewritten, warn once about what was refused. Without it a model in which
            nothing could be rewritten is returned as it is, without a word.

    Returns:
        A new model of the same class around the same parameters and buffers, in which each rewritten block keeps its
        class and submodules and only its `forward` runs the rewritten graph.

    Raises:
        NoMoEBlockFound: `strict`, and nothing was rewritten; the message lists what was refused and why.
        InvalidInput: the example inputs do not fit. CaptureError: the model does not run on them.
        InvalidPlan: a plan field cannot be meant, or names a pass that there is not.
    """
    plan = _plan(plan, mesh)
    model = _checked(model)
    found = survey(model, example_inputs, plan)
    verdicts = _validate(model, found, plan)
    if not found.matched:
        if strict:
            raise NoMoEBlockFound(_nothing_found(model, found))
        _UNCHANGED[model] = Record((), tuple(found.refused), found.seconds)
        return model
    if strict and any(r.likely for r in found.refused):
        warnings.warn(
            "moefx left these blocks as they were:\n  " + "\n  ".join(str(r) for r in found.refused if r.likely),
            stacklevel=2,
        )
    compiled, copies = copy_model(model)
    modules, by_mode = dict(model.named_modules()), follows_its_mode(model)
    reports = []
    for matched in found.matched:
        program = _program(matched, modules[matched.names[0]], by_mode)
        specialise = Specialise(matched.result.match.arguments, plan, by_mode)
        for name in matched.names:
            install(copies[modules[name]], [program.renamed(name)], name=name, specialise=specialise)
        reports.append(_report(matched, program, modules[matched.names[0]], verdicts[id(matched)]))
    vars(compiled)[_RECORD] = Record(tuple(reports), tuple(found.refused), found.seconds)
    return compiled


def explain(
    model: nn.Module, *, mesh: Any = None, plan: Plan | str | None = None, example_inputs: Any = None
) -> Explanation:
    """What `compile` finds in a model, or found in a compiled one, the numeric check included."""
    model = _checked(model)
    record = vars(model).get(_RECORD)
    if record is None and example_inputs is None:
        record = _UNCHANGED.get(model)
    if record is None:
        found = survey(model, example_inputs, _plan(plan, mesh))
        modules, verdicts = dict(model.named_modules()), _validate(model, found, _plan(plan, mesh))
        by_mode = follows_its_mode(model)
        reports = [
            _report(m, _program(m, modules[m.names[0]], by_mode), modules[m.names[0]], verdicts[id(m)])
            for m in found.matched
        ]
        return Explanation(type(model).__name__, tuple(reports), tuple(found.refused), found.seconds)
    forwards = rewritten_blocks(model)
    reports = []
    for report in record.matched:
        counts = [forwards[n].counts for n in report.names if n in forwards]
        calls = (
            sum(c.rewritten for c in counts),
            sum(c.original for c in counts),
            sum(c.guard_failures for c in counts),
        )
        notes = {
            f"{reason}" for n in report.names if n in forwards for reason in forwards[n].refusals.values() if reason
        }
        notes |= {f"guard failed: {c.last_failed_guard}" for c in counts if c.last_failed_guard}
        also = dict.fromkeys(str(p.key) for n in report.names if n in forwards for p in forwards[n].programs[1:])
        notes = (*report.notes, *sorted(notes))
        reports.append(dataclasses.replace(report, calls=calls, notes=notes, also_for=tuple(also)))
    return Explanation(type(model).__name__, tuple(reports), record.refused, record.seconds, _paths())


@dataclasses.dataclass(frozen=True)
class Block:
    """A rewritten block of a compiled model."""

    name: str
    forward: BlockForward

    @property
    def spec(self) -> Specialisation:
        """The specialisation that the (first) rewritten graph holds for."""
        return self.forward.programs[0].key

    @property
    def graph(self) -> BlockGraph:
        return self.history.graph

    @property
    def history(self) -> History:
        return self.forward.programs[0].history

    @property
    def fallbacks(self) -> int:
        """Calls that ran the original code instead of the rewritten graph."""
        return self.forward.counts.original

    def record_load(self, on: bool = True) -> None:
        """Switch routing statistics on (they are off by default)."""
        self.forward.record_load(on)

    def load(self) -> torch.Tensor | None:
        """Tokens per expert [E] of the last call, on the device, without host synchronisation."""
        return self.forward.load()


def blocks(compiled: nn.Module) -> list[Block]:
    """The rewritten blocks of a compiled model, in module order."""
    return [Block(name, forward) for name, forward in rewritten_blocks(_checked(compiled)).items()]


def graph(compiled: nn.Module, name: str, *, after: str | None = None) -> BlockGraph:
    """The rewritten graph of a block, or its graph after a named pass. `print` it.

    Raises:
        MoefxError: no block of that name was rewritten. NoSuchPass: no such pass ran on it.
    """
    found = history(compiled, name)
    return found.graph if after is None else found[after].graph


def history(compiled: nn.Module, name: str) -> History:
    """All graphs of a block, pass by pass."""
    forwards = rewritten_blocks(_checked(compiled))
    if not forwards:
        raise MoefxError("no block of this model is rewritten; pass what moefx.compile returned")
    if name not in forwards:
        raise MoefxError(f"no rewritten block {name!r}; there is {', '.join(map(repr, forwards))}")
    return forwards[name].programs[0].history


# ---------------------------------------------------------------------- pieces of compile
def _plan(plan: Plan | str | None, mesh: Any) -> Plan:
    if mesh is not None:
        raise MoefxError("compile(mesh=...): expert parallelism is not available yet; leave mesh out")
    if plan is None:
        return Plan()
    if plan == "auto":
        raise InvalidPlan("plan='auto': the planner is not available yet; pass a moefx.Plan, or leave plan out")
    if not isinstance(plan, Plan):
        raise InvalidPlan(f"plan is a {type(plan).__name__}; expected a moefx.Plan or None")
    names = [made.__name__ for made in PASSES]
    for name in plan.disable:
        if name not in names:
            raise InvalidPlan(f"Plan(disable={list(plan.disable)}): no pass {name!r}; there is {', '.join(names)}")
    return plan


def _checked(model: Any) -> nn.Module:
    """The model, also inside of what `torch.compile` made of it."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise InvalidInput(f"expected a model, an instance of nn.Module; got {what}")
    return getattr(model, "_orig_mod", model)


def _nothing_found(model: nn.Module, found: Survey) -> str:
    head = f"no MoE block was found in {type(model).__name__}"
    if not found.refused:
        return (
            f"{head}: it has no part in which several submodules of one kind, or the slices of a stacked parameter, "
            "could each be for some tokens only"
        )
    return head + ". These look like one and were refused:\n  " + "\n  ".join(map(str, found.refused))


def _program(matched: Matched, block: nn.Module, by_mode: bool) -> Program:
    call = matched.call
    return program_of(block, matched.result, call.args, call.kwargs, read=matched.read, by_mode=by_mode)


def program_of(
    block: nn.Module,
    result: Result,
    args: tuple,
    kwargs: dict[str, Any],
    autocast: torch.dtype | None = None,
    read: Iterable[Where] = (),
    by_mode: bool = False,
) -> Program:
    """The program of a rewritten block, with the specialisation and the guards that it holds for; `read`: the
    attributes of the block that its captures read. It is for both modes if its own one is not among them, and not
    `by_mode`: the model changes more than its modes."""
    leaves = leaves_of(signature_binder(block)(*args, **kwargs))
    call = call_specialisation(block, leaves)
    device = next((t.device.type for t in (*block.parameters(), *block.buffers())), "cpu")
    arguments = tuple((path, _on(kind, device)) for path, kind in call.arguments)
    reads_grad = bool(result.match.modes_read & {"is_grad_enabled", "is_inference_mode_enabled"})
    read = set(read)
    training = block.training if by_mode or OWN_MODE in read else None
    key = Specialisation(training, True if reads_grad else None, autocast, arguments)
    absorbed = absorbed_names(block, result.graph, result.rewritten.repeated)
    values = {w: value_at(block, w) for w in sorted(read - {OWN_MODE})}
    plain = {w: v for w, v in values.items() if is_plain(v) or (w.inner and isinstance(v, torch.Tensor))}
    relied = {w: unchanged(v) for w, v in {**plain, **globals_of(block)}.items()}
    return Program(key, result.history, absorbed, _guards(result), relied)


def _on(kind: tuple, device: str) -> tuple:
    return ("tensor", kind[1], device, kind[3]) if kind[0] == "tensor" else kind


def _guards(result: Result) -> list[Guard]:
    """Comparisons of sizes that capture followed, as conditions on the placeholders; and what it took as fixed."""
    arguments = result.match.arguments
    names = [n.name for n in result.graph.placeholders]
    where = {}
    for dim in arguments.dims:
        for name, leaf in zip(names, arguments.tensors, strict=True):
            if dim in leaf.shape:
                where[dim] = f"{name}.shape[{leaf.shape.index(dim)}]"
                break
    symbols = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
    opposite = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
    guards = []
    for g in result.match.guards:
        sides = [re.sub(r"\b[A-Z]\b", lambda m: where[m[0]], side) for side in (g.left, g.right)]
        # a plain comparison: Dynamo does not compare the outcome of one over symbolic sizes with True
        symbol = symbols[g.op if g.value else opposite[g.op]]
        condition, why = f"{sides[0]} {symbol} {sides[1]}", f"the block compares sizes: {g}"
        guards.append(Guard(condition, why, one_way=g not in result.match.extra_guards))
    for name, leaf in zip(names, arguments.tensors, strict=True):
        for axis, n in enumerate(leaf.shape):
            if isinstance(n, int):
                why = "this axis was taken for the features, or as fixed"
                guards.append(Guard(f"{name}.shape[{axis}] == {n}", why, one_way=True))
    return guards


class Specialise:
    """Lifts a block again for a call that no program admits: another mode, dtype, device, or sizes at which the block
    goes another way. What is made for one block the others that are like it take over. Picklable."""

    def __init__(self, arguments: Arguments, plan: Plan, by_mode: bool):
        self.arguments, self.plan, self.by_mode = arguments, plan, by_mode
        self.made: list[_Made] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": []}

    def __call__(
        self, block: nn.Module, call: Specialisation, args: tuple | None, kwargs: Mapping[str, Any] | None
    ) -> Program | None:
        forward = vars(block).get("forward")
        assert isinstance(forward, BlockForward)
        like = signature(block)
        self.made = [made for made in self.made if made.block() is not None]
        for made in self.made:
            if made.like == like and _takes(block, made, call, args, kwargs):
                return made.program.renamed(forward.name)
        program, read = self._lifted(block, forward, call, args, kwargs)
        self.made.append(_Made(weakref.ref(block), like, read, program))
        return program

    def _lifted(
        self,
        block: nn.Module,
        forward: BlockForward,
        call: Specialisation,
        args: tuple | None,
        kwargs: Mapping[str, Any] | None,
    ) -> tuple[Program, set[Where]]:
        programs = [p for p in forward.programs if ReadAttributes(block, p.attributes).hold()]
        same = [p for p in programs if p.key.admits(call)]
        for program in programs:  # the same but for the device, which capture does not look at
            if not same and _without_device(program.key) == _without_device(
                call._replace(grad=program.key.grad, training=None if program.key.training is None else call.training)
            ):
                moved = Program(
                    program.key._replace(arguments=call.arguments),
                    program.history,
                    program.absorbed,
                    program.guards,
                    program.attributes,
                )
                return moved, set(program.attributes)
        real = args is not None  # not only being traced
        abstract = pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.detach().to("meta") if t.is_floating_point() else t.detach().cpu(),
            self._arguments(call) if args is None else (args, dict(kwargs or {})),
        )
        autocast = torch.autocast("cpu", call.autocast or torch.bfloat16, enabled=call.autocast is not None)
        counted = forward.counts.original
        try:
            with forward.running("original"), autocast, torch.enable_grad():
                with reading(block, attributes(block)) as read:
                    result, args, kwargs = self._rewrite(block, forward.name, call, *abstract)
                program = program_of(block, result, args, kwargs, call.autocast, read, self.by_mode)
                if real and self.plan.validation == "auto":
                    ok, verdict = numeric_check(block, result, forward.name, self.plan.validation_seconds)
                    if not ok:
                        raise Refused(verdict)
        finally:
            forward.counts.original = counted  # the captures were not calls of the user's
        program = Program(
            program.key._replace(arguments=call.arguments),
            program.history,
            program.absorbed,
            program.guards,
            program.attributes,
        )
        return program, read

    def _rewrite(
        self, block: nn.Module, name: str, call: Specialisation, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Result, tuple, dict[str, Any]]:
        try:
            return rewrite_block(block, name, args, kwargs, self.plan), args, kwargs
        except Refused as why:
            try:  # one token does not tell which axes are of tokens
                args, kwargs = self._arguments(call)
                return rewrite_block(block, name, args, kwargs, self.plan), args, kwargs
            except Refused:
                raise why from None

    def _arguments(self, call: Specialisation) -> tuple[tuple, dict[str, Any]]:
        """Arguments of the recorded shapes in the dtypes of the call: for one that is only being traced, or whose own
        shapes do not show which axes are of tokens."""
        kinds = [kind for _, kind in call.arguments if kind[0] == "tensor"]
        leaves = self.arguments.tensors
        if len(kinds) != len(leaves) or any(
            len(leaf.shape) != kind[3] for leaf, kind in zip(leaves, kinds, strict=True)
        ):
            raise Refused("a call with other arguments is traced before it was ever run; run it once in eager mode")
        args, kwargs = self.arguments.at(self.arguments.sizes)
        dtypes = iter(kind[1] for kind in kinds)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(next(dtypes)), (args, kwargs))


class _Made(NamedTuple):
    """A program that was lifted later: of which block, its signature, and the attributes that were read."""

    block: weakref.ref[nn.Module]
    like: tuple
    read: set[Where]
    program: Program


def _takes(
    block: nn.Module, made: _Made, call: Specialisation, args: tuple | None, kwargs: Mapping[str, Any] | None
) -> bool:
    """Whether a program that was made for another block is for this call of this one."""
    program, other = made.program, made.block()
    if other is None or not all(same(value_at(block, w), value_at(other, w)) for w in made.read):
        return False
    if not program.key.admits(call) or not ReadAttributes(block, program.attributes).hold():
        return False
    if program.guard is None or args is None:
        return True
    leaves = leaves_of(signature_binder(block)(*args, **(kwargs or {})))
    return program.guard(block, *[leaves[i][1] for i in program.picks]) < 0


def _without_device(key: Specialisation) -> Specialisation:
    return key._replace(arguments=tuple((path, _on(kind, "any")) for path, kind in key.arguments))


def _validate(model: nn.Module, found: Survey, plan: Plan) -> dict[int, str]:
    """The numeric check of each rewrite on a few tokens. What differs is refused."""
    verdicts = {}
    modules = dict(model.named_modules())
    left = plan.validation_seconds
    for matched in list(found.matched):
        block = modules[matched.names[0]]
        if plan.validation == "symbolic":
            verdicts[id(matched)] = "off (plan.validation)"
            continue
        if any(t.is_meta for t in (*block.parameters(), *block.buffers())):
            verdicts[id(matched)] = "skipped, the weights are on the meta device"
            continue
        if left <= 0 and plan.validation == "auto":
            verdicts[id(matched)] = "skipped, the time budget is spent"
            continue
        start = time.perf_counter()
        ok, verdicts[id(matched)] = numeric_check(block, matched.result, matched.names[0], max(left, 1.0))
        left -= time.perf_counter() - start
        if not ok:
            found.matched.remove(matched)
            found.refused.append(
                Refusal(
                    matched.names[0],
                    verdicts[id(matched)],
                    source=first_line(block),
                    remedy="please report this model",
                )
            )
    return verdicts


def _report(matched: Matched, program: Program, block: nn.Module, verdict: str) -> MatchedBlock:
    match, graph = matched.result.match, matched.result.graph
    mlps = graph.find(torch.ops.moefx.expert_mlp.default)
    combines = graph.find(torch.ops.moefx.combine.default)
    expert = (
        "; ".join(ExpertBody.from_json(str(n.kwargs["body"])).pretty() for n in mlps)
        or "a general function of its rows"
    )
    unfused = "; ".join(str(n.meta["unfused"]) for n in combines if "unfused" in n.meta)
    drop = str(match.drop or ("by the program's own mask" if match.keep else ""))
    return MatchedBlock(
        names=tuple(matched.names), kind=type(block).__name__, num_experts=match.num_experts, top_k=match.slots,
        expert=expert,
        drop=drop, holds_for=str(program.key), routings=len(match.lifted), validation=verdict, seconds=matched.seconds,
        saved_before=None, saved_after=_kept_bytes(graph), unfused=unfused, guards=tuple(str(g) for g in match.guards),
        bodies=tuple(_body(n) for n in mlps),
    )  # fmt: skip


def _body(node: torch.fx.Node) -> tuple[str, tuple[int, ...]]:
    """The body of an `expert_mlp`, as JSON, and the widths of its up-projections."""
    text, up = str(node.kwargs["body"]), node.args[5]
    return text, ExpertBody.from_json(text).up_widths([w.meta["val"] for w in up])  # type: ignore[union-attr]


def _kept_bytes(graph: BlockGraph) -> int | None:
    """Bytes a token that the fused experts keep: X once, and K rows of what the policy keeps."""
    total = 0
    for node in graph.find(torch.ops.moefx.expert_mlp.default):
        x, value = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
        inverse = node.args[3].meta.get("val")  # type: ignore[union-attr]
        if x is None or value is None or inverse is None:
            return None
        total += x.shape[-1] * x.element_size()
        total += sum(int(v.shape[-1]) * v.element_size() for v in value[1:]) * int(inverse.shape[-1])
    return total or None


def _paths() -> tuple[tuple[str, str, int], ...]:
    from .lowering import select

    return tuple((op, provider, n) for (op, provider), n in sorted(select.counters().items()))


__all__ = [
    "Block",
    "Explanation",
    "History",
    "VerifyReport",
    "blocks",
    "compile",
    "explain",
    "graph",
    "history",
    "verify",
]
