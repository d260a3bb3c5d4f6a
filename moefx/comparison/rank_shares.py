"""Reduce a reference's results to a rank's part, under expert parallelism.

Each rank runs the whole reference on its own tokens. Outputs and gradients of replicated parameters then compare
directly. The gradient of an expert is the sum over the ranks, and the compiled model has it for the rank's own experts
only. If ranks share their tokens, each token counts once, and partial gradients are summed first. Ranks decide together
whenever a decision leads to more of these sums.
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
from ..ir.ops.uneven_all_to_all import format_ranks, get_group
from ..util.rank_values import gather_values
from .sandbox import Key, Run


@dataclasses.dataclass(frozen=True)
class Shares:
    """The distribution of a model's or block's expert parameters.

    Attributes:
        group: name of the process group of the expert axis.
        stacked: placement of the experts, for each parameter that stacks all of them.
        here, elsewhere: names of parameters of separate experts on this rank, and on other ranks.
        sequence: the ranks that have the same tokens.
        is_block: the model itself is a block.
    """

    group: str
    stacked: dict[str, Placement]
    here: frozenset[str]
    elsewhere: frozenset[str]
    sequence: SharedTokens | None = None
    is_block: bool = False

    def check_tokens(self, sets: Any) -> None:
        """Check that ranks that share their tokens have the same inputs. Collective.

        Raises:
            InvalidInput: the inputs differ.
        """
        if self.sequence is None:
            return
        if self.sequence.gradients == "partial" and not self.is_block:
            raise InvalidInput(
                'verify: with Plan(sequence_gradients="partial") gradients outside a block depend on how other layers '
                "sum them; verify the block by itself, compiled with this plan"
            )
        hashes = [f"{tuple(t.shape)} {hash_tensor(t)}" for t in tree_leaves(sets) if isinstance(t, Tensor)]
        differ = any(other != hashes for other in gather_values(hashes, get_group(self.sequence.group)))
        if self.is_true_on_any_rank(differ):
            where = "here and on others of its ranks" if differ else "elsewhere"
            raise InvalidInput(
                f"verify: the inputs differ {where}, but the plan says that all ranks of mesh axis "
                f"{self.sequence.axis!r} (sequence_axis) have the same tokens"
            )

    def reduce_reference(self, run: Run, reference: nn.Module, dtype: torch.dtype | None) -> Run:
        """Sum the gradients of experts over the ranks, and keep those of this rank's experts. Collective.

        Args:
            dtype: dtype of the run; None for the reference's own.
        """
        values = dict(run.values)
        for name, parameter in reference.named_parameters():
            key: Key = ("grad_param", name)
            if key not in values or not (name in self.stacked or name in self.here or name in self.elsewhere):
                continue
            grad = values.pop(key)
            total = torch.zeros_like(parameter, dtype=dtype).detach() if grad is None else grad.clone()
            total = total.contiguous()  # NCCL takes no others
            dist.all_reduce(total, group=get_group(self.group))
            if self.sequence is not None and self.sequence.gradients == "replicated":
                total /= self.sequence.size  # each of these ranks counted all their tokens
            if name in self.stacked:
                values[key] = self.stacked[name].select_local(total)
            elif name in self.here:
                values[key] = total
        if self.sequence is not None and self.sequence.gradients == "partial":
            for key in sorted(values):  # the compiled model has the full sums
                kind, name = key
                value, is_expert = values[key], kind == "grad_param" and (name in self.stacked or name in self.here)
                if kind in ("grad_param", "grad_input") and value is not None and not is_expert:
                    values[key] = total = value.clone(memory_format=torch.contiguous_format)  # NCCL takes no others
                    dist.all_reduce(total, group=get_group(self.sequence.group))
        return dataclasses.replace(run, values=values)

    def localize_compiled(self, run: Run) -> Run:
        """Replace DTensors by their local parts."""
        return dataclasses.replace(run, values={key: to_local(value) for key, value in run.values.items()})

    def check_same_settings(self, settings: str) -> None:
        """Check that all ranks compare the same, so that none waits for the others. Collective.

        Args:
            settings: the options of this rank, or the error that stops it.

        Raises:
            InvalidInput: the ranks differ.
        """
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(self._gather_values(settings)):
            ranks.setdefault(theirs, []).append(rank)
        if len(ranks) > 1:
            options = "; ".join(f"{format_ranks(same)}: {theirs}" for theirs, same in ranks.items())
            raise InvalidInput(f"verify: the ranks of the expert axis would not compare the same. {options}")

    def max_over_ranks(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return max(self._gather_values(value))

    def is_true_on_any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank."""
        return any(self._gather_values(value))

    def _gather_values(self, value: float | bool | str) -> list:
        return gather_values(value, get_group(self.group))


def hash_tensor(t: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    values = t.detach().cpu().contiguous()
    return hashlib.sha256(ctypes.string_at(values.data_ptr(), values.nbytes)).hexdigest()


def to_local(value: Tensor | None) -> Tensor | None:
    to_local = getattr(value, "to_local", None)
    return value if to_local is None else to_local()
