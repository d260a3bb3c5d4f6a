"""Verify `torch.compile(model, backend="moefx")` against the original.

A compiled model can neither be copied nor run in another precision. So a sandbox of the model is compiled again with
the same plan, and the rewritten graphs run eagerly. There the routing can be recorded, and each region can be compared
with its original nodes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._functorch import config as functorch
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ..._plan import Plan
from ...comparison.compare import CallChain
from ...comparison.routing_tape import Scope
from ...comparison.sandbox import Inputs, RunOptions, change_tensors
from ...compiler.survey_result import Refusal
from ...inspection.explain import merge_refusals
from ...runtime.block_forward import BlockForward, find_rewritten_blocks
from ...verification.compiled_parts import CompiledCopies, CompiledPart, allow_recompiles
from ...verification.model_verifier import (
    LATER_CALLS,
    ModelVerifier,
    add_calls,
    build_path_rows,
    copy_with_original_regions,
)
from ...verification.modes import Mode
from ..fx.graph_rewrite import rewrite_regions


class BackendRecipe(NamedTuple):
    """How a module was compiled.

    Attributes:
        plan: the plan of the backend.
        inner_compiler: the compiler that receives the rewritten graphs.
        part: torch's record of the compilation.
    """

    plan: Plan
    inner_compiler: Callable[..., Any]
    part: CompiledPart

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph as the backend does, without logs and without records for `explain`."""
        out, _ = rewrite_regions(gm, list(example_inputs), self.plan)
        with keeping_saved_tensors() if out is not gm else contextlib.nullcontext():
            return self.inner_compiler(out, example_inputs)


@contextlib.contextmanager
def keeping_saved_tensors() -> Iterator[None]:
    """Compile backwards that do not reuse the memory of saved tensors.

    Inductor may load a backward from its disk cache that was compiled for a single use. With `retain_graph` torch must
    reject such a backward, but its check is stored with the whole graph, which is not cached here. `torch._functorch`
    is private; torch's own error message names `donated_buffer`.
    """
    with functorch.patch(donated_buffer=False):
        yield
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []  # an empty list means none; None means unknown


def verify_traced(
    model: nn.Module,
    recipes: Mapping[str, BackendRecipe],
    reference: nn.Module,
    sets: Sequence[Inputs],
    *,
    dtype: torch.dtype | None,
    grads: bool,
    seeds: Sequence[int],
    loss: Callable[[Any], torch.Tensor] | None,
    routings: bool,
    token_counts: Sequence[int] | None,
    modes: Sequence[Mode],
) -> ModelVerifier:
    """Compare as `verify` does.

    Args:
        model: the model that `torch.compile` was called on.
        recipes: the recipes of the compiled modules, by name; "" is the model.
    """
    graphs = _GraphRunner(recipes)
    verifier = ModelVerifier(model, reference, dtype, watch=graphs.watch, call=graphs.run, is_costly=True)
    verifier.not_covered.append("a second backward: graphs of torch.compile may not support it")

    def compare_whole_and_regions(
        inputs: Inputs, options: RunOptions, case: str, routings: bool
    ) -> tuple[CallChain, bool]:
        graphs.calls = {}
        chain, is_right = verifier.compare_model(inputs, options, case)
        for out, calls in graphs.calls.items():
            regions = ModelVerifier(out, copy_with_original_regions(out), dtype)
            regions.compare_blocks(calls, dataclasses.replace(options, loss=None), case, routings)
            _merge_regions(verifier, regions)
        return chain, is_right

    for i, inputs in enumerate(sets):
        for seed in seeds:
            options, case = RunOptions(seed, grads, loss), f"inputs {i}, seed {seed}"
            chain, is_right = compare_whole_and_regions(inputs, options, case, routings)
            if i == 0 and seed == seeds[0] and is_right:
                verifier.compare_later_calls(chain, inputs, dataclasses.replace(options, loss=None), case, token_counts)
            elif i == 0 and seed == seeds[0]:
                verifier.not_covered.append(LATER_CALLS)
        for mode in modes:
            compare_whole_and_regions(
                inputs, mode.apply_to(RunOptions(seeds[0], grads, loss)), f"inputs {i}, seed {seeds[0]}, {mode}", False
            )
            verifier.covered.append(f"mode {mode}")
    verifier.rows += build_path_rows(graphs.ran, "no graph of the model has a region: nothing of moefx ran")
    verifier.notes += [f"not rewritten: {refusal}" for refusal in merge_refusals(graphs.refused.values())]
    return verifier


