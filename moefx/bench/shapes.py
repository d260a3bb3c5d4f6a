"""The ten shapes of expert MLPs that the GPU benchmarks run, and how their tensors are made."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..ir.body import ExpertBody, Gemm


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens of width d, E experts of hidden width h, K of them for each token."""

    name: str
    T: int
    d: int
    h: int
    E: int
    K: int

    @property
    def flops(self) -> int:
        """Of one d x h matrix over all routed rows: forward and backward take nine of them."""
        return 2 * self.T * self.K * self.d * self.h

    @property
    def small(self) -> Shape:
        """Few tokens and experts of the same widths, which is what kernels are compiled for."""
        return dataclasses.replace(self, T=64, E=min(self.E, 16))


SHAPES = [
    Shape("qwen3_30b", 16384, 2048, 768, 128, 8),
    Shape("olmoe", 32768, 2048, 1024, 64, 8),
    Shape("fine7b", 16384, 1536, 256, 128, 8),
    Shape("mixtral", 8192, 4096, 14336, 8, 2),
    Shape("gptoss20b", 16384, 2880, 2880, 32, 4),
    Shape("dsv3_e64", 8192, 7168, 2048, 64, 8),
    Shape("dsv3_e256", 8192, 7168, 2048, 256, 8),
    Shape("blaze_c3", 65536, 1024, 4096, 16, 4),
    Shape("blaze_c6", 8192, 2048, 8192, 8, 4),
    Shape("blaze_t2", 131072, 256, 1024, 128, 4),
]


def shape_of(text: str) -> Shape:
    """One of the ten by its name, also with another number of tokens (`olmoe@512`), or any other one (TxdxhxExK)."""
    name, _, tokens = text.partition("@")
    found = next((s for s in SHAPES if s.name == name), None)
    try:
        if found is None:
            return Shape(text, *map(int, text.split("x")))
        return dataclasses.replace(found, name=text, T=int(tokens)) if tokens else found
    except (ValueError, TypeError):
        raise ValueError(
            f"no shape {text!r}: expected one of {', '.join(s.name for s in SHAPES)}, or TxdxhxExK"
        ) from None


def routed(shape: Shape, device: str = "cuda", kind: str = "uniform", seed: int = 0) -> tuple[Tensor, Tensor]:
    """(ids [T,K], weights [T,K] float32). "uniform": random scores, max/mean rows an expert about 1.1 to 1.3;
    "zipf": expert e is wanted as 1/(e+1); "hot": every token's first choice is expert 0."""
    generator = torch.Generator(device=device).manual_seed(seed)
    scores = torch.randn(shape.T, shape.E, device=device, generator=generator)
    if kind == "zipf":
        scores = scores - torch.arange(1, shape.E + 1, device=device).log()
    elif kind == "hot":
        scores[:, 0] = 100.0
    elif kind != "uniform":
        raise ValueError(f"routing {kind!r}: expected uniform, zipf or hot")
    ids = scores.topk(shape.K, 1).indices
    weights = torch.rand(shape.T, shape.K, device=device, generator=generator).softmax(1)
    return ids, weights


def tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> tuple[Tensor, ...]:
    """x [T,d], w1 [E,2h,d] (gate above up), w2 [E,d,h], grad [T,d]."""
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        # In parts: float32 of all experts at once would be twice the memory of the weights.
        out = torch.empty(size, dtype=dtype, device=device)
        for part in out.split(max(1, 2**28 // out[0].numel())):
            part.copy_(torch.randn(part.shape, device=device, generator=generator) * scale)
        return out

    x, grad = normal(shape.T, shape.d), normal(shape.T, shape.d)
    w1 = normal(shape.E, 2 * shape.h, shape.d, scale=shape.d**-0.5)
    w2 = normal(shape.E, shape.d, shape.h, scale=shape.h**-0.5)
    return x, w1, w2, grad


def swiglu(shape: Shape) -> ExpertBody:
    """Gate above up in one stack, the routing weight applied to the output in bfloat16."""
    return ExpertBody(
        up=(Gemm(1, True),),
        parts=((0, None, shape.h, 1), (0, shape.h, None, 1)),
        act=("mul.Tensor", ("silu", "a0"), "a1"),
        down=Gemm(1, True),
        out=("_to_copy", ("mul.Tensor", "y", "w"), {"dtype": "bfloat16"}),
    )
