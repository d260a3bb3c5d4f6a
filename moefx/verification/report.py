"""`moefx.verify`: is the compiled model equivalent to the original, and if not, which block and which pass
broke it?"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..capture.defaults import neutral_device
from ..comparison.policy import Row
from ..comparison.routing_tape import RoutingRow
from ..comparison.sandbox import Inputs
from ..errors import InvalidInput, VerificationFailed
from ..runtime.module import rewritten_blocks
from .compiled_parts import CompiledPart, find_compiled_parts
from .expert_shares import find_shares
from .modes import parse_modes
from .table import format_report
from .verifying import ModelVerifier, copy_with_original_regions, is_graph, is_region

if TYPE_CHECKING:
    from .traced import BackendRecipe


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`; `str()` is a table.

    Attributes:
        rows: every compared tensor, see `Row`. Block "" is the whole model.
        routing: how each router decided, see `RoutingRow`.
        first_block: name of the first block, in order of execution, that differs on inputs of its own.
        first_pass: the first pass whose snapshot of that block differs, with the pass's file and line.
        notes: checks that the rule asks for and that were not possible, and why.
        covered: comparisons beside those of the given calls: later calls, modes, a second backward.
        not_covered: comparisons that were left out, and why.
    """

    rows: tuple[Row, ...]
    routing: tuple[RoutingRow, ...] = ()
    first_block: str | None = None
    first_pass: str | None = None
    notes: tuple[str, ...] = ()
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.ok)

    def raise_if_failed(self) -> VerifyReport:
        """Return the report if all rows are ok.

        Raises:
            VerificationFailed: with the report as its message.
        """
        if not self.ok:
            raise VerificationFailed(str(self))
        return self

    def to_json(self) -> str:
        """The report as JSON. Infinite errors, of values that cannot be compared, are null."""
        return json.dumps(_replace_infinite(dataclasses.asdict(self) | {"ok": self.ok}))

    def __str__(self) -> str:
        return format_report(self)


@neutral_device()
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
    token_counts: Sequence[int] | None = None,
    modes: Sequence[str] = (),
) -> VerifyReport:
    """Compare a compiled model with its reference: outputs, gradients of inputs and of every parameter,
    buffers and other state after the call. `comparison.policy` has the rule: the original in float64 is the truth.

    Neither model is touched: `.grad`, buffers, modes, attributes and random numbers stay. Runs in the models' own modes
    and under the active autocast.

    Further calls follow in the same copies of the models, on inputs made of the first ones by cutting, repeating and
    reordering tokens: the given count with gaps between the rows, forward alone; one count below it on transposed
    inputs and one above, with gradients; four small counts, forward alone. `report.covered` lists them, `not_covered`
    the calls that the original does not take.

    Args:
        compiled: the result of `compile`, of `rewrite_graph` or of `torch.compile(model, backend="moefx")`. If
            `torch.compile` or `module.compile` compiled it or modules of it, copies run as torch compiles them, too.
        reference: the original, or a copy of it.
        inputs: a tuple of positional or a dict of keyword arguments, one tensor, or a list of these (several
            shapes).
        dtype: precision to verify in; None: the models' own. Half precision hides errors below its rounding: verify in
            float64 too.
        grads: also compare gradients, and without a mesh those of a second backward whose cotangents have stride 0
            (not of graphs of `torch.compile`); False runs under `torch.no_grad()`.
        seeds: of the random numbers that the models draw and of the cotangents. One comparison for each seed.
        loss: `loss(output) -> scalar` to differentiate; by default every output gets a random cotangent.
        routings: also compare each block on hidden states that starve most experts, and on unrelated ones.
        token_counts: the numbers of tokens of the further calls. None: drawn by the first seed, one of them above 1024
            if the model is small. (): no further calls.
        modes: to compare in as well: "train", "eval", "no_grad", "inference_mode", or two as in "eval+no_grad".

    Raises:
        InvalidInput: models on the meta device, of different structure, or inputs that the reference does not take;
            over a mesh, where every rank calls it, ranks that would not compare as often and in the same way, or that
            share their tokens (`Plan(sequence_axis=...)`) and have other inputs.
    """
    for model in (compiled, reference):
        if not isinstance(model, nn.Module):
            raise InvalidInput(
                f"verify: got a {type(model).__name__}, which has no parameters to compare; of a function make the "
                "forward of a torch.nn.Module that holds its weights"
            )
    further, ways, parts = parse_modes(modes), _find_recipes(compiled), find_compiled_parts(compiled)
    if rewritten_blocks(reference):
        raise InvalidInput(
            f"verify: the reference, a {type(reference).__name__}, is compiled itself: its block "
            f"{next(iter(rewritten_blocks(reference)))!r} is rewritten. Give what moefx.compile returned first, then "
            "the model that it was given: verify(compiled, model, inputs)"
        )
    if not ways and _find_recipes(reference) and not rewritten_blocks(compiled):
        raise InvalidInput("verify: the compiled model comes first, then the reference; here it is the other way round")
    given, compiled, reference = compiled, _unwrap(compiled), _unwrap(reference)
    if compiled is not given and not parts:
        raise InvalidInput(
            f"verify: cannot tell how torch.compile made the {type(given).__name__} with torch {torch.__version__}; "
            "give the model that torch.compile was called on"
        )
    if parts and not ways and not rewritten_blocks(compiled):
        raise InvalidInput("verify: torch.compile was called with another backend than 'moefx': nothing of moefx ran")
    if is_graph(compiled, reference) and any(mode.training is not None for mode in further):
        raise InvalidInput("verify: a graph has the mode that it was captured in; modes can be no_grad, inference_mode")
    shares = find_shares(compiled)
    try:
        sets = _check_inputs(compiled, reference, inputs)
    except InvalidInput as error:
        if shares is not None:
            shares.check_agreement(f"{type(error).__name__}: {error}")
        raise
    if shares is not None:
        asked = {"sets of inputs": len(sets), "seeds": len(seeds), "dtype": dtype, "grads": grads, "routings": routings,
                 "token_counts": token_counts, "modes": modes}  # fmt: skip
        shares.check_agreement(", ".join(f"{what}: {value}" for what, value in asked.items()))
        shares.check_tokens(sets)
    if ways and not rewritten_blocks(compiled):
        from .traced import verify_traced  # with the backend

        traced = verify_traced(
            compiled, ways, reference, sets, dtype=dtype, grads=grads, seeds=seeds, loss=loss, routings=routings,
            token_counts=token_counts, modes=further,
        )  # fmt: skip
        traced.compare_compiled_copy(
            _select_runnable_parts(parts, ways), sets, traced.build_options(seeds[0], grads, loss)
        )
        return _build_report(traced)
    rows: list[Row] = []
    verifying = ModelVerifier(compiled, reference, dtype, shares)
    if _find_regions(compiled, reference):
        # A graph's regions have no module in the reference: their own original code is that, once it is the
        # reference's.
        held = {p.dtype for p in compiled.parameters() if p.is_floating_point()}
        if dtype is not None and held and dtype not in held:
            raise InvalidInput(
                f"verify: the graph was rewritten for {', '.join(sorted(map(str, held)))}, and its regions hold for no "
                f"other precision; to compare in {dtype}, rewrite the graph of a model in that"
            )
        plain = copy_with_original_regions(compiled)
        taken_out = ModelVerifier(plain, reference, dtype, shares)
        taken_out.compare_models(sets, seeds, grads, loss, routings=False)
        rows = [dataclasses.replace(row, block="(graph)") for row in taken_out.rows if row.kind != "path"]
        verifying = ModelVerifier(compiled, plain, dtype, shares)
    verifying.compare_models(sets, seeds, grads, loss, routings, token_counts, further)
    verifying.compare_compiled_copy(
        _select_runnable_parts(parts, ways), sets, verifying.build_options(seeds[0], grads, loss)
    )
    return _build_report(verifying, rows)


