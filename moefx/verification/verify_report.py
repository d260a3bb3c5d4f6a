"""`moefx.verify`: compare a compiled model with the original, and name the block and the pass at fault."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comparison.policy import Row
from ..comparison.routing_tape import RoutingRow
from ..comparison.sandbox import Inputs, leaves
from ..errors import InvalidInput, VerificationFailed
from ..ir.argument_binding import ExampleInputs
from ..runtime.block_forward import find_rewritten_blocks
from ..runtime.graph_backend import find_backend
from ..util.default_device import neutral_device
from ..util.model_wrappers import unwrap_model
from .compiled_parts import CompiledPart, find_compiled_parts
from .expert_shares import find_shares
from .model_verifier import ModelVerifier, copy_with_original_regions, is_graph, is_region
from .modes import parse_modes
from .report_table import format_report

if TYPE_CHECKING:
    from ..frontends.dynamo.backend_verifier import BackendRecipe


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`; `str()` is a table.

    Attributes:
        rows: every compared tensor, see `Row`. Block "" is the whole model.
        routing: the decisions of each router, see `RoutingRow`.
        first_block: name of the first block, in order of execution, that differs on the reference's inputs.
        first_pass: the first pass whose snapshot of that block differs, with the pass's file and line.
        notes: checks of the rule that were not possible, with the reason.
        covered: comparisons in addition to the given calls: later calls, modes, a second backward.
        not_covered: comparisons that were left out, with the reason.
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
        """Return the report, or raise if a row failed.

        Raises:
            VerificationFailed: with the report as its message.
        """
        if not self.ok:
            raise VerificationFailed(str(self))
        return self

    def to_json(self) -> str:
        """Return the report as JSON. Infinite errors, which stand for incomparable values, are null."""
        return json.dumps(_replace_infinite(dataclasses.asdict(self) | {"ok": self.ok}))

    def __str__(self) -> str:
        return format_report(self)


@neutral_device()
def verify(
    compiled: nn.Module,
    reference: nn.Module,
    inputs: ExampleInputs,
    *,
    dtype: torch.dtype | None = None,
    grads: bool = True,
    seeds: Sequence[int] = (0,),
    loss: Callable[[Any], Tensor] | None = None,
    routings: bool = True,
    token_counts: Sequence[int] | None = None,
    modes: Sequence[str] = (),
) -> VerifyReport:
    """Compare a compiled model with its reference.

    Compares outputs, gradients of inputs and of every parameter, buffers, and other state after the call. The original
    in float64 is the truth; `comparison.policy` states the rule. Runs copies in the models' own modes and under the
    active autocast. The models keep their `.grad`, buffers, modes and attributes, and the random state is restored.

    More calls follow in the same copies, to expose state that a call leaves behind. Their inputs cut, repeat and
    reorder the tokens of the first:

    - the given count with gaps between rows, forward only;
    - one smaller count on transposed inputs, and one larger count, with gradients;
    - four small counts, forward only.

    `report.covered` lists these calls, and `report.not_covered` the calls that the original rejects.

    Args:
        compiled: the result of `compile`, of `rewrite_graph` or of `torch.compile(model, backend="moefx")`. If
            `torch.compile` or `module.compile` compiled the model or its modules, copies are compiled in the same way.
        reference: the original, or a copy of it.
        inputs: a tuple of positional or a dict of keyword arguments, one tensor, or a list of these (several
            shapes).
        dtype: precision to verify in; None for the models' own. Half precision hides errors below its rounding, so
            verify in float64 too.
        grads: also compare gradients. Without a mesh and `torch.compile`, this includes a second backward with
            cotangents of stride 0. False runs under `torch.no_grad()`.
        seeds: seeds of the models' random numbers and of the cotangents; one comparison per seed.
        loss: `loss(output) -> scalar` to differentiate; by default every output gets a random cotangent.
        routings: also compare each block on hidden states that starve most experts, and on unrelated ones.
        token_counts: token counts of the later calls. None draws them by the first seed, one of them above 1024 if the
            model is small. () skips later calls.
        modes: more modes to compare in: "train", "eval", "no_grad", "inference_mode", or two as in "eval+no_grad".

    Raises:
        InvalidInput: an option has an invalid value, a model is on the meta device, the models differ in structure,
            the reference rejects the inputs, or no gradient passes through `loss`. Over a mesh, every rank must call
            with the same options, and ranks that share their tokens (`Plan(sequence_axis=...)`) with the same inputs.
    """
    seeds, token_counts = _check_options(dtype, grads, seeds, loss, token_counts)
    loss = loss and functools.partial(_compute_loss, loss)
    recipes, parts = _check_models(compiled, reference)
    further_modes, compiled, reference = parse_modes(modes), unwrap_model(compiled), unwrap_model(reference)
    if is_graph(compiled, reference) and any(mode.training is not None for mode in further_modes):
        raise InvalidInput("verify: a graph keeps its mode of capture; modes can be no_grad or inference_mode only")
    shares = find_shares(compiled)
    if any(f.watch is not None and f.watch.is_parallelized for f in find_rewritten_blocks(compiled).values()):
        raise InvalidInput("verify compares blocks one by one, and FSDP gathers their parameters in calls of the whole "
                           "model only: call moefx.verify before moefx.parallelize")  # fmt: skip
    try:
        sets = _check_inputs(compiled, reference, inputs)
    except InvalidInput as error:
        if shares is not None:
            shares.check_same_settings(f"{type(error).__name__}: {error}")
        raise
    if shares is not None:
        settings = {
            "sets of inputs": len(sets), "seeds": len(seeds), "dtype": dtype, "grads": grads, "routings": routings,
            "token_counts": token_counts, "modes": modes,
        }  # fmt: skip
        shares.check_same_settings(", ".join(f"{setting}: {value}" for setting, value in settings.items()))
        shares.check_tokens(sets)
    if recipes and not find_rewritten_blocks(compiled):
        backend = find_backend()
        assert backend is not None  # it found the recipes
        traced_verifier = backend.verify(
            compiled, recipes, reference, sets, dtype=dtype, grads=grads, seeds=seeds, loss=loss, routings=routings,
            token_counts=token_counts, modes=further_modes,
        )  # fmt: skip
        traced_verifier.compare_compiled_copy(
            _select_runnable_parts(parts, recipes), sets, traced_verifier.build_options(seeds[0], grads, loss)
        )
        return _build_report(traced_verifier)
    rows: list[Row] = []
    verifier = ModelVerifier(compiled, reference, dtype, shares)
    if _find_regions(compiled, reference):
        # The reference has no modules for a graph's regions. First compare the graph with original regions to the
        # reference, then the rewritten graph to the graph with original regions.
        own_dtypes = {p.dtype for p in compiled.parameters() if p.is_floating_point()}
        if dtype is not None and own_dtypes and dtype not in own_dtypes:
            raise InvalidInput(
                f"verify: the graph was rewritten for {', '.join(sorted(map(str, own_dtypes)))} only; to compare in "
                f"{dtype}, rewrite the graph of a model in {dtype}"
            )
        original_copy = copy_with_original_regions(compiled)
        graph_verifier = ModelVerifier(original_copy, reference, dtype, shares)
        graph_verifier.compare_models(sets, seeds, grads, loss, routings=False)
        rows = [dataclasses.replace(row, block="(graph)") for row in graph_verifier.rows if row.kind != "path"]
        verifier = ModelVerifier(compiled, original_copy, dtype, shares)
    verifier.compare_models(sets, seeds, grads, loss, routings, token_counts, further_modes)
    verifier.compare_compiled_copy(
        _select_runnable_parts(parts, recipes), sets, verifier.build_options(seeds[0], grads, loss)
    )
    return _build_report(verifier, rows)


def _check_options(
    dtype: Any, grads: Any, seeds: Any, loss: Any, token_counts: Any
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Check the options of `verify`. Returns the seeds and the token counts.

    Raises:
        InvalidInput: an option has an invalid value.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInput(f"verify: dtype={dtype!r}: expected a dtype of floating point numbers, or None")
    if type(grads) is not bool:
        raise InvalidInput(f"verify: grads={grads!r}: expected True or False")
    if loss is not None and not callable(loss):
        raise InvalidInput(f"verify: loss is a {type(loss).__name__}; expected a function loss(output), or None")
    checked_seeds = _read_integers(seeds, 0, (1 << 32) - 1)
    if not checked_seeds:
        raise InvalidInput(
            f"verify: seeds={seeds!r}: expected numbers from 0 to 2**32 - 1 in a tuple, (0, 1) for example"
        )
    counts = () if token_counts is None else _read_integers(token_counts, 1, sys.maxsize)
    if counts is None:
        raise InvalidInput(
            f"verify: token_counts={token_counts!r}: expected numbers of tokens in a tuple, each 1 or more, or None"
        )
    return checked_seeds, None if token_counts is None else counts


def _compute_loss(loss: Callable[[Any], Tensor], output: Any) -> Tensor:
    """Return the user's loss of an output.

    Raises:
        InvalidInput: the loss is no tensor, or no gradient passes through it to the output.
    """
    value = loss(output)
    if not isinstance(value, Tensor):
        raise InvalidInput(f"verify: loss(output) returned a {type(value).__name__}, expected a tensor")
    if not value.requires_grad and any(isinstance(t, Tensor) and t.requires_grad for _, t in leaves(output)):
        raise InvalidInput(
            "verify cannot compare gradients: the tensor from loss(output) requires none. Compute it from the output "
            "without detach() and item(), or pass grads=False"
        )
    return value


def _read_integers(values: Any, smallest: int, largest: int) -> tuple[int, ...] | None:
    """Return integers in a tuple; None if an element is no integer or out of range, or if nothing can be iterated."""
    if not isinstance(values, Iterable):
        return None
    integers = tuple(values)
    return integers if all(type(i) is int and smallest <= i <= largest for i in integers) else None


def _check_models(
    compiled: nn.Module, reference: nn.Module
) -> tuple[Mapping[str, BackendRecipe], dict[str, CompiledPart]]:
    """Check the order and the kind of the models.

    Returns:
        The parts of the compiled model that the backend compiled, and all parts that `torch.compile` compiled.
    """
    for model in (compiled, reference):
        if not isinstance(model, nn.Module):
            raise InvalidInput(
                f"verify: got a {type(model).__name__}, which has no parameters to compare; wrap a function in a "
                "torch.nn.Module that holds its weights"
            )
    recipes, parts = _find_recipes(compiled), find_compiled_parts(compiled)
    if blocks := find_rewritten_blocks(reference):
        raise InvalidInput(
            f"verify: the reference, a {type(reference).__name__}, is compiled itself: its block "
            f"{next(iter(blocks))!r} is rewritten. Pass the result of moefx.compile first, then "
            "the original model: verify(compiled, model, inputs)"
        )
    if not recipes and _find_recipes(reference) and not find_rewritten_blocks(compiled):
        raise InvalidInput("verify: the arguments are swapped; pass the compiled model first, then the reference")
    if unwrap_model(compiled) is not compiled and not parts:
        raise InvalidInput(
            f"verify: cannot read how torch {torch.__version__} compiled the {type(unwrap_model(compiled)).__name__}; "
            "pass the model that torch.compile was called on"
        )
    if parts and not recipes and not find_rewritten_blocks(unwrap_model(compiled)):
        raise InvalidInput("verify: the backend of torch.compile is not 'moefx', so no block is rewritten")
    return recipes, parts


def _find_recipes(model: nn.Module) -> Mapping[str, BackendRecipe]:
    """Return the parts of a model that `torch.compile(..., backend="moefx")` compiled, by name."""
    backend = find_backend()
    return backend.find_recipes(model) if backend is not None else {}


def _select_runnable_parts(
    parts: Mapping[str, CompiledPart], recipes: Mapping[str, BackendRecipe]
) -> dict[str, CompiledPart]:
    """Return the parts to compile copies of. Empty if all run eagerly, because eager graphs are compared anyway."""
    runnable = dict(parts)
    for name, recipe in recipes.items():
        if name in parts:
            runnable[name] = recipe.part._replace(compiler=recipe.compile)
    return {} if all(part.name == "eager" for part in runnable.values()) else runnable


def _build_report(verifier: ModelVerifier, rows: Sequence[Row] = ()) -> VerifyReport:
    block, failing_pass = verifier.first or (None, None)
    notes = tuple(dict.fromkeys(verifier.notes))
    return VerifyReport(
        (*rows, *verifier.rows), tuple(verifier.routing), block, failing_pass, notes, tuple(verifier.covered),
        tuple(dict.fromkeys(verifier.not_covered)),
    )  # fmt: skip


def _find_regions(compiled: nn.Module, reference: nn.Module) -> list[str]:
    modules = dict(reference.named_modules())
    return [n for n in find_rewritten_blocks(compiled) if n not in modules and is_region(compiled.get_submodule(n))]


def _check_inputs(compiled: nn.Module, reference: nn.Module, inputs: Any) -> list[Inputs]:
    """Parse the sets of inputs, and check that the models can be compared on them."""
    if any(p.is_meta for m in (compiled, reference) for p in (*m.parameters(), *m.buffers())):
        raise InvalidInput("verify: a model is on the meta device; give it weights, for example with to_empty()")
    sets = _parse_inputs(inputs)
    known_names = {*dict(reference.named_modules()), *_find_regions(compiled, reference)}
    missing = [name for name in find_rewritten_blocks(compiled) if name not in known_names]
    if missing:
        raise InvalidInput(f"verify: the reference has no module {missing[0]!r}; pass the model that was compiled")
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
    parameters = dict(compiled.named_parameters(remove_duplicate=False))
    for name, expected in reference.named_parameters(remove_duplicate=False):
        if name in parameters and parameters[name].shape != expected.shape:
            raise InvalidInput(
                f"verify: {name} has shape {tuple(parameters[name].shape)} in the compiled model and "
                f"{tuple(expected.shape)} in the reference, which must be the model that was compiled, or a copy of it"
            )


def _replace_infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_infinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_infinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
