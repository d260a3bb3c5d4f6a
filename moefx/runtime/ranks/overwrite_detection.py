"""Detect when a wrapper overwrites the experts of one rank with the experts of another.

Wrappers for data parallelism expect the same model on every rank. DistributedDataParallel, `accelerate.prepare` and
`deepspeed.initialize` broadcast the parameters of one rank, and reduce gradients that belong to different experts.

In every call each rank sends two samples of its experts (see `ir.ops.parameter_samples`): one from the last call or
`load_state_dict`, and a current one. If the samples of two ranks differed and are now equal, the experts were
overwritten. A comparison of more values confirms it. Ranks that had equal experts before are not reported, and neither
are ranks whose own experts are all equal, as after upcycling.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from ...errors import ExpertsOverwritten
from ...ir.expert_placement import Placement
from ...ir.ops.parameter_samples import NUM_WORDS, local_sample, register_sampler, select_sampler
from ...ir.ops.uneven_all_to_all import format_ranks, get_group, raise_ranks_lost, wait_on_host
from ...util.tensor_bytes import view_bytes
from .data_parallel_wrappers import (
    DDP_REFUSAL,
    DEEPSPEED_REFUSAL,
    describe_overwriting,
    find_outermost_wrapper,
    is_deepspeed,
    list_broadcast_parameters,
)
from .sharding import ExpertParameters, find_owner_and_tensor

_WORDS_PER_EXPERT = NUM_WORDS // 4  # int64 words of the first and of the last expert, before and now
_CONFIRMED_VALUES = 64  # values of each parameter that the second comparison reads


class OverwritingWatch:
    """Compares the experts of one block between ranks; a deep copy watches the copied block.

    Args:
        name: the block's name in the model, for messages.
        number: see `ir.ops.parameter_samples`.
        timeout: seconds to wait for other ranks; None for the limit of the process group.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        parameters: ExpertParameters,
        placement: Placement,
        number: int,
        timeout: float | None = None,
    ):
        self.block, self.parameters, self.placement = block, parameters, placement
        self.name = name or type(block).__name__
        self.group, self.number, self.timeout = placement.group, number, timeout
        self.last_sample: Tensor | None = None
        self.current_sample: Tensor | None = None
        self.has_own_collective, self.calls = False, 0
        self.accepted_ddp: Any = None
        self.is_parallelized = False  # `parallelize` reduces the gradients of the block
        self.hooks_version = -1
        self.sampled = self._find_sampled_names()
        self.accept_experts()
        register_sampler(self)

    def accept_experts(self) -> None:
        """Accept the current experts as correct. Does not synchronise with the host."""
        self.last_sample = self._sample_experts()

    def begin_call(self) -> None:
        """Refuse wrappers that overwrite experts, and send the sample of this block in the next exchange."""
        if self.placement.num_ranks == 1:
            return
        ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp is not self.accepted_ddp:
            if self.is_parallelized:
                raise DDP_REFUSAL.build_error()
            if names := list_broadcast_parameters(ddp, self._list_expert_tensors(), self.group):
                raise ExpertsOverwritten(describe_overwriting(ddp, self.name, f"it has {names[0]} among its own"))
            self.accepted_ddp = ddp
        version = RemovableHandle.next_id  # an engine registers hooks on the model that it wraps
        if version != self.hooks_version:
            for module in _iterate_running_modules(sys._getframe(1)):
                if is_deepspeed(module):
                    raise DEEPSPEED_REFUSAL.build_error()
            self.hooks_version = version
        if self.has_own_collective:
            self._compare_periodically()
        else:
            select_sampler(self)

    def _compare_periodically(self) -> None:
        """Compare the samples of all ranks at calls 1, 2, 4, 8 and so on, but never while a CUDA graph is captured.

        Exchanges that copy no numbers to the host cannot carry the samples. So this runs its own collective, and
        synchronises the host with the device.
        """
        self.calls += 1
        if self.calls & (self.calls - 1) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        with _disable_current_modes():  # a checkpoint's policy must not see these operations
            sample = local_sample(self, self._list_expert_tensors()[0].device)
            self.compare_samples(self._gather_words(sample))

    def take_sample(self) -> Tensor | None:
        """Return the samples to send, int64 [NUM_WORDS]: of the last call, and of now."""
        now = self._sample_experts()
        if now is None:
            return None
        before = self.last_sample if self.last_sample is not None and self.last_sample.device == now.device else now
        self.current_sample = now
        return torch.cat([before, now])

    def compare_samples(self, samples: Sequence[Sequence[int]]) -> None:
        """Compare the samples of all ranks.

        Raises:
            ExpertsOverwritten: ranks that had different experts now have equal ones.
            RanksLost: see `_gather_words`.
        """
        suspects = self._find_suspects(samples)
        if suspects and (ranks := self._confirm_overwritten(suspects)):
            world_ranks = dist.get_process_group_ranks(get_group(self.group))
            overwritten = format_ranks([world_ranks[i] for i in ranks])
            observation = f"{overwritten} had different experts before and have equal ones now"
            raise ExpertsOverwritten(describe_overwriting(find_outermost_wrapper(self.block), self.name, observation))
        self.last_sample = self.current_sample

    def _find_suspects(self, samples: Sequence[Sequence[int]]) -> list[list[int]]:
        """Find groups of positions whose samples became equal."""
        if not all(map(any, samples)):
            return []  # a rank has no sample
        half, by_sample = NUM_WORDS // 2, dict[tuple[int, ...], list[int]]()
        for position, words in enumerate(samples):
            by_sample.setdefault(tuple(words[half:]), []).append(position)
        if len(by_sample) == len(samples):
            return []
        one_expert = self.placement.experts_per_rank == 1
        return [
            positions
            for words, positions in by_sample.items()
            if len({tuple(samples[p][:half]) for p in positions}) > 1
            and len(set(words)) > 1
            and (one_expert or words[:_WORDS_PER_EXPERT] != words[_WORDS_PER_EXPERT:])
        ]

    def _confirm_overwritten(self, suspected: list[list[int]]) -> list[int]:
        """Return the suspects that agree in many values. Collective: all ranks have the same suspects."""
        digest = hashlib.sha256()
        for tensor in self._list_expert_tensors():
            flat = _local_part(tensor).reshape(-1)
            digest.update(view_bytes(flat[:: max(1, len(flat) // _CONFIRMED_VALUES)].double()))
        device = self.current_sample.device if self.current_sample is not None else torch.device("cpu")
        own_digest = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).to(device)
        values = [tuple(words) for words in self._gather_words(own_digest)]
        for positions in suspected:
            same = [p for p in positions if values.count(values[p]) > 1]
            if same:
                return same
        return []

    def _gather_words(self, words: Tensor) -> list[list[int]]:
        """Gather int64 words of each rank to the host. Collective.

        Raises:
            RanksLost: another rank has died, or does not answer in time.
        """
        gathered = [torch.empty_like(words) for _ in range(self.placement.num_ranks)]
        with raise_ranks_lost():
            work: Any = dist.all_gather(gathered, words, group=get_group(self.group), async_op=True)
            wait_on_host(work, self.timeout)
            return torch.stack(gathered).tolist()

    def _list_expert_tensors(self) -> list[Tensor]:
        return self.parameters.tensors(self.block, self.placement.local_experts)

    @torch.no_grad()
    def _sample_experts(self) -> Tensor | None:
        """Return a few values of this rank's first and last expert, as int64 [2 * _WORDS_PER_EXPERT]."""
        first, last = self.sampled
        if first != last:  # each expert has separate parameters
            samples = [_sample_values(_local_part(find_owner_and_tensor(self.block, name)[1])) for name in self.sampled]
        else:
            local = _local_part(find_owner_and_tensor(self.block, first)[1])
            part = len(local) // self.placement.experts_per_rank if not self.parameters.separate else len(local)
            samples = [_sample_values(local[:part]), _sample_values(local[len(local) - part :])]
        words = [part for part in samples if part is not None]
        return torch.cat(words) if len(words) == 2 else None

    def _find_sampled_names(self) -> tuple[str, str]:
        """Find the names of the largest parameter of the first and of the last expert; the same name twice for a
        stack."""
        parameters, experts = self.parameters, self.placement.local_experts
        if not parameters.separate:
            name = max(parameters.stacked, key=lambda name: find_owner_and_tensor(self.block, name)[1].numel())
            return name, name
        sizes = [find_owner_and_tensor(self.block, name)[1].numel() for name in parameters.separate[experts[0]]]
        index = sizes.index(max(sizes))
        return parameters.separate[experts[0]][index], parameters.separate[experts[-1]][index]

    def __deepcopy__(self, memo: dict[int, Any]) -> OverwritingWatch:
        block = memo.get(id(self.block), self.block)
        memo[id(self)] = duplicate = type(self).__new__(type(self))
        duplicate.__dict__.update(self.__dict__, block=block, accepted_ddp=None)
        register_sampler(duplicate)
        return duplicate


class AcceptLoadedExperts:
    """A post-hook of `load_state_dict`: accept the loaded experts as correct."""

    def __call__(self, block: nn.Module, incompatible_keys: Any) -> None:
        watch = getattr(vars(block).get("forward"), "watch", None)
        if watch is not None:
            watch.accept_experts()


def _local_part(t: Tensor) -> Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach()


def _sample_values(t: Tensor) -> Tensor | None:
    """Sample values from the middle of a local tensor, as int64 [_WORDS_PER_EXPERT]. A view if the tensor is
    contiguous."""
    if t.is_meta or t.layout != torch.strided or not t.numel():
        return None
    flat, per_word = t.reshape(-1), max(8 // t.element_size(), 1)
    length, middle = _WORDS_PER_EXPERT * per_word, len(flat) // 2
    start = middle - (flat.storage_offset() + middle) % per_word
    if 0 <= start <= len(flat) - length and t.element_size() <= 8:
        return flat[start : start + length].view(torch.int64)
    return flat[torch.arange(_WORDS_PER_EXPERT, device=flat.device) % len(flat)].double().view(torch.int64)


def _iterate_running_modules(frame: Any) -> Iterator[nn.Module]:
    """Return the modules whose `forward` is running, innermost first."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount:
            module = frame.f_locals.get(code.co_varnames[0])
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back
