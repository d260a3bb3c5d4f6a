"""The shapes of expert MLPs that the GPU benchmarks run, and how their tensors are made."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ir.expressions.expert_body import ExpertBody, Gemm


@dataclasses.dataclass(frozen=True)
class Shape:
    """T tokens of width d, E experts of hidden width h, K of them for each token.

    Attributes:
        gated: SwiGLU; else SiLU of one up-projection.
    """

    name: str
    T: int
    d: int
    h: int
    E: int
    K: int
    gated: bool = True

    @property
    def flops(self) -> int:
        """Of one d x h matrix over all routed rows: forward and backward take three times `matrices`."""
        return 2 * self.T * self.K * self.d * self.h

    @property
    def matrices(self) -> int:
        """d x h matrices of an expert."""
        return self.parts + 1

    @property
    def parts(self) -> int:
        """Up-projections of an expert, each of h columns."""
        return 2 if self.gated else 1

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
_BY_NAME = {shape.name: shape for shape in SHAPES} | {  # and the rest of MoEBlaze's table 1
    "blaze_c1": Shape("blaze_c1", 65536, 512, 2048, 4, 1),
    "blaze_c2": Shape("blaze_c2", 65536, 1024, 4096, 8, 2),
    "blaze_c4": Shape("blaze_c4", 32768, 512, 2048, 16, 4),
    "blaze_c5": Shape("blaze_c5", 16384, 1024, 4096, 16, 4),
}
_UNGATED = "/silu"


def parse_shape(text: str) -> Shape:
    """Parse the shape of an expert MLP: a name (`olmoe`), a name with another number of tokens (`olmoe@512`), or sizes
    (`TxdxhxExK`). The suffix `/silu` means experts without a gate."""
    sizes, gated = text.removesuffix(_UNGATED), not text.endswith(_UNGATED)
    name, _, tokens = sizes.partition("@")
    try:
        if name not in _BY_NAME:
            T, d, h, E, K = map(int, sizes.split("x"))
            return Shape(text, T, d, h, E, K, gated)
        named = _BY_NAME[name]
        return dataclasses.replace(named, name=text, T=int(tokens) if tokens else named.T, gated=gated)
    except (ValueError, TypeError):
        raise ValueError(
            f"no shape {text!r}: expected one of {', '.join(_BY_NAME)}, NAME@T or TxdxhxExK, with {_UNGATED} or not"
        ) from None


ROUTINGS = ("uniform", "zipf", "hot")


def skew_scores(scores: Tensor, kind: str) -> Tensor:
    """Skew the scores [...,E] of experts.

    "uniform": not at all; normal scores give the busiest expert 1.1 to 1.3 times the mean. "zipf": expert e is wanted
    as 1/(e+1). "hot": every token's first choice is expert 0.
    """
    experts = torch.arange(scores.shape[-1], device=scores.device)
    if kind == "uniform":
        return scores
    if kind == "zipf":
        return scores - (experts + 1).log()
    if kind == "hot":
        return torch.where(experts == 0, 20.0, scores)
    raise ValueError(f"routing {kind!r}: expected one of {', '.join(ROUTINGS)}")


def random_routing(shape: Shape, device: str = "cuda", kind: str = "uniform", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw (ids [T,K], weights [T,K] float32), with normal scores of the experts. `kind` is that of `skew_scores`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    scores = skew_scores(torch.randn(shape.T, shape.E, device=device, generator=generator), kind)
    ids = scores.topk(shape.K, 1).indices
    weights = torch.rand(shape.T, shape.K, device=device, generator=generator).softmax(1)
    return ids, weights


def draw_tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> tuple[Tensor, ...]:
    """Draw x [T,d], w1 [E,2h,d] (gate above up; [E,h,d] without a gate), w2 [E,d,h], grad [T,d]."""
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        # In parts: float32 of all experts at once would be twice the memory of the weights.
        out = torch.empty(size, dtype=dtype, device=device)
        for part in out.split(max(1, 2**28 // out[0].numel())):
            part.copy_(torch.randn(part.shape, device=device, generator=generator) * scale)
        return out

    x, grad = normal(shape.T, shape.d), normal(shape.T, shape.d)
    w1 = normal(shape.E, shape.parts * shape.h, shape.d, scale=shape.d**-0.5)
    w2 = normal(shape.E, shape.d, shape.h, scale=shape.h**-0.5)
    return x, w1, w2, grad


def activation(shape: Shape, hidden: Tensor) -> Tensor:
    """Apply the activation: [...,2h], or [...,h] without a gate, to [...,h]."""
    if not shape.gated:
        return F.silu(hidden)
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate) * up


def expert_body(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> ExpertBody:
    """Build a body with gate above up in one stack, and the routing weight applied to the output in the rows' dtype."""
    return ExpertBody(
        up=(Gemm(1, True),),
        parts=((0, None, shape.h, 1), (0, shape.h, None, 1)) if shape.gated else ((0, None, None, 1),),
        act=("mul.Tensor", ("silu", "a0"), "a1") if shape.gated else ("silu", "a0"),
        down=Gemm(1, True),
        out=("_to_copy", ("mul.Tensor", "y", "w"), {"dtype": str(dtype).removeprefix("torch.")}),
    )
