"""Arguments that a block only hands on to its submodules, such as a key-value cache.

In a capture a `PassedObject` takes the place of each of them, so that nothing can be read from them or written to them.
In a rewritten graph they are placeholders, and what a submodule returns for one is checked at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import MoefxError

Refuse = Callable[[str, str], Exception]


class PassedObject:
    """Stands for an object that is only passed on. Whatever is read from it is refused. It has the special methods of
    the class that it stands for, so that `callable` and `isinstance` with an abstract class see that one, too.

    Args:
        name: what it is called in messages, e.g. `cache`.
        cls: the class that `isinstance` sees.
        refuse: called with the name and with what was read; returns the exception to raise.
    """

    __slots__ = ("__weakref__", "_name", "_refuse", "_shown_class")

    _name: str
    _shown_class: type | None
    _refuse: Refuse | None

    def __new__(cls, name: str, shown: type | None = None, refuse: Refuse | None = None) -> PassedObject:
        special = {k: _refuse_method(k) for k in dir(shown or torch.Tensor) if k.startswith("__") and k not in _OWN}
        stand_in = object.__new__(type("PassedObject", (PassedObject,), {"__slots__": (), **special}))
        for key, value in (("_name", name), ("_shown_class", shown), ("_refuse", refuse)):
            object.__setattr__(stand_in, key, value)
        return stand_in

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self._shown_class or PassedObject

    def __getattr__(self, key: str) -> Any:
        if key.startswith(_ASKED_BY_LIBRARIES):
            raise AttributeError(key)
        raise self._refusal(f".{key}")

    def __setattr__(self, key: str, value: Any) -> None:
        raise self._refusal(f".{key} = ...")

    def _refusal(self, what: str) -> Exception:
        if self._refuse is None:
            return TypeError(f"{self._name} is a stand-in and has no {what}")
        return self._refuse(self._name, what)

    def __copy__(self) -> PassedObject:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PassedObject:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return PassedObject, (self._name,)


def _refuse_method(name: str) -> Callable[..., Any]:
    def method(self: PassedObject, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal(f" by {name}")

    return method


_OWN = {
    "__class__", "__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__delattr__", "__dict__", "__dir__",
    "__doc__", "__getattr__", "__getattribute__", "__getstate__", "__init__", "__init_subclass__", "__module__",
    "__new__", "__reduce__", "__reduce_ex__", "__setattr__", "__setstate__", "__sizeof__", "__slots__",
    "__subclasshook__", "__weakref__",
    "__torch_dispatch__", "__torch_function__",
}  # fmt: skip
_ASKED_BY_LIBRARIES = ("__torch", "__array", "__cuda", "__fx", "__getstate", "__reduce")


def is_passed(value: Any) -> bool:
    """Whether a value is a `PassedObject`, whatever class it shows."""
    return issubclass(type(value), PassedObject)


def name_of(stand_in: PassedObject) -> str:
    """What an object is called in messages."""
    return stand_in._name


def name_object(stand_in: PassedObject, name: str) -> None:
    """Set what an object is called in messages."""
    object.__setattr__(stand_in, "_name", name)


def replace_objects(tree: Any, by_id: Mapping[int, Any]) -> Any:
    """Replace objects in nested tuples, lists and dicts by others, by their ids."""
    if id(tree) in by_id:
        return by_id[id(tree)]
    if type(tree) in (tuple, list):
        return type(tree)([replace_objects(v, by_id) for v in tree])
    if type(tree) is dict:
        return {k: replace_objects(v, by_id) for k, v in tree.items()}
    return tree


def check_structure(
    result: Any, kinds: Sequence[str], passed: Sequence[tuple[int, Any]], container: str, module: str
) -> Any:
    """Return what a submodule returned, if it has the recorded structure.

    Args:
        kinds: name of the class of each result.
        passed: results that are arguments of the call: position, and the argument.
        container: name of the class that holds the results, "" if there is one alone.

    Raises:
        MoefxError: it has another structure. The submodule has run, so the original cannot run instead.
    """
    results = result if container else [result]
    if container and (type(result).__name__ != container or len(result) != len(kinds)):
        size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise _unexpected(module, f"a {type(result).__name__}{size}", f"a {container} of {len(kinds)}")
    for i, (one, kind) in enumerate(zip(results, kinds, strict=True)):
        is_tensor = kind == "Tensor" and isinstance(one, torch.Tensor)
        if type(one).__name__ != kind and not is_tensor and not is_passed(one):
            raise _unexpected(module, f"a {type(one).__name__} as result {i}", f"a {kind}")
    for i, argument in passed:
        if results[i] is not argument and not is_passed(results[i]):
            raise _unexpected(module, f"another {kinds[i]} as result {i}", "one of its arguments")
    return result


def check_tensor(result: torch.Tensor, like: torch.Tensor, width: int, dtype: torch.dtype | None, module: str) -> Any:
    """Return a tensor that a submodule returned, if it has the shape and dtype that were recorded.

    Args:
        like: an input of the submodule with the same shape, but for the last axis.
        width: the size of the last axis; -1 if it is that of `like`.
        dtype: None if it is that of `like`.

    Raises:
        MoefxError: its shape or dtype is another. The submodule has run, so the original cannot run instead.
    """
    shape = [*like.shape[:-1], like.shape[-1] if width < 0 else width]
    expected = like.dtype if dtype is None else dtype
    is_expected = result.dtype == expected
    if not is_expected:  # `verify` has all casts promoted to float64
        is_expected = result.dtype == like.new_zeros(0).to(expected).dtype
    if not is_expected or list(result.shape) != shape:
        raise _unexpected(module, _describe(list(result.shape), result.dtype), _describe(shape, expected))
    return result


def _describe(shape: list[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{shape}"


def _unexpected(module: str, seen: str, expected: str) -> MoefxError:
    return MoefxError(
        f"{module} returned {seen}, and {expected} when its block was compiled, which relies on that: call "
        "moefx.compile again with example_inputs for which it returns this"
    )


CHECKS = (check_structure, check_tensor)  # functions in graphs: they return their first argument, or raise

__all__ = [
    "CHECKS", "PassedObject", "check_structure", "check_tensor", "is_passed", "name_object", "name_of",
    "replace_objects",
]  # fmt: skip
