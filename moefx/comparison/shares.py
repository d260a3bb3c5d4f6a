"""Under expert parallelism: what of a reference's results a rank's compiled model can be compared with.

Each rank runs the whole reference on its own tokens. Outputs, and gradients of what every rank has, are then the rank's
own; an expert's gradient is the sum over the ranks, of which the compiled model has that of the rank's own experts.
Where ranks share their tokens, each token counts once; gradients that are summands on these ranks are added up first.
Ranks take every decision together that leads to more such sums.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import InvalidInput
from ..ir.expert_placement import Placement, SharedTokens
from ..ir.ops.uneven_all_to_all import group_of, shown_ranks
from .sandbox import Key, Run


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of a model or one of its blocks.

    Attributes:
        group: name of the process group of the expert axis.
        stacked: of parameters that hold all experts, where these live.
        here, elsewhere: names of parameters of separate experts.
        sequence: the ranks that have the same tokens. is_block: the model is a block itself.
    """

    group: str
    stacked: dict[str, Placement]
    here: frozenset[str]
    elsewhere: frozenset[str]
    sequence: SharedTokens | None = None
    is_block: bool = False

    def check_tokens(self, sets: Any) -> None:
        """Whether ranks that share their tokens are given the same ones. Collective.

        Raises:
            InvalidInput: they are not.
        """
        if self.sequence is None:
            return
        if self.sequence.gradients == "partial" and not self.is_block:
            raise InvalidInput(
                'verify: with Plan(sequence_gradients="partial") the gradients of what is around a block are of other '
                "layers' making: verify the block by itself, compiled with this plan"
            )
        told = [f"{tuple(t.shape)} {hash_tensor(t)}" for t in tree_leaves(sets) if isinstance(t, Tensor)]
        every: list = [None] * self.sequence.size
        dist.all_gather_object(every, told, group=group_of(self.sequence.group))
        differ = not all(theirs == told for theirs in every)
        if self.is_true_on_any_rank(differ):
            where = "here and on others of its ranks" if differ else "elsewhere"
            raise InvalidInput(
                f"verify: the inputs differ {where}, but the plan says that all ranks of mesh axis "
                f"{self.sequence.axis!r} (sequence_axis) have the same tokens"
            )

    def reduce_reference(self, run: Run, reference: nn.Module, dtype: torch.dtype | None) -> Run:
        """Collective: the gradients of experts, added up over the ranks; only those that are here. `dtype`: that the
        run had, None for the reference's own."""
        values = dict(run.values)
        for name, parameter in reference.named_parameters():
            key: Key = ("grad_param", name)
            if key not in values or not (name in self.stacked or name in self.here or name in self.elsewhere):
                continue
            grad = values.pop(key)
            total = torch.zeros_like(parameter, dtype=dtype).detach() if grad is None else grad.clone()
            total = total.contiguous()  # NCCL takes no others
            dist.all_reduce(total, group=group_of(self.group))
            if self.sequence is not None and self.sequence.gradients == "replicated":
                total /= self.sequence.size  # each of these ranks had the gradients of all their tokens
            if name in self.stacked:
                values[key] = self.stacked[name].own_part(total)
            elif name in self.here:
                values[key] = total
        if self.sequence is not None and self.sequence.gradients == "partial":
            for key in sorted(values):  # summands of those that the compiled one has, which are whole
                kind, name = key
                value, is_expert = values[key], kind == "grad_param" and (name in self.stacked or name in self.here)
                if kind in ("grad_param", "grad_input") and value is not None and not is_expert:
                    values[key] = total = value.clone(memory_format=torch.contiguous_format)  # NCCL takes no others
                    dist.all_reduce(total, group=group_of(self.sequence.group))
        return dataclasses.replace(run, values=values)

    def localize_compiled(self, run: Run) -> Run:
        """The local part of what is a DTensor."""
        return dataclasses.replace(run, values={key: to_local(value) for key, value in run.values.items()})

    def check_agreement(self, asked: str) -> None:
        """Whether all ranks will compare as much, in the same way: else one would wait for the others. Collective, also
        for a rank that cannot go on.

        Raises:
            InvalidInput: they will not.
        """
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(self._gather_values(asked)):
            ranks.setdefault(theirs, []).append(rank)
        if len(ranks) > 1:
            told = "; ".join(f"{shown_ranks(of)}: {theirs}" for theirs, of in ranks.items())
            raise InvalidInput(f"verify: the ranks of the expert axis would not compare the same. {told}")

    def max_over_ranks(self, value: float) -> float:
        """The largest of all ranks' values."""
        return max(self._gather_values(value))

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self._gather_values(value))

    def _gather_values(self, value: float | bool | str) -> list:
        found: list = [None] * dist.get_world_size(group_of(self.group))
        dist.all_gather_object(found, value, group=group_of(self.group))
        return found


def hash_tensor(t: Tensor) -> str:
    """Of its bits."""
    held = t.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(held.data_ptr(), held.nbytes)).hexdigest()


def to_local(value: Tensor | None) -> Tensor | None:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()
