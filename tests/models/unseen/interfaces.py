"""Unusual interfaces: input layouts, masks, return values, in-place effects, larger modules."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..case import D, E, H, K
from ..parts import Gated, Mlp, make_stack
from .suite import UNSEEN


def route(gate, t, k=K):
    w, idx = gate(t).softmax(-1).topk(k, -1)
    return w / w.sum(-1, keepdim=True), idx


class Mixture(nn.Module):
    """Mixture on rows of tokens, which the cases of this file wrap."""

    def __init__(self, expert=Gated, dim=D):
        super().__init__()
        self.gate = nn.Linear(dim, E, bias=False)
        self.experts = nn.ModuleList([expert() for _ in range(E)])

    def mix(self, t):
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out[n] += f(t[n]) * w[n, k, None]
        return out

    def forward(self, x):
        return self.mix(x.reshape(-1, x.shape[-1])).view_as(x)


@UNSEEN.case("s_sequence_first", "I1", "match", "[S, B, D] inputs, transposed on the way in and out", layout="sbd")
class SequenceFirst(Mixture):
    def forward(self, hidden_states):
        s, b, d = hidden_states.shape
        x = hidden_states.transpose(0, 1).contiguous().view(-1, d)
        return self.mix(x).view(b, s, d).transpose(0, 1)


@UNSEEN.case("s_two_dim_only", "I1", "match", "takes [tokens, D] only", layout="flat")
class TwoDimOnly(Mixture):
    def forward(self, x):
        assert x.dim() == 2, "flatten first"
        return self.mix(x)


def _image(b, s, g, dtype):
    return (torch.randn(b, D, s, 3, generator=g).to(dtype),)


@UNSEEN.case(
    "s_channels_first_image",
    "I1",
    "match",
    "[B, C, H, W] images, every pixel is a token",
    bare=True,
    inputs=_image,
)
class ChannelsFirst(Mixture):
    def forward(self, img):
        b, c, h, w = img.shape
        t = img.permute(0, 2, 3, 1).reshape(-1, c)
        return img + self.mix(t).reshape(b, h, w, c).permute(0, 3, 1, 2)


@UNSEEN.case(
    "s_multi_head_moe",
    "I1",
    "match",
    "MH-MoE: every token is split into sub-tokens which are routed on their own",
)
class MultiHeadMoe(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.sub = heads, D // heads
        self.multi_head_layer, self.merge_layer = nn.Linear(D, D), nn.Linear(D, D)
        self.gate = nn.Linear(self.sub, E, bias=False)
        self.experts = nn.ModuleList([Mlp(d=D // heads, h=12) for _ in range(E)])

    def forward(self, x):
        b, s, d = x.shape
        t = self.multi_head_layer(x).reshape(b, s, self.heads, self.sub).reshape(-1, self.sub)
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return self.merge_layer(out.reshape(b, s, self.heads, self.sub).reshape(b, s, d))


def _padding(b, s, g, dtype):
    mask = torch.rand(b, s, generator=g) < 0.7
    mask[:, 0] = True
    return (mask,)


@UNSEEN.case(
    "s_padding_to_nobody",
    "I1",
    "match",
    "padding tokens get the expert id E, which no expert has",
    extra=_padding,
)
class PaddingToNobody(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])

    def forward(self, x, mask):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        idx = idx.masked_fill(~mask.reshape(-1, 1), E)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_padding_zero_weight",
    "I1",
    "match",
    "weights of padding tokens are multiplied by the mask",
    extra=_padding,
)
class PaddingZeroWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w2 = make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x, attention_mask):
        t, live = x.reshape(-1, D), attention_mask.reshape(-1).to(x.dtype)
        logits = self.gate(t)
        w, idx = logits.softmax(-1).topk(K, -1)
        w = w * live[:, None]
        aux = (logits.softmax(-1) * live[:, None]).sum(0) / live.sum()
        out = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, F.gelu(t[n] @ self.w1[e]) @ self.w2[e] * w[n, k, None])
        return out.view_as(x), (aux * aux).sum()


@UNSEEN.case(
    "s_padding_compressed",
    "I1",
    "either",
    "x[mask] first, then the mixture, then written back",
    extra=_padding,
)
class PaddingCompressed(Mixture):
    def forward(self, x, mask):
        out = torch.zeros_like(x)
        out[mask] = self.mix(x[mask])
        return out


@dataclasses.dataclass
class MoeOutput:
    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    expert_ids: torch.Tensor
    aux_loss: torch.Tensor


@UNSEEN.case("s_dataclass_output", "I1", "match", "returns a dataclass with logits, ids and the auxiliary loss")
class DataclassOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        logits = self.gate(t)
        p = logits.softmax(-1)
        w, idx = p.topk(K, -1)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        frequency = torch.zeros(E, dtype=t.dtype).index_add(0, idx.flatten(), torch.ones(idx.numel(), dtype=t.dtype))
        return MoeOutput(out.view_as(x), logits, idx, E * (frequency / len(t) * p.mean(0)).sum())


@UNSEEN.case("s_loss_in_attribute", "I1", "match", "the auxiliary loss and the last load are left in attributes")
class LossInAttribute(nn.Module):
    """Store the auxiliary loss in an attribute, which the host reads as `inner.aux_loss` after the call."""

    def __init__(self):
        super().__init__()
        self.inner = AttributeMixture()

    def forward(self, x):
        y = self.inner(x)
        return y, self.inner.aux_loss, self.inner.last_load


class AttributeMixture(Mixture):
    def forward(self, x):
        t = x.reshape(-1, D)
        p = self.gate(t).softmax(-1)
        _, idx = p.topk(K, -1)
        self.last_load = torch.bincount(idx.flatten(), minlength=E)
        self.aux_loss = (p.mean(0) * self.last_load).sum()
        return self.mix(t).view_as(x)


UNSEEN.specs["s_loss_in_attribute"] = dataclasses.replace(UNSEEN.specs["s_loss_in_attribute"], blocks=("inner",))


@UNSEEN.case("s_residual_in_place", "I1", "match", "adds the experts' results into its own input and returns that")
class ResidualInPlace(Mixture):
    def forward(self, x):
        y = self.mix(x.clone().view(-1, D)).view_as(x)
        x += y
        return x


@UNSEEN.case("s_residual_clone", "I1", "match", "output starts as a clone of the tokens; rows are added to it")
class ResidualClone(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList([Gated() for _ in range(E)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        out = t.clone()
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case(
    "s_decoder_layer_inline",
    "I1",
    "match",
    "the mixture is written out in a layer's forward, next to a norm and a residual",
)
class DecoderLayerInline(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.ffn_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mix_tokens = nn.Linear(D, D)
        self.router = nn.Linear(D, E, bias=False)
        self.w_gate, self.w_up, self.w_down = make_stack(E, D, H), make_stack(E, D, H), make_stack(E, H, D)

    def forward(self, x):
        h = self.input_norm(x)
        x = x + self.mix_tokens(h.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None])
        t = self.ffn_norm(x).reshape(-1, D)
        w, idx = route(self.router, t)
        y = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            y.index_add_(0, n, (F.silu(t[n] @ self.w_gate[e]) * (t[n] @ self.w_up[e])) @ self.w_down[e] * w[n, k, None])
        return x + y.view_as(x)


@UNSEEN.case("s_shared_by_two_layers", "I1", "match", "one block object called twice in a forward", blocks=("block",))
class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Mixture(Mlp)

    def forward(self, x):
        return self.block(F.layer_norm(x + self.block(x), (D,)))


@UNSEEN.case(
    "s_router_apart",
    "I9a",
    "match",
    "the caller routes; the block gets tokens, ids and weights",
    blocks=("ffn",),
)
class RouterApart(nn.Module):
    class Ffn(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up, self.down = make_stack(E, D, 2 * H), make_stack(E, H, D)

        def forward(self, tokens, ids, weights):
            out = torch.zeros_like(tokens)
            for e in ids.unique().tolist():
                n, k = torch.where(ids == e)
                g, u = (tokens[n] @ self.gate_up[e]).chunk(2, -1)
                out.index_add_(0, n, (F.silu(g) * u) @ self.down[e] * weights[n, k, None])
            return out

    def __init__(self):
        super().__init__()
        self.gate, self.ffn = nn.Linear(D, E, bias=False), RouterApart.Ffn()

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        return self.ffn(t, idx, weights=w).view_as(x)


@UNSEEN.case("s_keyword_flags", "I1", "match", "Python flags select the results; the default is used")
class KeywordFlags(Mixture):
    def forward(self, x, *, return_load: bool = False, scale: float = 0.5):
        y = self.mix(x.reshape(-1, D)).view_as(x) * scale
        if return_load:
            return y, route(self.gate, x.reshape(-1, D))[1].flatten().bincount(minlength=E)
        return y


@UNSEEN.case("s_nested_mixture", "I1", "either", "the experts are mixtures themselves", num_experts=4, live=2)
class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList([Mixture(Mlp) for _ in range(4)])

    def forward(self, x):
        t = x.reshape(-1, D)
        w, idx = route(self.gate, t)
        out = torch.zeros_like(t)
        for e, f in enumerate(self.experts):
            n, k = torch.where(idx == e)
            out.index_add_(0, n, f(t[n]) * w[n, k, None])
        return out.view_as(x)


@UNSEEN.case("s_chunked_tokens", "I1", "either", "the tokens go through the loop in chunks of 16 to save memory")
class ChunkedTokens(Mixture):
    def forward(self, x):
        return torch.cat([self.mix(c) for c in x.reshape(-1, D).split(16)]).view_as(x)


@UNSEEN.case("s_value_experts", "I1", "match", "SwitchHead: attention whose value projection is a mixture")
class ValueExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.gate = nn.Linear(D, E, bias=False)
        self.v = make_stack(E, D, D)

    def forward(self, x):
        b, s, d = x.shape
        t = x.reshape(-1, d)
        w, idx = self.gate(t).sigmoid().topk(K, -1)
        v = torch.zeros_like(t)
        for e in range(E):
            n, k = torch.where(idx == e)
            v.index_add_(0, n, (t[n] @ self.v[e]) * w[n, k, None])
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), v.view(b, s, d), is_causal=True)
        return self.o(y)