def _find_recipes(model: nn.Module) -> Mapping[str, BackendRecipe]:
    """Which parts of a model were compiled by `torch.compile(..., backend="moefx")`, and how."""
    backend = sys.modules.get("moefx.frontends.dynamo.backend")  # which Dynamo loads if it is asked for
    return backend.ways_of(model) if backend is not None else {}


def _select_runnable_parts(
    parts: Mapping[str, CompiledPart], ways: Mapping[str, BackendRecipe]
) -> dict[str, CompiledPart]:
    """The parts to compile copies by. What runs graphs as they are is left out: that is compared anyway."""
    found = {n: ways[n].part._replace(compiler=ways[n].compile) if n in ways else part for n, part in parts.items()}
    return {} if all(part.name == "eager" for part in found.values()) else found


def _unwrap(model: nn.Module) -> nn.Module:
    """The model that `torch.compile` was called on."""
    return getattr(model, "_orig_mod", model)


def _build_report(found: ModelVerifier, rows: Sequence[Row] = ()) -> VerifyReport:
    block, broken = found.first or (None, None)
    notes = tuple(dict.fromkeys(found.notes))
    return VerifyReport(
        (*rows, *found.rows), tuple(found.routing), block, broken, notes, tuple(found.covered),
        tuple(dict.fromkeys(found.not_covered)),
    )  # fmt: skip


def _find_regions(compiled: nn.Module, reference: nn.Module) -> list[str]:
    known = dict(reference.named_modules())
    return [n for n in rewritten_blocks(compiled) if n not in known and is_region(compiled.get_submodule(n))]


def _check_inputs(compiled: nn.Module, reference: nn.Module, inputs: Any) -> list[Inputs]:
    """The sets of inputs, if the models can be compared on them."""
    if any(p.is_meta for m in (compiled, reference) for p in (*m.parameters(), *m.buffers())):
        raise InvalidInput("verify: a model is on the meta device and has no numbers; give it weights with to_empty()")
    sets = _parse_inputs(inputs)
    known = {*dict(reference.named_modules()), *_find_regions(compiled, reference)}
    missing = [name for name in rewritten_blocks(compiled) if name not in known]
    if missing:
        raise InvalidInput(
            f"verify: the reference has no module {missing[0]!r}; it must be the model that was compiled"
        )
    _check_shapes(compiled, reference)
    _check_binds(reference, sets)
    return sets


def _parse_inputs(inputs: Any) -> list[Inputs]:
    sets = inputs if isinstance(inputs, list) else [inputs]
    if not sets:
        raise InvalidInput("verify: no inputs; give a tuple, a dict, a tensor, or a list of these")
    return [_parse_call(i) for i in sets]


def _check_binds(reference: nn.Module, sets: Sequence[Inputs]) -> None:
    signature = inspect.signature(reference.forward)
    for args, kwargs in sets:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(
                f"verify: {type(reference).__name__}.forward{signature} does not take these inputs: {error}"
            ) from error


def _parse_call(inputs: Any) -> Inputs:
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


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_infinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_infinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
