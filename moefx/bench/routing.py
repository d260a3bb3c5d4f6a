"""Time routing metadata alone: from expert ids and weights to the index arrays.

    python -m moefx bench routing [--tokens 1048576] [--choices 128/8,256/8] [--out routing.jsonl]

Compares moefx's kernels with a sort in plain torch. The models are those of MoEBlaze's table 3, which reports 2.1, 3.0,
0.9, 1.4, 1.9 and 1.6 ms for its own method on an H100 with 1M tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.ops import dialect
from ..lowering.triton.timing import measure_milliseconds
from .results import append_row, build_parser
from .shapes import Shape, random_routing

CHOICES = "128/8,256/8,16/4,8/2,128/4,40/8"  # experts / choices of a token


def build_pft(ids: Tensor, weights: Tensor, num_experts: int) -> Sequence[Tensor | None]:
    return dialect.build_pft(ids, weights, None, num_experts=num_experts)


def sort_by_expert(ids: Tensor, weights: Tensor, num_experts: int) -> Sequence[Tensor]:
    """Return the arrays of `dialect.build_pft` by torch's sort."""
    flat, num_slots = ids.reshape(-1), ids.shape[1]
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    arrays = (order // num_slots, order % num_slots, offsets, inverse.view(ids.shape))
    return (*(array.to(torch.int32) for array in arrays), weights.reshape(-1)[order])


SYSTEMS = {"moefx": build_pft, "torch's sort": sort_by_expert}


def measure(ids: Tensor, weights: Tensor, num_experts: int) -> dict[str, float]:
    """Measure the milliseconds of each system, after a check that their arrays are equal."""
    arrays = [make(ids, weights, num_experts) for make in SYSTEMS.values()]
    for ours, theirs in zip(*arrays, strict=True):
        assert ours is not None and theirs is not None and torch.equal(ours, theirs), "the arrays differ"
    return {
        name: measure_milliseconds(functools.partial(make, ids, weights, num_experts)) for name, make in SYSTEMS.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = build_parser("routing", __doc__)
    options.add_argument("--tokens", type=int, default=2**20)
    options.add_argument("--choices", default=CHOICES)
    options.add_argument("--routing", default="uniform", help="uniform, zipf or hot")
    chosen = options.parse_args(argv)
    for experts, slots in (map(int, pair.split("/")) for pair in chosen.choices.split(",")):
        shape = Shape(f"{experts}/{slots}", chosen.tokens, 1, 1, experts, slots)
        times = measure(*random_routing(shape, kind=chosen.routing), experts)
        row = dataclasses.asdict(shape) | dict(routing=chosen.routing, ms=times)
        if chosen.out:
            append_row(row, chosen.out)
        print(f"{shape.name:8} " + "  ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()), flush=True)


if __name__ == "__main__":
    main()
