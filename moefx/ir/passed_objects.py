"""Arguments that a block only passes on to its submodules, such as a key-value cache.

In a capture, a `PassedObject` replaces each of these arguments. The block may pass it on, return it, and compare it
with None; the capture refuses any other use. In a rewritten graph these arguments are placeholders, and each call
checks the structure of the results that submodules return for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import MoefxError

Refuse = Callable[[str, str], Exception | None]


class PassedObject:
    """A stand-in for an object that is only passed on.

    Args:
        name: its name in messages, such as `cache`.
        refuse: called with the name and the access (` by isinstance`, `.size`); returns the exception to raise, or
            None to allow the access of a library. A copy is the stand-in itself.
    """

    __slots__ = ("_name", "_refuse")

    _name: str
    _refuse: Refuse | None

    def __init__(self, name: str, refuse: Refuse | None = None):
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_refuse", refuse)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        self._check_access(" by isinstance")
        return PassedObject

    def __copy__(self) -> PassedObject:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> PassedObject:
        self._check_access(" by copying it")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_access(" by pickling it")
        return PassedObject, (self._name,)

    def __getattr__(self, key: str) -> Any:
        if not key.startswith(_LIBRARY_PROTOCOLS):
            self._check_access(f".{key}")
        raise AttributeError(f"{self._name} is a stand-in and has no {key}")

    def __setattr__(self, key: str, value: Any) -> None:
        self._check_access(f".{key} = ...")
        raise AttributeError(f"{self._name} is a stand-in, no {key} can be set")

    def _check_access(self, access: str) -> None:
        if self._refuse is not None and (error := self._refuse(self._name, access)) is not None:
            raise error


def _refuse_method(name: str) -> Callable[..., Any]:
    def method(self: PassedObject, *args: Any, **kwargs: Any) -> Any:
        self._check_access(f" by {name}")
        raise TypeError(f"{self._name} is a stand-in and has no {name}")

    return method


_LIBRARY_PROTOCOLS = ("__torch", "__array", "__cuda", "__fx", "__getstate", "__reduce")
_SPECIAL = {name for cls in (torch.Tensor, dict, list, int) for name in vars(cls) if name.startswith("__")}
_OWN = {"__dir__", "__doc__", "__getattribute__", "__getstate__", "__init_subclass__", "__init__", "__module__",
        "__new__", "__reduce_ex__", "__setstate__", "__sizeof__", "__slots__", "__subclasshook__", "__class_getitem__",
        "__dict__", "__weakref__", "__delattr__", "__torch_dispatch__", "__torch_function__"}  # fmt: skip
for _name in {*_SPECIAL, "__call__", "__enter__", "__exit__", "__next__"} - _OWN - vars(PassedObject).keys():
    setattr(PassedObject, _name, _refuse_method(_name))


def is_passed(value: Any) -> bool:
    """Return whether a value is a `PassedObject`."""
    return type(value) is PassedObject


def get_name(stand_in: PassedObject) -> str:
    """Return the object's name in messages."""
    return stand_in._name


def set_name(stand_in: PassedObject, name: str) -> None:
    """Set the object's name in messages."""
    object.__setattr__(stand_in, "_name", name)


def replace_objects(tree: Any, by_id: Mapping[int, Any]) -> Any:
    """Replace objects in nested tuples, lists and dicts, which `by_id` maps by the id of the old one."""
    if id(tree) in by_id:
        return by_id[id(tree)]
    if type(tree) in (tuple, list):
        return type(tree)([replace_objects(v, by_id) for v in tree])
    if type(tree) is dict:
        return {k: replace_objects(v, by_id) for k, v in tree.items()}
    return tree


def check_structure(result: Any, are_none: Sequence[bool], container: str, module: str) -> Any:
    """Return a submodule's result if it has the recorded structure.

    Args:
        are_none: whether each result is None.
        container: "tuple" or "list" of the results, "" for a single result.

    Raises:
        MoefxError: the structure differs. The submodule has run, so the original cannot run instead.
    """
    results = result if container else [result]
    if container and (type(result).__name__ != container or len(result) != len(are_none)):
        size = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        raise _unexpected(module, f"a {type(result).__name__}{size}", f"a {container} of {len(are_none)}")
    for i, (value, is_none) in enumerate(zip(results, are_none, strict=True)):
        if (value is None) != is_none:
            seen, expected = ("an object", "None") if is_none else ("None", "an object")
            raise _unexpected(module, f"{seen} as result {i}", expected)
    return result


def check_tensor(result: Any, template: torch.Tensor, dtype: torch.dtype | None, module: str) -> Any:
    """Return a submodule's result if it is a contiguous tensor with the recorded shape and dtype.

    Args:
        template: an input of the submodule with the same shape.
        dtype: the recorded dtype; None for the dtype of `template`.

    Raises:
        MoefxError: the tensor differs. The submodule has run, so the original cannot run instead.
    """
    if not isinstance(result, torch.Tensor):
        raise _unexpected(module, f"a {type(result).__name__}", "a tensor")
    expected = template.dtype if dtype is None else dtype
    is_expected = result.dtype == expected
    if not is_expected:  # `verify` promotes all casts to float64
        is_expected = result.dtype == template.new_zeros(0).to(expected).dtype
    if not is_expected or result.shape != template.shape:
        raise _unexpected(module, _describe(result.shape, result.dtype), _describe(template.shape, expected))
    if not result.is_contiguous():
        raise MoefxError(
            f"{module} returned a tensor of strides {list(result.stride())}. It returned a contiguous one when its "
            f"block was compiled, and the block may rely on that: let {module} return y.contiguous()"
        )
    return result


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _unexpected(module: str, seen: str, expected: str) -> MoefxError:
    return MoefxError(
        f"{module} returned {seen}. It returned {expected} when its block was compiled, and the block relies on that: "
        f"call moefx.compile again with example_inputs for which {module} returns {seen}"
    )


CHECKS = (check_structure, check_tensor)  # functions in graphs that return their first argument or raise

__all__ = [
    "CHECKS",
    "PassedObject",
    "check_structure",
    "check_tensor",
    "get_name",
    "is_passed",
    "replace_objects",
    "set_name",
]  # fmt: skip
