"""Run a model on example inputs, on abstract tensors, and record the calls of its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.environment.code_locations import is_internal_error
from ..capture.search.block_search import BlockCandidates, search_blocks
from ..capture.search.example_calls import find_example_calls
from ..capture.search.isolated_run import run_copy
from ..errors import CaptureError, InvalidInput, Refused, refuse_own_bug, summarize_error
from ..runtime.block_forward import find_rewritten_blocks
from ..util.tensor_trees import has_values
from ..util.user_code import forward_line, user_line


def run_examples(model: nn.Module, example_inputs: Any) -> BlockCandidates:
    """Run the model on the first of the examples that it accepts, and record the calls of its modules.

    Raises:
        CaptureError: the model runs on no example.
        Refused: it runs, but not on abstract tensors.
    """
    calls, failures = find_example_calls(model, example_inputs), []
    for call in calls:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _with_values, call)
        try:
            return search_blocks(model, args, kwargs)
        except InvalidInput:
            raise
        except Exception as error:
            failures.append((args, kwargs, error))
    errors: list[Exception] = []
    for args, kwargs, error in failures:
        try:
            run_copy(model, args, kwargs)
        except Exception as own_error:
            if all(map(has_values, (*model.parameters(), *model.buffers()))):
                errors.append(own_error)
                continue
            # Without values a real run may fail. Then the error of the abstract run decides.
            if not (isinstance(error, (CaptureError, Refused)) or is_internal_error(error)):
                errors.append(error)
                continue
        raise _refuse_uncaptured(error, model) from error
    name, advice = type(model).__name__, "Pass example_inputs=(...) or example_inputs={...} that it accepts"
    first = errors[0]
    if len(calls) > 1:
        shapes_text = ", ".join(str(list(args[0].shape)) for args, _ in calls)
        raise CaptureError(
            f"no example_inputs were given, and {name} runs on hidden states of none of the shapes {shapes_text}. "
            + advice
        ) from first
    raise CaptureError(
        f"{name} does not run on the example inputs: {type(first).__name__}: {first}. {advice}"
    ) from first


def _refuse_uncaptured(error: Exception, model: nn.Module) -> Refused:
    """Return the refusal of a model that runs on real tensors only."""
    if isinstance(error, Refused):
        return error
    if is_internal_error(error):
        return refuse_own_bug(error, user_line(error) or forward_line(model))
    return Refused(
        f"the model runs, but not on abstract tensors ({summarize_error(error)})",
        source=user_line(error),
        remedy="compile the other blocks one by one, each with its own example_inputs",
    )


def _with_values(t: torch.Tensor) -> torch.Tensor:
    """Give integers and masks on the meta device values, which captures need: the first token, nothing masked."""
    if not t.is_meta or t.is_floating_point() or t.is_complex():
        return t
    return torch.full(t.shape, t.dtype is torch.bool, dtype=t.dtype, device="cpu")


@contextlib.contextmanager
def run_originals(model: nn.Module) -> Iterator[None]:
    """Run the original code of blocks that were rewritten before."""
    with contextlib.ExitStack() as stack:
        for forward in find_rewritten_blocks(model).values():
            stack.enter_context(forward.force_graph("original"))
        yield
