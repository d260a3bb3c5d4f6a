"""What `torch.compile(model, backend="moefx")` runs, beside the original.

What it made cannot be copied, nor run in another precision. So a sandbox of the model is compiled again, by the same
plan, and its graphs run as moefx hands them on: there routing can be followed, and each region be run beside the nodes
that it stands for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from .._plan import Plan
from ..graphs.rewriting import rewritten
from ..inspection.explain import together
from ..runtime.module import BlockForward, rewritten_blocks
from ..survey import Refusal
from .routing import Scope
from .sandbox import Inputs, Options, mapped
from .verifying import Verifying, add_calls, paths, with_original_regions

_LIMITS = {"recompile_limit": 1 << 10, "accumulated_recompile_limit": 1 << 12}
# What is compiled here does not count among what the user's calls may compile.
_ALONE = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}


class Way(NamedTuple):
    """How a module was compiled: by which plan, `torch.compile`'s `dynamic`, and what the graphs are handed to.

    `is_wrapped`: `torch.compile(module)` did it, not `module.compile()`. Of modules of torch's own, a Sequential say,
    Dynamo takes the whole in one case and their parts in the other."""

    plan: Plan
    dynamic: bool | None
    rest: str
    is_wrapped: bool = False


def verify_traced(
    model: nn.Module,
    ways: Mapping[str, Way],
    reference: nn.Module,
    sets: Sequence[Inputs],
    *,
    dtype: torch.dtype | None,
    grads: bool,
    seeds: Sequence[int],
    loss: Callable[[Any], torch.Tensor] | None,
    routings: bool,
) -> Verifying:
    """Compare as `verify` does.

    Args:
        model: the one that `torch.compile` was called on. ways: how, of it ("") or of modules of it.
    """
    graphs = _Graphs(ways)
    whole = Verifying(model, reference, dtype, watch=graphs.watch, call=graphs.run)
    for i, inputs in enumerate(sets):
        for seed in seeds:
            graphs.calls, case = {}, f"inputs {i}, seed {seed}"
            whole.model(inputs, Options(seed, grads, loss), case)
            for out, calls in graphs.calls.items():
                regions = Verifying(out, with_original_regions(out), dtype)
                regions.blocks(calls, Options(seed, grads), case, routings)
                _take(whole, regions)
    whole.rows += paths(graphs.ran, "no graph of it has a region: nothing of moefx ran")
    whole.notes += [f"left as it was: {refusal}" for refusal in together(graphs.refused.values())]
    if rest := ", ".join(sorted({way.rest for way in ways.values()} - {"eager"})):
        whole.notes.append(f"the graphs ran as moefx hands them on; what {rest} makes of them did not run")
    return whole


def _take(whole: Verifying, regions: Verifying) -> None:
    """By the names that `blocks` has for them."""
    names = {name: forward.name for name, forward in rewritten_blocks(regions.compiled).items()}
    whole.rows += [dataclasses.replace(row, block=names[row.block]) for row in regions.rows]
    whole.routing += [dataclasses.replace(row, block=names[row.block]) for row in regions.routing]
    whole.notes += regions.notes
    if whole.first is None and regions.first is not None:
        name, broken = regions.first
        whole.first = names[name], broken


class _Graphs:
    """Runs a sandbox as Dynamo and moefx have it.

    Attributes:
        calls: what the regions of each graph were given in the first call of it, by their names in the graph.
        ran: how many calls of each region ran rewritten, and the original. refused: regions that were left, and why.
    """

    def __init__(self, ways: Mapping[str, Way]):
        self.ways = ways
        self.scope = Scope()
        self.calls: dict[fx.GraphModule, dict[str, Inputs]] = {}
        self.ran: dict[str, Counter[str]] = {}
        self.refused: dict[str, Refusal] = {}

    def watch(self, box: nn.Module, scope: Scope) -> dict[str, BlockForward]:
        self.scope = scope
        return {}

    def run(self, box: nn.Module, *args: Any, **kwargs: Any) -> Any:
        modes = _get_current_dispatch_mode_stack()
        with _disable_current_modes(), torch._dynamo.config.patch(_LIMITS):  # Dynamo would compile nothing under them
            for name, way in self.ways.items():
                how: dict[str, Any] = {"backend": self._backend(way.plan, modes), "dynamic": way.dynamic, **_ALONE}
                if way.is_wrapped:
                    return torch.compile(box, **how)(*args, **kwargs)
                box.get_submodule(name).compile(**how)
            return box(*args, **kwargs)

    def _backend(self, plan: Plan, modes: Sequence[Any]) -> Callable[..., Any]:
        def compiled(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            out, found = rewritten(gm, example_inputs, plan)
            self.refused |= {str(r): r for f in found.every() for r in f.refused}
            return lambda *values: self._run_graph(out, values, modes)

        return compiled

    def _run_graph(self, out: fx.GraphModule, values: tuple[Any, ...], modes: Sequence[Any]) -> Any:
        forwards = rewritten_blocks(out)
        before = {name: copy.copy(forward.counts) for name, forward in forwards.items()}
        calls = self.calls.setdefault(out, {})
        with contextlib.ExitStack() as stack:
            for name, forward in forwards.items():
                stack.enter_context(self._watched(forward, name, calls))
            for mode in modes:
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
                    own = mapped(args, lambda _, t: t if isinstance(t, nn.Parameter) else t.detach().clone())
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
