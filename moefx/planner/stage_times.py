"""Predict the seconds of each layer of a decoder, and cut its layers into stages of equal time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from ..errors import InvalidPlan
from .architecture import Architecture
from .layout import Layout
from .platforms import Platform
from .step_formulas import collect_values, evaluate_memory, find_step_sheet

_PARTS = ("T_compute", "T_alltoall", "T_tp", "T_gather")  # of a micro-batch, proportional to a stage's layers
_ROUNDING = 1 + 1e-9


@dataclasses.dataclass(frozen=True)
class LayerTimes:
    """Seconds of a micro-batch, forward and backward.

    Attributes:
        dense: in a layer without experts.
        moe: in a layer with experts.
        head: for the logits.
    """

    dense: float
    moe: float
    head: float

    def of_layers(self, has_experts: Sequence[bool]) -> list[float]:
        return [self.moe if is_moe else self.dense for is_moe in has_experts]


def predict_layer_times(
    model: Architecture, layout: Layout, platform: Platform, experts_first: bool = True
) -> LayerTimes:
    """Predict the seconds of layers and head on one rank, by the formulas of a step. The embedding, which reads one row
    a token, takes no time by these formulas.

    Raises:
        InvalidPlan: the layout does not fit the model.
    """
    one_stage = dataclasses.replace(layout, pp=1, microbatches=1, schedule="1f1b", chunks=1)
    values, sheet = (
        collect_values(model, one_stage, platform, experts_first),
        find_step_sheet(one_stage, platform, experts_first),
    )

    def predict(dense: int, moe: int, head: int) -> float:
        results = sheet(**values | {"l_t": dense + moe, "l_t_moe": moe, "h_t": head})
        return sum(results[part] for part in _PARTS)

    return LayerTimes(predict(1, 0, 0), predict(0, 1, 0), predict(0, 0, 1))


def cut_by_time(
    layers: Sequence[float], head: float, num_stages: int, max_layers: int | None = None
) -> tuple[int, ...]:
    """Share out consecutive layers so that the longest stage is as short as possible, and the others are alike.

    Args:
        layers: seconds of each layer.
        head: seconds that the last stage needs beside its layers.
        max_layers: the largest number of layers of a stage, None for any.

    Returns:
        The number of layers of each stage, at least 1.

    Raises:
        InvalidPlan: there are fewer layers than stages, or `max_layers` leaves layers over.
    """
    number, most = len(layers), max_layers or len(layers)
    if not num_stages <= number <= num_stages * most:
        raise InvalidPlan(f"{number} layers cannot be cut into {num_stages} stages of 1 to {most} layers")
    cumulative = [0.0, *itertools.accumulate(layers)]

    def find_best(combine: Callable[[float, float], float], limit: float) -> tuple[float, list[int]]:
        """Return the least cost of a cut, and the ends of its stages.

        Args:
            combine: returns the cost of several stages, for the cost of all but the last of them and its seconds.
            limit: the most seconds of a stage.
        """
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
        for stage in range(num_stages):
            own_head, ends = head if stage == num_stages - 1 else 0.0, dict[int, tuple[float, list[int]]]()
            for begin, (cost, cuts) in best.items():
                for end in range(begin + 1, min(begin + most, number) + 1):
                    seconds = cumulative[end] - cumulative[begin] + own_head
                    if seconds > limit:
                        break
                    total = combine(cost, seconds)
                    if end not in ends or total < ends[end][0]:
                        ends[end] = total, [*cuts, end]
            best = ends
        return best[number]

    longest, _ = find_best(max, float("inf"))
    _, ends = find_best(lambda cost, seconds: cost + seconds**2, longest * _ROUNDING)
    return tuple(end - begin for begin, end in itertools.pairwise([0, *ends]))


def find_max_layers(model: Architecture, layout: Layout, platform: Platform) -> int:
    """Return the largest number of layers of a stage that the memory has room for: at least those of an even cut."""
    even = -(-model.num_layers // layout.pp)
    for layers in range(even + 1, model.num_layers + 1):
        moe_layers = min(layers, model.num_moe_layers)
        larger = model.replace(num_layers=layers * layout.pp, num_moe_layers=moe_layers * layout.pp)
        if evaluate_memory(larger, layout, platform)["M_gpu"] > platform.memory_bytes:
            return layers - 1
    return model.num_layers
