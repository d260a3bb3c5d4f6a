"""What `torch.compile(model, backend="moefx")` runs, beside the original.

What it made cannot be copied, nor run in another precision. So a sandbox of the model is compiled again, by the same
plan, and its graphs run as moefx hands them on: there routing can be followed, and each region be run beside the nodes
that it stands for.
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

from .._plan import Plan
from ..comparison.compare import CallChain
from ..comparison.routing_tape import Scope
from ..comparison.sandbox import Inputs, Options, map_tensors
from ..compiler.survey import Refusal
from ..frontends.fx.graph_rewrite import rewritten
from ..inspection.explain import merge_refusals
from ..runtime.module import BlockForward, rewritten_blocks
from .compiled_parts import CompiledCopies, CompiledPart, allow_recompiles
from .modes import Mode
from .verifying import LATER_CALLS, ModelVerifier, add_calls, build_path_rows, copy_with_original_regions


class BackendRecipe(NamedTuple):
    """How a module was compiled: by which plan, what the graphs are handed to, and what torch knows of that."""

    plan: Plan
    inner_compiler: Callable[..., Any]
    part: CompiledPart

    def compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What the backend makes of a graph; nothing is logged or kept for `explain`."""
        out, _ = rewritten(gm, list(example_inputs), self.plan)
        with keeping_saved_tensors() if out is not gm else contextlib.nullcontext():
            return self.inner_compiler(out, example_inputs)


@contextlib.contextmanager
def keeping_saved_tensors() -> Iterator[None]:
    """Have a backward overwrite none of the tensors that are saved for it.

    Inductor finds compiled graphs on disk by what they compute: a backward that was compiled for one use, with
    `retain_graph` too. What torch raises then is kept with the whole graph, and these have modules in which no cache
    of whole graphs looks. (`torch._functorch` is private; `donated_buffer` is what torch's own message names.)
    """
    with functorch.patch(donated_buffer=False):
        yield
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []  # none, and not: not known


def verify_traced(
    model: nn.Module,
    ways: Mapping[str, BackendRecipe],
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
        model: the one that `torch.compile` was called on. ways: how, of it ("") or of modules of it.
    """
    graphs = _GraphRunner(ways)
    whole = ModelVerifier(model, reference, dtype, watch=graphs.watch, call=graphs.run, is_costly=True)
    whole.not_covered.append("a second backward: of graphs of torch.compile it may not be asked")

    def both(inputs: Inputs, options: Options, case: str, routings: bool) -> tuple[CallChain, bool]:
        graphs.calls = {}
        chain, is_right = whole.compare_model(inputs, options, case)
        for out, calls in graphs.calls.items():
            regions = ModelVerifier(out, copy_with_original_regions(out), dtype)
            regions.compare_blocks(calls, dataclasses.replace(options, loss=None), case, routings)
            _merge_regions(whole, regions)
        return chain, is_right

    for i, inputs in enumerate(sets):
        for seed in seeds:
            options, case = Options(seed, grads, loss), f"inputs {i}, seed {seed}"
            chain, is_right = both(inputs, options, case, routings)
            if i == 0 and seed == seeds[0] and is_right:
                whole.compare_later_calls(chain, inputs, dataclasses.replace(options, loss=None), case, token_counts)
            elif i == 0 and seed == seeds[0]:
                whole.not_covered.append(LATER_CALLS)
        for mode in modes:
            both(inputs, mode.apply_to(Options(seeds[0], grads, loss)), f"inputs {i}, seed {seeds[0]}, {mode}", False)
            whole.covered.append(f"mode {mode}")
    whole.rows += build_path_rows(graphs.ran, "no graph of it has a region: nothing of moefx ran")
    whole.notes += [f"left as it was: {refusal}" for refusal in merge_refusals(graphs.refused.values())]
    return whole


def _merge_regions(whole: ModelVerifier, regions: ModelVerifier) -> None:
    """By the names that `blocks` has for them."""
    names = {name: forward.name for name, forward in rewritten_blocks(regions.compiled).items()}
    whole.rows += [dataclasses.replace(row, block=names[row.block]) for row in regions.rows]
    whole.routing += [dataclasses.replace(row, block=names[row.block]) for row in regions.routing]
    whole.notes += regions.notes
    if whole.first is None and regions.first is not None:
        name, broken = regions.first
        whole.first = names[name], broken


class _GraphRunner:
    """Runs a sandbox as Dynamo and moefx have it.

    Attributes:
        calls: what the regions of each graph were given in the first call of it, by their names in the graph.
        ran: how many calls of each region ran rewritten, and the original. refused: regions that were left, and why.
    """

    def __init__(self, ways: Mapping[str, BackendRecipe]):
        self.ways = ways
        self.copies: weakref.WeakKeyDictionary[nn.Module, CompiledCopies] = weakref.WeakKeyDictionary()
        self.modes: list[Any] = []  # those of the current call
        self.scope = Scope()
        self.calls: dict[fx.GraphModule, dict[str, Inputs]] = {}
        self.ran: dict[str, Counter[str]] = {}
        self.refused: dict[str, Refusal] = {}

    def watch(self, box: nn.Module, scope: Scope) -> dict[str, BlockForward]:
        self.scope = scope
        return {}

    def run(self, box: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.modes = _get_current_dispatch_mode_stack()
        with _disable_current_modes(), allow_recompiles():  # Dynamo would compile nothing under modes
            if box not in self.copies:
                parts = {n: way.part._replace(compiler=self._backend(way.plan)) for n, way in self.ways.items()}
                self.copies[box] = CompiledCopies(parts)
            return self.copies[box](box, *args, **kwargs)

    def _backend(self, plan: Plan) -> Callable[..., Any]:
        def compiled(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            out, found = rewritten(gm, example_inputs, plan)
            self.refused |= {str(r): r for f in found.every() for r in f.refused}
            return lambda *values: self._run_graph(out, values)

        return compiled

    def _run_graph(self, out: fx.GraphModule, values: tuple[Any, ...]) -> Any:
        forwards = rewritten_blocks(out)
        before = {name: copy.copy(forward.counts) for name, forward in forwards.items()}
        calls = self.calls.setdefault(out, {})
        with contextlib.ExitStack() as stack:
            for name, forward in forwards.items():
                stack.enter_context(self._watched(forward, name, calls))
            for mode in self.modes:
                stack.enter_context(mode)
            result = out(*values)
        for name, forward in forwards.items():
            add_calls(self.ran.setdefault(forward.name, Counter()), forward.counts, before[name])
        return result

    @contextlib.contextmanager
    def _watched(self, forward: BlockForward, name: str, calls: dict[str, Inputs]) -> Iterator[None]:
        """Know when a region runs, and keep what it is given first; its weights are the model's."""

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.scope.region = forward.name
            if name not in calls:
                with _disable_current_modes():
                    own = map_tensors(args, lambda _, t: t if isinstance(t, nn.Parameter) else t.detach().clone())
                calls[name] = own, {}

        def after(*_: Any) -> None:
            self.scope.region = None

        block = forward.block
        hooks = block.register_forward_pre_hook(before), block.register_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
