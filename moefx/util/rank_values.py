"""Exchange Python values between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from ..errors import MoefxError


def gather_values(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return the values of all ranks of a group, in its order. Collective. `value` can be pickled."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_or_raise(
    value: Any,
    error: Exception | None,
    gather: Callable[[Any], list[Any]],
    names: Sequence[str],
    kind: type[MoefxError] = MoefxError,
) -> list[Any]:
    """Return the values of all ranks, or raise on all of them if one has an error. Collective.

    Args:
        error: this rank's error, if it has one.
        gather: returns the values of all ranks, in order.
        names: the names of the ranks for messages.
        kind: the class of the error on ranks without an error of their own.
    """
    answers = gather((None if error is None else f"{type(error).__name__}: {error}", value))
    if error is not None:
        raise error
    for name, (text, _) in zip(names, answers, strict=True):
        if text:
            raise kind(f"{name} failed: {text}")
    return [value for _, value in answers]
