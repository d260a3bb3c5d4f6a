"""Parse the options of `torch.compile(model, backend="moefx")`: a plan, and the compiler of the resulting graphs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast, get_origin

import torch

from ..._plan import Plan
from ...errors import InvalidPlan, nearest
from ..fx.graph_rewrite import check_plan

_EXAMPLE = "expected a dict of fields of a Plan, such as options={'checkpoint': 'x'}"


class BackendOptions(NamedTuple):
    """The parsed options.

    Attributes:
        plan: the plan.
        name: the name of the compiler of the resulting graphs, or the function.
        rest: that compiler, with its own options.
    """

    plan: Plan
    name: str | Callable[..., Any]
    rest: Callable[..., Any]

    @property
    def compiled_by(self) -> str:
        """The name of the compiler of the resulting graphs; "" if they may run eagerly."""
        return self.name if isinstance(self.name, str) and not self.name.startswith("eager") else ""


def parse_options(options: Mapping[str, Any] | None, mode: str | None) -> BackendOptions:
    """Parse the options of the backend.

    Raises:
        InvalidPlan: an unknown or invalid option.
    """
    if not isinstance(options, Mapping | None):
        hint = "; for a Plan use dataclasses.asdict(plan)" if isinstance(options, Plan) else ""
        raise InvalidPlan(f"options is a {type(options).__name__}; {_EXAMPLE}{hint}")
    plan_options = dict(options or {})
    name, backend_options = plan_options.pop("backend", "inductor"), plan_options.pop("backend_options", None)
    fields = {f.name for f in dataclasses.fields(Plan)}
    for option in plan_options:
        if option not in fields:
            if name == "inductor" and option in torch._inductor.list_options():
                raise InvalidPlan(
                    f"options={{{option!r}: ...}}: that is an option of Inductor; "
                    f"options={{'backend_options': {{{option!r}: ...}}}} passes it on"
                )
            known_names = sorted(fields | {"backend", "backend_options"})
            raise InvalidPlan(
                f"options={{{option!r}: ...}}: unknown option; expected one of {', '.join(known_names)}"
                + nearest(str(option), known_names)
            )
    plan = check_plan(Plan(**plan_options))
    return BackendOptions(plan, name, _with_options(_find_compiler(name), name, backend_options, mode))


def _find_compiler(name: Any) -> Callable[..., Any]:
    """Find the compiler of the resulting graphs.

    Raises:
        InvalidPlan: it is unknown, or moefx itself.
    """
    if name == "moefx":
        raise InvalidPlan("options={'backend': 'moefx'}: the compiler of the resulting graph must be another one")
    if callable(name):
        return name
    if not isinstance(name, str):
        raise InvalidPlan(f"options={{'backend': {name!r}}}: expected a name or a function")
    backends = torch.compiler.list_backends(exclude_tags=())
    if name not in backends:
        raise InvalidPlan(
            f"options={{'backend': {name!r}}}: torch has no backend of that name; expected one of {', '.join(backends)}"
            + nearest(name, backends)
        )
    return torch._dynamo.lookup_backend(name)


def _with_options(compiler: Callable[..., Any], name: Any, options: Any, mode: str | None) -> Callable[..., Any]:
    """Bind a compiler to its own options and Inductor's mode."""
    if options is not None and not isinstance(options, Mapping):
        raise InvalidPlan(
            f"options={{'backend_options': {options!r}}}: expected a dict with options of {_quote_compiler(name)}"
        )
    if name == "inductor":
        patches = _check_inductor_options(options or {}) | _mode_options(mode)
        return functools.partial(compiler, config_patches=patches) if patches else compiler
    if options is None:
        return compiler
    try:
        inspect.signature(compiler).bind(None, None, options=options)
    except TypeError:
        raise InvalidPlan(f"options={{'backend_options': ...}}: {_quote_compiler(name)} takes no `options`") from None
    return functools.partial(compiler, options=options)


def _mode_options(mode: str | None) -> dict[str, Any]:
    try:
        return torch._inductor.list_mode_options(mode) if mode else {}
    except RuntimeError as error:
        raise InvalidPlan(f"mode={mode!r}: {error}") from None


def _quote_compiler(name: Any) -> str:
    return repr(name) if isinstance(name, str) else f"the function {getattr(name, '__name__', name)}"


def _check_inductor_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options as `torch.compile(options=...)` does. Returns them under Inductor's names."""
    from torch._inductor import config, list_options

    known_names, kind_of = list_options(), cast(Any, config).get_type
    for option, value in options.items():
        name = str(option).replace("-", "_")
        if name not in known_names:
            raise InvalidPlan(
                f"options={{'backend_options': {{{option!r}: ...}}}}: Inductor has no such option, see "
                f"torch._inductor.list_options(){nearest(name, known_names)}"
            )
        kind = kind_of(name)
        if get_origin(kind) is None and not isinstance(value, kind):
            raise InvalidPlan(
                f"options={{'backend_options': {{{option!r}: {value!r}}}}}: expected a {kind.__name__} for Inductor"
            )
    return {str(option).replace("-", "_"): value for option, value in options.items()}
