"""Bind the arguments of a call to the placeholders of a graph, and describe the call as a specialization.

A call `block(hidden_states, mask, scale=2.0)` is bound to the signature of the block's own forward and flattened into
*leaves*: `(("hidden_states",), tensor)`, `(("mask",), tensor)`, `(("scale",), 2.0)`. An element of a container has a
longer path: `(("kwargs", "pair", 1), tensor)`. A `Binding` maps leaves to placeholders. A `Specialization` holds the
properties that a call must share with the captured one.

All of this runs at each call of a rewritten block, eagerly and under `torch.compile`. So it uses plain tuples, which
Dynamo can trace.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import functools
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .guards.stored_values import is_array
from .passed_objects import is_passed

Path = tuple[Any, ...]
Leaves = list[tuple[Path, Any]]
# The arguments of a call as users pass them: one tensor, positional arguments, or keyword arguments.
ExampleInputs: TypeAlias = "torch.Tensor | Sequence[object] | Mapping[str, object]"


class Specialization(NamedTuple):
    """The kind of call for which a rewritten graph is valid. In a program's key, None admits any value, because the
    capture never read it.

    Attributes:
        training: `block.training`, or None.
        grad: `torch.is_grad_enabled()`, or None.
        autocast: dtype of the enabled autocast on the device of the first tensor; None if autocast is off. None is no
            wildcard here: autocast would cast aten ops that were recorded without it.
        arguments: `(path, kind)` of every leaf, see `describe_leaf`.
    """

    training: bool | None
    grad: bool | None
    autocast: torch.dtype | None
    arguments: tuple[tuple[Path, tuple[Any, ...]], ...]

    @property
    def device(self) -> str:
        """The device type of the first tensor."""
        return next((kind[2] for _, kind in self.arguments if kind[0] == "tensor"), "cpu")

    def admits(self, call: Specialization) -> bool:
        """Return whether a program with this key may run the call."""
        return (
            (self.training is None or self.training == call.training)
            and (self.grad is None or self.grad == call.grad)
            and self.autocast == call.autocast
            and self.arguments == call.arguments
        )

    def __str__(self) -> str:
        modes = [
            "any mode" if self.training is None else ("train" if self.training else "eval"),
            "" if self.grad is None else ("grad" if self.grad else "no_grad"),
            "" if self.autocast is None else f"autocast({_format_dtype(self.autocast)})",
        ]
        arguments = [f"{format_path(path)}: {_format_kind(kind)}" for path, kind in self.arguments]
        return " ".join(mode for mode in modes if mode) + f" ({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True)
class Binding:
    """The argument leaves that feed the placeholders of a graph.

    Attributes:
        paths: one path per placeholder, in the graph's order.
        objects: paths of objects and containers that the graph only passes on to submodules.
    """

    paths: tuple[Path, ...] = ()
    objects: tuple[Path, ...] = ()

    def indices(self, key: Specialization) -> tuple[int, ...]:
        """Return the positions of the placeholders' values among the leaves of a call that `key` admits."""
        position = {path: i for i, (path, _) in enumerate(key.arguments)}
        return tuple(position[path] for path in self.paths)


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition that capture relied on, checked at each call.

    Attributes:
        condition: Python expression over `self` (the block) and the placeholders' names, for example
            `"hidden_states.shape[0] * hidden_states.shape[1] > 4"` or `"self.top_k == 2"`.
        why: the value that the capture read, as one clause for people.
        source: the user's `file.py:line` that read it, or "".
        one_way: the condition selects a branch; a second capture may follow the other branch.
    """

    condition: str
    why: str = ""
    source: str = ""
    one_way: bool = False

    def __str__(self) -> str:
        return f"{self.condition}: {self.why}" + (f" ({self.source})" if self.source else "")


# Packages whose objects are equal if their repr is: fractions, ops, `operator.attrgetter`.
_REPR_IS_VALUE = {"array", "builtins", "datetime", "decimal", "fractions", "operator", "torch", "uuid"}


def describe_leaf(value: Any, depth: int = 4) -> tuple[Any, ...]:
    """Describe a leaf as a hashable tuple: its *kind*.

    A tensor gives `("tensor", dtype, device type, rank)`. A Python value gives its type and value, so that `1`, `True`
    and `1.0` differ. A function gives its name, and captured values if it is local. Any other object gives its content
    if it can be compared, and otherwise its type alone. While Dynamo traces, it always gives its type.
    """
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dtype, value.device.type, value.dim())
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
    ):
        if type(value) in (int, float) and torch.compiler.is_compiling():
            value = next(iter({value: None}))  # a lookup makes Dynamo replace a symbol by its number
        return (type(value).__name__, value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)):  # an activation
        return _describe_function(value, depth)
    if isinstance(value, functools.partial):
        function = describe_leaf(value.func, max(depth - 1, 0))
        if depth <= 0:  # it may hold itself
            return ("partial", function)
        keywords = tuple([(name, describe_leaf(v, depth - 1)) for name, v in value.keywords.items()])
        return ("partial", function, tuple([describe_leaf(v, depth - 1) for v in value.args]), keywords)
    if isinstance(value, (range, slice, set, frozenset)):
        return (type(value).__name__, repr(value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return (type(value).__name__, value.item())
    if depth > 0 and not torch.compiler.is_compiling():
        return _describe_content(value, depth - 1)
    return ("object", type(value).__qualname__)


def _describe_function(value: Any, depth: int) -> tuple[Any, ...]:
    """Return a function's name and line; for a local function or a lambda also its code and captured values."""
    code = getattr(value, "__code__", None)
    kind = ("function", getattr(value, "__module__", ""), value.__qualname__, code and code.co_firstlineno)
    if code is None or depth <= 0 or not (code.co_flags & inspect.CO_NESTED or code.co_name == "<lambda>"):
        return kind
    if torch.compiler.is_compiling():  # Dynamo cannot read closure cells
        return ("object", "function")
    values = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            values.append(cell.cell_contents)
    return (*kind, code.co_code, code.co_names, repr(code.co_consts), *[describe_leaf(v, depth - 1) for v in values])


