"""A kernel that takes as long as it is told."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

_PROGRAMS = 16  # as many multiprocessors as NCCL would use channels
_BLOCK = 4096
_compiled: dict[torch.dtype, Any] = {}


@triton.jit(do_not_specialize=["number", "nanoseconds"], do_not_specialize_on_alignment=["source", "out"])
def mirrored_exchange(source, out, number, nanoseconds, BLOCK: tl.constexpr):
    begin = globaltimer()
    for start in range(tl.program_id(0) * BLOCK, number, tl.num_programs(0) * BLOCK):
        index = start + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(out + index, tl.load(source + index, mask=index < number), mask=index < number)
    while globaltimer() - begin < nanoseconds:
        pass


def copy_for(seconds: float, source: Tensor, out: Tensor, stream: torch.cuda.Stream) -> None:
    """Copy what a contiguous tensor holds, in so many seconds at least, on a stream."""
    source, out = (t.reshape(-1).view(torch.uint8) for t in (source, out))
    word = torch.int64 if source.numel() % 8 == 0 else torch.uint8
    source, out = source.view(word), out.view(word)
    args = (source, out, source.numel(), round(seconds * 1e9))
    if (compiled := _compiled.get(word)) is None:
        with torch.cuda.stream(stream):
            _compiled[word] = mirrored_exchange[(_PROGRAMS,)](*args, BLOCK=_BLOCK, num_warps=16)
    else:  # at once: it should take no longer than NCCL does on the host
        compiled[(_PROGRAMS, 1, 1)](*args, _BLOCK, stream=stream.cuda_stream)
