"""A region of a converted tensor is that of the whole conversion, and reads only its sources' regions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moefx.checkpoints.tensor_regions import RecordedConversion, Region

CONVERSIONS = {
    "stack and concatenate": lambda t: {
        "r": torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["c"], t["d"]])], 1)
    },
    "chunk": lambda t: dict(zip("rs", (part.contiguous() for part in t["a"].chunk(2, -1)), strict=True)),
    "split unevenly": lambda t: dict(zip("rs", t["a"].split([1, 3]), strict=True)),
    "unbind and stack": lambda t: {"r": torch.stack([*t["a"].unbind(1), *t["b"].unbind(1)], -1)},
    "select and squeeze": lambda t: {"r": t["a"][1], "s": torch.stack([t["a"]]).squeeze(0), "u": t["b"][:, 1:5:2]},
    "transpose": lambda t: {"r": t["a"].T.contiguous(), "s": torch.stack([t["a"], t["b"]]).permute(2, 0, 1)},
    "unsqueeze": lambda t: {"r": torch.cat([t["a"].unsqueeze(-1), t["b"].unsqueeze(-1)], -1).mT},
    "interleave": lambda t: {"r": t["a"].reshape(2, 2, 6).transpose(0, 1).reshape(4, 6)},
    "compute": lambda t: {"r": (t["a"] * 2 + t["b"]).clone()},
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_regions_are_those_of_the_whole_result(name):
    tensors = {key: torch.randn(4, 6) for key in "abcd"}
    recorded = RecordedConversion(CONVERSIONS[name], {key: (t.shape, t.dtype) for key, t in tensors.items()})
    read_elements = 0

    def read(key: str, region: Region, out: Tensor) -> None:
        nonlocal read_elements
        part = tensors[key][tuple(slice(*each) for each in region)]
        assert part.shape == out.shape
        read_elements += part.numel()
        if not out.is_meta:
            out.copy_(part)

    for key, whole in CONVERSIONS[name](tensors).items():
        assert recorded.results[key].shape == whole.shape
        regions = [tuple((0, size) for size in whole.shape), tuple((size // 2, size) for size in whole.shape)]
        regions.append(tuple((min(1, size - 1), size - size // 3) for size in whole.shape))
        for region in regions:
            wanted = whole[tuple(slice(*each) for each in region)]
            out, read_elements = torch.full(wanted.shape, math.nan), 0
            recorded.fill(out, key, region, read)
            assert torch.equal(out, wanted)
            if name not in ("interleave", "compute"):
                assert read_elements == wanted.numel()
            before, read_elements = read_elements, 0
            recorded.fill(out.to("meta"), key, region, read)  # a rank that sends reads the same regions
            assert read_elements == before


def test_what_cannot_be_recorded_raises():
    shapes = {"a": ((4, 6), torch.float32)}
    with pytest.raises(NotImplementedError, match="in place"):
        RecordedConversion(lambda t: {"r": t["a"].mul_(2)}, shapes)
    with pytest.raises(Exception, match="meta"):
        RecordedConversion(lambda t: {"r": t["a"] if t["a"].sum().item() > 0 else t["a"].T}, shapes)
