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
    """Stands for an object that is only passed on. Whatever is read from it is refused.

    Args:
        name: what it is called in messages, e.g. `cache`.
        cls: the class that `isinstance` sees.
        refuse: called with the name and with what was read; returns the exception to raise.
    """

    __slots__ = ("__weakref__", "_name", "_refuse", "_shown_class")

    _name: str
    _shown_class: type | None
    _refuse: Refuse | None

    def __init__(self, name: str, cls: type | None = None, refuse: Refuse | None = None):
        for key, value in (("_name", name), ("_shown_class", cls), ("_refuse", refuse)):
            object.__setattr__(self, key, value)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return self._shown_class or PassedObject

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # what Python and libraries look for in anything
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

    def __repr__(self) -> str:
        return f"<passed on: {self._name}>"

    __hash__ = object.__hash__


def _refuse_method(name: str) -> Callable[..., Any]:
    def method(self: PassedObject, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal(name)

    return method


for _name in (
    "__bool__", "__len__", "__iter__", "__next__", "__getitem__", "__setitem__", "__delitem__", "__contains__",
    "__call__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__int__", "__float__", "__index__",
    "__add__", "__radd__", "__or__", "__ior__", "__iadd__", "__enter__", "__exit__",
):  # fmt: skip
    setattr(PassedObject, _name, _refuse_method(_name))


def is_passed(value: Any) -> bool:
    """Whether a value is a `PassedObject`, whatever class it shows."""
    return type(value) is PassedObject


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


def check_structure(result: Any, length: int, absent: Sequence[int], module: str) -> Any:
    """Return what a submodule returned, if it has the recorded structure.

    Args:
        length: of the tuple or list; -1 for a tensor.
        absent: positions that hold None.

    Raises:
        MoefxError: it has another structure. The submodule has run, so the original cannot run instead.
    """
    if length < 0:
        if not isinstance(result, torch.Tensor):
            raise _unexpected(module, f"a {type(result).__name__}", "a tensor")
        return result
    if not isinstance(result, (tuple, list)) or len(result) != length:
        size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise _unexpected(module, f"a {type(result).__name__}{size}", f"a tuple of {length}")
    for i in absent:
        if result[i] is not None:
            raise _unexpected(module, f"a {type(result[i]).__name__} as result {i}", "None")
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

__all__ = ["CHECKS", "PassedObject", "check_structure", "check_tensor", "is_passed", "name_object", "replace_objects"]
