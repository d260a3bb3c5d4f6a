"""Sizes of a model that the planner's formulas take, and its number of parameters (Piper table II).

All sizes are in elements. `Architecture.parameters()` equals the count over the model's own modules.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import MoefxError, UnknownArchitecture


def check_whole_numbers(error: type[MoefxError], where: str = "", /, **sizes: Any) -> None:
    """Check that all sizes are whole numbers above 0.

    Args:
        where: prefix of the message.

    Raises:
        error: a size is not.
    """
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise error(f"{where}{name} is {value!r}, expected a whole number above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head attention, GQA (fewer heads for keys and values), or MLA (keys and values from a latent row).

    Attributes:
        num_heads: query heads, 0 without attention.
        num_kv_heads: heads of keys and values.
        head_size: width of a query or key head, the part with positions included.
        value_size: width of a value head, `head_size` if None.
        query_rank, kv_rank: MLA only: widths of the latent rows. Queries have no latent row if `query_rank` is 0.
        rope_size: MLA only: width of the key part that all heads share.
        has_bias: whether the four projections have biases.
        num_extra: all other parameters: norms of queries and keys, sinks, an indexer.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int | None = None
    query_rank: int = 0
    kv_rank: int = 0
    rope_size: int = 0
    has_bias: bool = False
    num_extra: int = 0

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def out_width(self) -> int:
        """Width of the input of the output projection."""
        return self.num_heads * (self.value_size or self.head_size)

    @property
    def kv_width(self) -> int:
        """Width of keys and values together, as attention reads them."""
        return self.num_kv_heads * (self.head_size + (self.value_size or self.head_size))

    def parameters(self, hidden_size: int) -> int:
        """Count the parameters of one layer's attention."""
        d, total = hidden_size, self.num_extra + self.out_width * hidden_size
        if self.kv_rank:
            nope = self.head_size - self.rope_size
            total += d * (self.kv_rank + self.rope_size) + self.kv_rank  # down, and the latent row's norm
            total += self.kv_rank * self.num_heads * (nope + (self.value_size or self.head_size))
        else:
            total += d * self.kv_width
        if self.query_rank:
            total += d * self.query_rank + self.query_rank + self.query_rank * self.query_width
        else:
            total += d * self.query_width
        if self.has_bias:
            total += self.query_width + self.kv_width + d
        return total


NO_ATTENTION = Attention(num_heads=0, num_kv_heads=0, head_size=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of transformer layers, some or all of them with experts.

    Attributes:
        name: name of the model.
        hidden_size: model dimension (Piper's d, X-MoE's H).
        num_layers, num_moe_layers: number of layers, and of layers with experts.
        num_experts: routed experts in a layer.
        top_k: experts of a token.
        expert_size: hidden width of an expert (d_ffn, H_FFN).
        matrices: matrices of an expert: 3 with a gate (SwiGLU), else 2.
        shared_size: hidden width of all shared experts together, or of the dense branch of a Dense-MoE hybrid.
        dense_size: hidden width of the FFN in layers without experts.
        vocab_size: size of the vocabulary.
        is_tied: whether the embedding is also the output projection.
        router_bias: router parameters in a layer beside the matrix.
        expert_bias: whether expert projections have biases.
        norms: RMSNorms in a layer.
        num_other: parameters outside of layers and embeddings.
        pointwise_bytes: bytes of a token that element-wise operations of a layer read and write in a forward, without
            those of routed experts; 0 if unknown. `describe` counts them in a run of the model.
        context: longest supported sequence in tokens, 0 if unknown.
        published: (total, active) parameters according to the authors, 0 if unpublished.
        source: origin of the sizes.
        note: differences between the count and the published total, with the reason.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_moe_layers: int
    attention: Attention
    num_experts: int
    top_k: int
    expert_size: int
    matrices: int = 3
    shared_size: int = 0
    dense_size: int = 0
    vocab_size: int = 0
    is_tied: bool = False
    router_bias: int = 0
    expert_bias: bool = False
    norms: int = 2
    num_other: int = 0
    pointwise_bytes: int = 0
    context: int = 0
    published: tuple[float, float] = (0, 0)
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "num_layers", "num_moe_layers", "num_experts", "top_k", "expert_size")
        check_whole_numbers(UnknownArchitecture, f"{self.name}: ", **{name: getattr(self, name) for name in sizes})
        if self.top_k > self.num_experts:
            raise UnknownArchitecture(f"{self.name}: a token takes {self.top_k} of {self.num_experts} experts")
        if self.num_moe_layers > self.num_layers:
            raise UnknownArchitecture(f"{self.name}: {self.num_moe_layers} of {self.num_layers} layers have experts")
        if self.matrices not in (2, 3):
            raise UnknownArchitecture(f"{self.name}: experts of {self.matrices} matrices, expected 2 or 3")
        if self.num_moe_layers < self.num_layers and not self.dense_size:
            raise UnknownArchitecture(f"{self.name}: layers without experts need a dense_size")

    def expert_parameters(self) -> int:
        """Count the parameters of one expert."""
        up, d = (self.matrices - 1) * self.expert_size, self.hidden_size
        return d * (up + self.expert_size) + (up + d if self.expert_bias else 0)

    def shared_parameters(self) -> int:
        """Count the parameters of one layer's router and shared experts."""
        d = self.hidden_size
        return d * self.num_experts + self.router_bias + self.matrices * d * self.shared_size

    def dense_parameters(self) -> int:
        """Count the parameters of the FFN in one layer without experts."""
        return self.matrices * self.hidden_size * self.dense_size

    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)

    def parameters(self, experts: int | None = None) -> int:
        """Count the parameters of the whole model.

        Args:
            experts: routed experts to count in each layer, all if None. `top_k` gives the active parameters.
        """
        count = self.num_experts if experts is None else experts
        layers = self.num_layers * (self.attention.parameters(self.hidden_size) + self.norms * self.hidden_size)
        moe = self.num_moe_layers * (count * self.expert_parameters() + self.shared_parameters())
        dense = (self.num_layers - self.num_moe_layers) * self.dense_parameters()
        last_norm = self.hidden_size if self.norms else 0
        return layers + moe + dense + self.embedding_parameters() + last_norm + self.num_other

    def replace(self, **changes: Any) -> Architecture:
        return dataclasses.replace(self, **changes)
