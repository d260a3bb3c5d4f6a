"""Cut the inputs and the target of a step into micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import InvalidInput
from .stage_modules import Call


def split_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> tuple[list[Call], int]:
    """Cut the arguments of a model along the batch: the first dimension of the first tensor in which it is not 1.

    Tensors whose first dimension is 1 and numbers are the same for all micro-batches.

    Returns:
        The arguments of each micro-batch, and the size of the batch.

    Raises:
        InvalidInput: the inputs hold no tensor, the batch cannot be cut evenly, or first dimensions differ.
    """
    tensor = _find_batched_tensor(args, kwargs)
    if tensor is None:
        raise InvalidInput(
            "a pipeline needs the model's inputs on every rank: all stages compute masks and positions from them. "
            "Ranks of one pipeline pass the same inputs"
        )
    batch = len(tensor)
    if batch % number or not batch:
        raise InvalidInput(
            f"the batch of {batch} cannot be cut into microbatches={number} equal parts: pass a multiple of {number}"
        )
    return split_tree((args, kwargs), batch, number, "an input"), batch


def check_batch(args: tuple[Any, ...], kwargs: dict[str, Any], planned: tuple[int, int]) -> None:
    """Check that a step has the batch that the planner counted on.

    Args:
        planned: sequences of a rank in a step, and tokens of a sequence.

    Raises:
        InvalidInput: the tensor that has the batch has another first or second dimension.
    """
    tensor = _find_batched_tensor(args, kwargs)
    shape = () if tensor is None else tensor.shape
    if tuple(shape[:2]) != planned[: len(shape)]:
        raise InvalidInput(
            f"the inputs of a step have the shape {list(shape)}, and the entry of the planner is for {planned[0]} "
            f"sequences of {planned[1]} tokens on a rank: pass batches of this size, or rank layouts for yours with "
            "moefx.plan(..., batch=, tokens=). pipe.planned_batch = None takes any"
        )


def _find_batched_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first tensor whose first dimension is not 1; for a batch of 1, the first tensor."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    return next((tensor for tensor in tensors if len(tensor) != 1), tensors[0] if tensors else None)


def split_tree(tree: Any, batch: int, number: int, subject: str) -> list[Any]:
    """Cut the tensors in a tree along their first dimension.

    Raises:
        InvalidInput: a tensor has another first dimension than the batch and 1.
    """
    leaves, spec = tree_flatten(tree)
    parts: list[list[Any]] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.dim() or (len(leaf) == 1 and batch > 1):
            parts.append([leaf] * number)
        elif len(leaf) == batch:
            parts.append(list(leaf.chunk(number)))
        else:
            raise InvalidInput(
                f"{subject} has the shape {list(leaf.shape)}, and the batch is {batch}: the first dimension of each "
                "tensor is the batch, or 1 if all micro-batches share it"
            )
    return [tree_unflatten([part[i] for part in parts], spec) for i in range(number)]


def describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the shapes and dtypes of a micro-batch's inputs, and all other values that are plain, by their names."""
    leaves, spec = tree_flatten((args, kwargs))
    descriptions = {f"input {number}": _describe_input(value) for number, value in enumerate(leaves)}
    return {"number of inputs": len(leaves), **descriptions, "structure of the inputs": str(spec)}


def _describe_input(value: Any) -> Any:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {value.dtype}"
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def find_differences(descriptions: list[dict[str, Any]]) -> str:
    """Return what differs between the ranks' descriptions, with the value of each rank; empty if nothing does."""
    different = [name for name in descriptions[0] if len({repr(one.get(name)) for one in descriptions}) > 1]
    return "; ".join(f"{name}: {', '.join(repr(one.get(name)) for one in descriptions)}" for name in different)
