"""Under expert parallelism: what of a reference's results a rank's compiled model can be compared with.

Each rank runs the whole reference on its own tokens. Outputs, and gradients of what every rank has, are then the rank's
own; an expert's gradient is the sum over the ranks, of which the compiled model has that of the rank's own experts.
Ranks take every decision together that leads to more such sums.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InvalidInput
from ..ir.payload import group_of, shown_ranks
from .sandbox import Key, Run


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a model or one of its blocks.

    Attributes:
        group: name of the process group of the expert axis.
        stacked: of parameters that hold all experts, which of these are here.
        here, elsewhere: names of parameters of separate experts.
    """

    group: str
    stacked: dict[str, list[int]]
    here: frozenset[str]
    elsewhere: frozenset[str]

    @classmethod
    def of(cls, compiled: nn.Module) -> Shares | None:
        """None for a model that is not spread."""
        from ..distribute import spread_blocks  # torch.distributed is not in every build

        stacked, here, elsewhere, group = {}, set(), set(), ""
        for block, spread in spread_blocks(compiled).items():
            prefix, group = f"{block}." * bool(block), spread.placement.group
            own = spread.placement.own
            stacked |= {prefix + name: own for name in spread.parameters.stacked}
            for expert, names in enumerate(spread.parameters.separate):
                (here if expert in own else elsewhere).update(prefix + name for name in names)
        return cls(group, stacked, frozenset(here), frozenset(elsewhere - here)) if group else None

    def of_reference(self, run: Run, reference: nn.Module) -> Run:
        """Collective: the gradients of experts, added up over the ranks; only those that are here."""
        values = dict(run.values)
        for name, parameter in reference.named_parameters():
            key: Key = ("grad_param", name)
            if key not in values or not (name in self.stacked or name in self.here or name in self.elsewhere):
                continue
            grad = values.pop(key)
            total = torch.zeros_like(parameter).detach() if grad is None else grad.clone()
            dist.all_reduce(total, group=group_of(self.group))
            if name in self.stacked:
                values[key] = total[self.stacked[name]]
            elif name in self.here:
                values[key] = total
        return dataclasses.replace(run, values=values)

    def of_compiled(self, run: Run) -> Run:
        """The local part of what is a DTensor."""
        return dataclasses.replace(run, values={key: local(value) for key, value in run.values.items()})

    def agree(self, asked: str) -> None:
        """Whether all ranks will compare as much, in the same way: else one would wait for the others. Collective, also
        for a rank that cannot go on.

        Raises:
            InvalidInput: they will not.
        """
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(self._all(asked)):
            ranks.setdefault(theirs, []).append(rank)
        if len(ranks) > 1:
            told = "; ".join(f"{shown_ranks(of)}: {theirs}" for theirs, of in ranks.items())
            raise InvalidInput(f"verify: the ranks of the expert axis would not compare the same. {told}")

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(self._all(value))

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self._all(value))

    def _all(self, value: float | bool | str) -> list:
        found: list = [None] * dist.get_world_size(group_of(self.group))
        dist.all_gather_object(found, value, group=group_of(self.group))
        return found


def local(value: Tensor | None) -> Tensor | None:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()
