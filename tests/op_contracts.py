"""Check the results of every op against its contract, and thereby every provider.

The package checks arguments only: a check of results would take host time at every call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from moefx.ir import op_providers
from moefx.ir.ops import op_definition
from moefx.ir.ops.op_definition import Op


def check_results(op: Op, args: Sequence[Any], outputs: Any) -> None:
    """Assert that the results have the shapes of the contract.

    A call without a backward returns only the first results, and kept activations follow those that are named.
    """
    sizes: dict[str, int] = {}
    arguments = [a.name for a in op.overload._schema.arguments]
    given = dict(zip(arguments, args, strict=False))
    for name, dims in op.contract.inputs.items():
        if given.get(name) is not None:
            _bind(sizes, dims, given[name].shape)
    results = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    for (name, dims), result in zip(op.contract.outputs.items(), results, strict=False):
        if f" {name}[{','.join(dims)}]?" in op.contract.text and result.numel() == 0:
            continue
        is_equal = _bind(sizes, dims, result.shape)
        assert is_equal, (
            f"moefx::{op.name} returned {name} of {list(result.shape)}, for {op.contract.text} with {sizes}"
        )


def _bind(sizes: dict[str, int], dims: Sequence[str], shape: torch.Size) -> bool:
    """Give sizes to letters, and return whether the shape has these letters."""
    if dims[-1] == "...":
        dims, shape = dims[:-1], shape[: len(dims) - 1]
    if len(dims) != len(shape):
        return False
    for letter, size in zip(dims, shape, strict=True):
        if letter == "E+1":
            letter, size = "E", size - 1
        if letter != "_" and sizes.setdefault(letter, size) != size:
            return False
    return True


def check_every_run(monkeypatch: Any) -> None:
    """Check the results of each provider that runs from now on."""

    def choose(op: Op, args: Any, kwargs: Any) -> op_providers.Provider:
        provider = op_providers.choose_provider(op, args, kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = provider.run(*args, **kwargs)
            check_results(op, args, outputs)
            return outputs

        return dataclasses.replace(provider, run=run)

    monkeypatch.setattr(op_definition, "choose_provider", choose)