def _merge_regions(verifier: ModelVerifier, regions: ModelVerifier) -> None:
    """Add the results of regions, under the regions' names in the model."""
    names = {name: forward.name for name, forward in find_rewritten_blocks(regions.compiled).items()}
    verifier.rows += [dataclasses.replace(row, block=names[row.block]) for row in regions.rows]
    verifier.routing += [dataclasses.replace(row, block=names[row.block]) for row in regions.routing]
    verifier.notes += regions.notes
    if verifier.first is None and regions.first is not None:
        name, pass_at_fault = regions.first
        verifier.first = names[name], pass_at_fault


class _GraphRunner:
    """Compiles sandboxes with Dynamo and runs their rewritten graphs.

    Attributes:
        calls: for each graph, the inputs of its regions in the first call, by their names in the graph.
        ran: for each region, the numbers of calls that ran rewritten and original.
        refused: refusals by their text.
    """

    def __init__(self, recipes: Mapping[str, BackendRecipe]):
        self.recipes = recipes
        self.copies: weakref.WeakKeyDictionary[nn.Module, CompiledCopies] = weakref.WeakKeyDictionary()
        self.modes: list[Any] = []  # the dispatch modes of the current call
        self.scope = Scope()
        self.calls: dict[fx.GraphModule, dict[str, Inputs]] = {}
        self.ran: dict[str, Counter[str]] = {}
        self.refused: dict[str, Refusal] = {}

    def watch(self, box: nn.Module, scope: Scope) -> dict[str, BlockForward]:
        self.scope = scope
        return {}

    def run(self, box: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.modes = _get_current_dispatch_mode_stack()
        with _disable_current_modes(), allow_recompiles():  # Dynamo does not compile under modes
            if box not in self.copies:
                parts = {
                    n: recipe.part._replace(compiler=self._make_backend(recipe.plan))
                    for n, recipe in self.recipes.items()
                }
                self.copies[box] = CompiledCopies(parts)
            return self.copies[box](box, *args, **kwargs)

    def _make_backend(self, plan: Plan) -> Callable[..., Any]:
        def compiled(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            out, regions = rewrite_regions(gm, example_inputs, plan)
            self.refused |= {str(r): r for f in regions.flatten() for r in f.refused}
            return lambda *values: self._run_graph(out, values)

        return compiled

    def _run_graph(self, out: fx.GraphModule, values: tuple[Any, ...]) -> Any:
        forwards = find_rewritten_blocks(out)
        before = {name: copy.copy(forward.counts) for name, forward in forwards.items()}
        calls = self.calls.setdefault(out, {})
        with contextlib.ExitStack() as stack:
            for name, forward in forwards.items():
                stack.enter_context(self._watch_region(forward, name, calls))
            for mode in self.modes:
                stack.enter_context(mode)
            result = out(*values)
        for name, forward in forwards.items():
            add_calls(self.ran.setdefault(forward.name, Counter()), forward.counts, before[name])
        return result

    @contextlib.contextmanager
    def _watch_region(self, forward: BlockForward, name: str, calls: dict[str, Inputs]) -> Iterator[None]:
        """Record when a region runs, and the inputs of its first call. Parameters among them are not copied."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.scope.region = forward.name
            if name not in calls:
                with _disable_current_modes():
                    copied = change_tensors(args, lambda _, t: t if isinstance(t, nn.Parameter) else t.detach().clone())
                calls[name] = copied, {}

        def after(*_: Any) -> None:
            self.scope.region = None

        block = forward.block
        hooks = block.register_forward_pre_hook(before), block.register_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
