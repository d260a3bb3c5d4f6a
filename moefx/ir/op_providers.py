"""The providers of each op, and the choice between them.

A call runs the provider of the highest rank that supports its arguments; the reference supports all. Every call is
counted, so that tests and `explain` can report it:

    counters()                 {("expert_mlp", "segments"): 12, ...}
    weight_paths()             {"view": 12, "separate": 0, ...}: how lists of expert weights were read
    with force("expert_mlp", "reference"): ...

Providers live above this module, in `moefx.lowering`. They are loaded before the first call, so that importing the
dialect stays cheap.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InvalidPlan

if TYPE_CHECKING:
    from .ops.op_definition import Op

registry: dict[str, Op] = {}
_loaders: list[Callable[[], object]] = []

_calls: Counter[tuple[str, str]] = Counter()
_paths: Counter[str] = Counter()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        self.is_compiling = False  # see `compile_ahead`


_thread = _Thread()
_compilers: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}
_kernels: list[KernelReport] = []
# Process-wide, because on a GPU the backward runs in autograd's own threads.
_forced: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Provider:
    """One implementation of an op; `supports` gets the op's own arguments."""

    name: str
    run: Callable[..., Any]
    supports: Callable[..., bool]
    rank: int


def load_before_first_choice(load: Callable[[], object]) -> None:
    """Call `load`, which registers providers, once before the first op runs."""
    _loaders.append(load)


@functools.cache
def _load() -> None:
    for load in _loaders:
        load()


def choose_provider(op: Op, args: Any, kwargs: Any) -> Provider:
    """Return the provider for these arguments, and count the call."""
    _load()
    if op.name in _forced:
        provider = op.providers[_forced[op.name]]
    else:
        provider = _find_supporting(op, args, kwargs)
    if _thread.is_compiling:
        return _compile_only(op, provider) if provider.name in _compilers else provider
    _calls[op.name, provider.name] += 1
    return provider


def _find_supporting(op: Op, args: Any, kwargs: Any) -> Provider:
    for provider in reversed(op.providers.values()):
        if provider.supports(*args, **kwargs):
            return provider
    raise AssertionError('"reference" supports everything')


def register_compiler(provider: str, compile_ahead: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Let `compile_ahead` compile the kernels of a provider.

    Args:
        compile_ahead: returns a context in which the provider's code launches no kernel, and at whose end the skipped
            kernels are compiled.
    """
    _compilers[provider] = compile_ahead


@contextlib.contextmanager
def compile_ahead() -> Iterator[bool]:
    """Compile the kernels of all ops that this thread calls in this context, together, so that their first real calls
    need not wait. The calls return the results of the reference, and are not counted.

    Yields:
        Whether a provider has a compiler. If not, calling ops has no effect.
    """
    _load()
    with contextlib.ExitStack() as stack:
        for make_context in _compilers.values():
            stack.enter_context(make_context())
        _thread.is_compiling = True
        try:
            yield bool(_compilers)
        finally:
            _thread.is_compiling = False


def _compile_only(op: Op, provider: Provider) -> Provider:
    def run(*args: Any, **kwargs: Any) -> Any:
        provider.run(*args, **kwargs)
        return op.reference(*args, **kwargs)

    return dataclasses.replace(provider, run=run)


class KernelReport(NamedTuple):
    """What a provider says about its kernels.

    Attributes:
        explain_unsupported: returns the reason why the kernels do not run an `ExpertBody`, given as JSON text, with
            up-projections of these widths; None if they do.
        list_configurations: returns a line for each configuration that this process used so far.
    """

    explain_unsupported: Callable[[str, tuple[int, ...] | None], str | None]
    list_configurations: Callable[[], Sequence[str]]


def register_kernels(report: KernelReport) -> None:
    """Let `explain` report the kernels of a provider."""
    _kernels.append(report)


def explain_unsupported(body: str, widths: tuple[int, ...] | None) -> str:
    """Return the reasons why kernels do not run an expert body; "" if all do. See `KernelReport`."""
    _load()
    return "; ".join(filter(None, (report.explain_unsupported(body, widths) for report in _kernels)))


def list_configurations() -> tuple[str, ...]:
    """Return the configurations of kernels that this process used so far, with their reasons."""
    return tuple(line for report in _kernels for line in report.list_configurations())


def counters() -> dict[tuple[str, str], int]:
    """Return the number of calls since the last reset, by (op, provider)."""
    return dict(_calls)


def weight_paths() -> dict[str, int]:
    """Return how often GEMM weights were read in each way since the last reset.

    "stacked": one stacked tensor. "separate": E tensors, one by one. "view": E tensors, equally spaced in one storage,
    as one strided view. "table": E tensors, through a table of their addresses. "stacked_copy": E tensors, copied into
    a stack for the call. "cast" counts in addition, if autocast changes the dtype for the call.
    """
    return dict(_paths)


def thread_weight_paths() -> Counter[str]:
    """Return the counts of `weight_paths` for this thread, since the thread started."""
    return _thread.paths.copy()


def count_weight_path(path: str, times: int = 1) -> None:
    _paths[path] += times
    _thread.paths[path] += times


def reset_counters() -> None:
    _calls.clear()
    _paths.clear()


@contextlib.contextmanager
def force(op: str, provider: str) -> Iterator[None]:
    """Run this provider for every call of the op, in all threads. The backward op has its own name.

    Raises:
        InvalidPlan: the op or the provider does not exist.
    """
    _check(op, provider)
    before = _forced.get(op)
    _forced[op] = provider
    try:
        yield
    finally:
        _forced.pop(op)
        if before is not None:
            _forced[op] = before


def _check(op: str, provider: str, prefix: str = "") -> None:
    _load()
    if op not in registry:
        raise InvalidPlan(f"{prefix}no op moefx::{op}; there are {', '.join(sorted(registry))}")
    if provider not in registry[op].providers:
        names = ", ".join(registry[op].providers)
        raise InvalidPlan(f"{prefix}moefx::{op} has no provider {provider!r}; it has {names}")


def prefer_providers(setting: str) -> None:
    """Give the highest rank to the providers that `MOEFX_PROVIDERS` names, for ops and their backwards, in the whole
    process: `"expert_mlp=grouped_mm,build_pft=reference"`. Calls that they do not support, such as the proofs' float64,
    still go to other providers.

    Raises:
        InvalidPlan: the op or the provider does not exist.
    """
    for item in filter(None, setting.split(",")):
        op, _, provider = item.strip().partition("=")
        _check(op, provider, f"MOEFX_PROVIDERS={setting}: ")
        for name in (op, f"{op}_backward"):
            if name in registry and provider in registry[name].providers:
                providers = registry[name].providers
                providers[provider] = dataclasses.replace(providers.pop(provider), rank=sys.maxsize)  # first choice