def _describe_content(value: Any, depth: int) -> tuple[Any, ...]:
    """Return the content of containers, callables, arrays and plain data objects; the type of any other object."""
    name = type(value).__qualname__
    if isinstance(value, (list, tuple, collections.deque)):
        return (name, *[describe_leaf(v, depth) for v in value])
    if isinstance(value, collections.abc.Mapping):
        return (name, *[(repr(key), describe_leaf(v, depth)) for key, v in value.items()])
    if isinstance(value, type):
        return ("class", value.__module__, value.__qualname__)
    if isinstance(value, torch.nn.Module):  # the repr shows its numbers
        plain = [(k, v) for m in value.modules() for k, v in vars(m).items() if isinstance(v, (bool, int, float, str))]
        return ("module", repr(value), tuple(plain))
    if isinstance(value, types.MethodType):
        return ("method", describe_leaf(value.__func__, depth), describe_leaf(value.__self__, depth))
    if hasattr(value, "__wrapped__"):  # `functools.cache`
        return (name, describe_leaf(value.__wrapped__, depth))
    if is_array(value):
        return (name, str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, types.SimpleNamespace) or dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()
        fields = getattr(value, "__dict__", None) or {name: getattr(value, name) for name in names}
        return (name, *[(field, describe_leaf(v, depth)) for field, v in fields.items()])
    is_text = type(value).__repr__ is not object.__repr__ and type(value).__module__.split(".")[0] in _REPR_IS_VALUE
    return (name, repr(value)) if is_text else ("object", name)


def flatten_arguments(named: Iterable[tuple[str, Any]], objects: Collection[Path] = ()) -> Leaves:
    """Flatten bound arguments into leaves. The type of a list, tuple or dict is a leaf too, so that a list and a tuple
    differ. Values at the paths `objects` stay whole."""
    leaves: Leaves = []
    for name, value in named:
        _flatten((name,), value, leaves, objects)
    return leaves


def find_device(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's first parameter or buffer; the CPU if it has none."""
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def specialize_call(block: torch.nn.Module, leaves: Leaves, objects: Collection[Path] = ()) -> Specialization:
    """Return the specialization of a call of `block` with these leaves; every field is concrete. Leaves at the paths
    `objects` are described by their class alone."""
    device = "cpu"
    for _, value in leaves:
        if isinstance(value, torch.Tensor):
            device = value.device.type
            break
    autocast = None
    # torch raises an error for autocast on the meta device.
    if device != "meta" and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    arguments = tuple([(p, _describe_object(v) if p in objects else describe_leaf(v)) for p, v in leaves])
    return Specialization(block.training, torch.is_grad_enabled(), autocast, arguments)


def make_binder(signature: inspect.Signature) -> Callable[..., tuple[tuple[str, Any], ...]]:
    """Make a function with exactly this signature that returns its arguments as `(name, value)` pairs, with defaults
    filled in.

    The function is generated, because `inspect.Signature.bind` costs more than the rest of the call and Dynamo cannot
    trace it. A call that does not fit raises the TypeError of the original forward. Blocks with the same parameters
    share one function, so `torch.compile` compiles repeated layers once.
    """
    parameters, names, defaults = [], [], []
    kind_before = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if kind_before is parameter.POSITIONAL_ONLY and kind is not parameter.POSITIONAL_ONLY:
            parameters.append("/")
        if kind is parameter.KEYWORD_ONLY and kind_before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parameters.append("*")
        text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "") + parameter.name
        if parameter.default is not parameter.empty:
            text += f"=default_{len(defaults)}"
            defaults.append(parameter.default)
        parameters.append(text)
        names.append(parameter.name)
        kind_before = kind
    if kind_before is inspect.Parameter.POSITIONAL_ONLY:
        parameters.append("/")
    return _compile_binder(", ".join(parameters), tuple(names), _IdentityKey(tuple(defaults)))


def make_signature_binder(block: torch.nn.Module) -> Callable[..., tuple[tuple[str, Any], ...]]:
    """Make the binder of the user's forward of a block, rewritten or not."""
    return make_binder(inspect.signature(block.forward))


def format_path(path: Path) -> str:
    """Format a path: `("kwargs", "pair", 1)` -> `"kwargs['pair'][1]"`, `("hidden_states",)` -> `"hidden_states"`."""
    return str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])


def placeholder_name(path: Path) -> str:
    """Return a Python identifier for the placeholder that this path feeds."""
    parts = path[1:] if path[0] in ("args", "kwargs") and len(path) > 1 else path
    name = "_".join(re.sub(r"\W", "_", str(part)) for part in parts)
    return name if name.isidentifier() else f"arg_{name}"


def _describe_object(value: Any) -> tuple[Any, ...]:
    cls = type(value)
    return describe_leaf(value) if value is None else ("object", cls.__module__, cls.__qualname__)


def _flatten(path: Path, value: Any, leaves: Leaves, objects: Collection[Path] = ()) -> None:
    if isinstance(value, torch.Tensor) or path in objects or is_passed(value):
        leaves.append((path, value))
    elif isinstance(value, (list, tuple)):
        # *args is always a tuple; any other container carries its type.
        if path != ("args",):
            leaves.append(((*path, "<type>"), type(value).__name__))
        for i, item in enumerate(value):
            _flatten((*path, i), item, leaves, objects)
    elif type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        if len(path) > 1 or type(value) is not dict:
            leaves.append(((*path, "<type>"), type(value).__name__))
        for key, item in value.items():
            _flatten((*path, key), item, leaves, objects)
    else:
        leaves.append((path, value))


@dataclasses.dataclass(frozen=True, eq=False)
class _IdentityKey:
    """Default values, compared by identity so that unhashable ones can take part in a cache key."""

    values: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.values)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and tuple(map(id, self.values)) == tuple(map(id, other.values))


@functools.lru_cache(maxsize=1024)
def _compile_binder(
    parameters: str, names: tuple[str, ...], defaults: _IdentityKey
) -> Callable[..., tuple[tuple[str, Any], ...]]:
    pairs = ", ".join(f"({name!r}, {name})" for name in names)
    scope: dict[str, Any] = {f"default_{i}": value for i, value in enumerate(defaults.values)}
    exec(f"def forward({parameters}):\n    return ({pairs}{',' if pairs else ''})\n", scope)
    return scope["forward"]


def _format_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format_kind(kind: tuple[Any, ...]) -> str:
    if kind[0] == "tensor":
        return f"{kind[3]}-d {_format_dtype(kind[1])} on {kind[2]}"
    if kind[0] == "object":
        return f"a {kind[-1]}"
    return repr(kind[1]) if len(kind) == 2 else f"a {kind[0]}"
