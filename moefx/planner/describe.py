"""Read the architecture of a real model: its blocks from the match of `compile`, the rest from its parameters.

Nothing runs on a device. The model may be on the meta device: `with torch.device("meta"): model = ...`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .._plan import Plan
from ..compiler.survey import survey_model
from ..compiler.survey_result import Survey
from ..errors import UnknownArchitecture
from ..ir.expressions.expert_body import ExpertBody, find_up_widths
from ..ir.node_values import get_argument
from ..util.model_wrappers import unwrap_model
from .architecture import NO_ATTENTION, Architecture, Attention

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_SIZE = 128  # assumed if the number of heads is unknown


def describe(model: nn.Module, example_inputs: Any = None) -> Architecture:
    """Return the architecture of a model whose blocks `moefx.compile` rewrites.

    Parameters are counted exactly. The memory of attention depends on its heads, which are read from `model.config` or
    an attribute such as `num_heads`. If neither exists, heads of 128 are assumed if the model attends, and no
    attention otherwise; `note` says which.

    Args:
        example_inputs: as for `moefx.compile`.

    Raises:
        UnknownArchitecture: no block was rewritten, or the blocks differ. The message has the reasons or the sizes.
    """
    model = unwrap_model(model)
    survey = survey_model(model, example_inputs, Plan(validation="symbolic"))
    return describe_survey(model, survey)


def describe_survey(model: nn.Module, survey: Survey) -> Architecture:
    """`describe` for a model whose blocks are already surveyed."""
    graphs = {name: matched.result.graph for matched in survey.matched for name in matched.names}
    if not graphs:
        name, seen = type(model).__name__, "".join(f"\n  {refusal}" for refusal in survey.refused)
        raise UnknownArchitecture(
            f"the planner takes models with routed experts, and no block of {name} is rewritten{seen}"
            if seen
            else f"{name} has no experts: no module in it looks like a MoE block. The planner takes models with routed "
            "experts"
        )
    kinds: dict[tuple[int, ...], list[str]] = {}
    for name in (name for name, _ in model.named_modules() if name in graphs):
        kinds.setdefault(_read_expert_sizes(graphs[name], name), []).append(name)
    if len(kinds) > 1:
        seen = "; ".join(f"{names[0]}: {dict(zip(_SIZES, sizes, strict=True))}" for sizes, names in kinds.items())
        raise UnknownArchitecture(f"the planner takes models whose blocks are alike, these are not: {seen}")
    ((sizes, names),) = kinds.items()
    (d, num_experts, top_k, width, matrices, of_experts) = sizes
    layers = _find_layers(model, names)
    with_blocks = {path: name for name in names for path in layers if name == path or name.startswith(f"{path}.")}
    path, name = next(iter(with_blocks.items()))
    of_block, of_layer = _count_parameters(model.get_submodule(name)), _count_parameters(layers[path])
    other_parameters, biases = of_block - of_experts, of_experts - num_experts * matrices * d * width
    has_biases = biases == num_experts * ((matrices - 1) * width + d)
    shared_size = max(other_parameters - d * num_experts, 0) // (matrices * d)
    attention, note = _read_attention(model, layers[path], d, survey.has_attention)
    dense = [
        _count_parameters(layer) - (of_layer - of_block)
        for layer_path, layer in layers.items()
        if layer_path not in with_blocks
    ]
    vocab, outer_parameters = _count_outside(model, layers, d)
    is_tied = outer_parameters < 2 * vocab * d
    outer_parameters -= vocab * d * (1 if is_tied else 2)
    # Assume a decoder's norms (two a layer and a last one) if there are parameters for them. A lone block has none.
    norms = 2 if of_layer - of_block >= 2 * d and outer_parameters >= d else 0
    attention_parameters = of_layer - of_block - norms * d
    return Architecture(
        name=type(model).__name__, hidden_size=d, num_layers=len(layers), num_moe_layers=len(with_blocks),
        attention=dataclasses.replace(attention, num_extra=attention_parameters - attention.parameters(d)),
        num_experts=num_experts, top_k=top_k, expert_size=width, matrices=matrices, shared_size=shared_size,
        router_bias=other_parameters - d * num_experts - shared_size * matrices * d + (0 if has_biases else biases),
        expert_bias=has_biases,
        dense_size=round(sum(dense) / len(dense) / (matrices * d)) if dense else 0, vocab_size=vocab,
        is_tied=is_tied, norms=norms, num_other=outer_parameters - (d if norms else 0),
        pointwise_bytes=_count_pointwise_bytes(survey, with_blocks, d),
        source=f"the modules of {path or 'the model, one block'}", note=note,
    )  # fmt: skip


def _count_pointwise_bytes(survey: Survey, with_blocks: dict[str, str], d: int) -> int:
    """Count a token's bytes in the layer that the survey ran. Equal layers did not run.

    Args:
        with_blocks: the block of each layer.
    """
    call = survey.matched[0].call
    tensors = (t for t in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor))
    num_tokens = next((t.numel() // d for t in tensors if t.is_floating_point() and t.shape[-1] == d), 0)
    traffic = (survey.traffic.get(layer, 0) - survey.traffic.get(block, 0) for layer, block in with_blocks.items())
    return round(next(filter(None, traffic), 0) / num_tokens) if num_tokens else 0


_SIZES = ("hidden_size", "num_experts", "top_k", "expert_size", "matrices", "parameters of experts")


def _read_expert_sizes(graph: Any, name: str) -> tuple[int, ...]:
    """Read the sizes of a rewritten block, as `_SIZES` names them."""
    mlps = graph.find(torch.ops.moefx.expert_mlp.default)
    if len(mlps) != 1:
        raise UnknownArchitecture(f"{name} has {len(mlps)} kinds of fused experts; the planner takes blocks with one")
    x, offsets, inverse = (get_argument(mlps[0], name).meta["val"] for name in ("x", "expert_offsets", "inverse"))
    up = sum(find_up_widths(mlps[0]))
    weights = {w for name in ("up", "up_bias", "down", "down_bias") for w in get_argument(mlps[0], name) or ()}
    total = sum(w.meta["val"].numel() for w in weights)
    parts = len(ExpertBody.from_json(mlps[0].kwargs["body"]).parts)
    return x.shape[-1], offsets.shape[0] - 1, inverse.shape[-1], up // parts, parts + 1, total


def _find_layers(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Return the layers by name: all members of the outermost module lists that hold blocks. A block outside of a list
    is a layer itself."""
    layers: dict[str, nn.Module] = {}
    for name in names:
        steps = name.split(".")
        for i in range(1, len(steps)):
            inside = model.get_submodule(".".join(steps[:i]))
            if isinstance(inside, (nn.ModuleList, nn.Sequential)):
                layers |= {f"{'.'.join(steps[:i])}.{key}": child for key, child in inside.named_children()}
                break
        else:
            layers[name] = model.get_submodule(name)
    return layers


def _count_outside(model: nn.Module, layers: dict[str, nn.Module], d: int) -> tuple[int, int]:
    """Count (vocabulary size, parameters) outside of the layers.

    An embedding whose rows are not `d` wide is not the vocabulary's.
    """
    inside = {id(part) for layer in layers.values() for part in (*layer.modules(), *layer.parameters())}
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
    vocab = max((table.num_embeddings for table in tables if table.embedding_dim == d), default=0)
    return vocab, sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)


def _read_attention(model: nn.Module, layer: nn.Module, d: int, has_attention: bool) -> tuple[Attention, str]:
    """Return the sizes of attention, and a note on assumed ones."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    owners = [config, *layer.modules()]

    def first(names: tuple[str, ...]) -> int | None:
        values = (getattr(place, name, None) for place in owners for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    named = first(_HEADS)
    if not (named or has_attention):
        return NO_ATTENTION, "no attention is counted: no softmax(QK)V was seen, and no number of heads"
    heads = named or max(d // _HEAD_SIZE, 1)
    note = "" if named else f"it attends, but nothing names its heads: counted as {heads} of {d // heads} elements"
    kv_heads = first(_KV_HEADS) or heads
    if kv_rank := first(("kv_lora_rank",)):
        rope = first(("qk_rope_head_dim",)) or 0
        latent = Attention(
            num_heads=heads, num_kv_heads=heads, head_size=(first(("qk_nope_head_dim",)) or 0) + rope,
            value_size=first(("v_head_dim",)), query_rank=first(("q_lora_rank",)) or 0, kv_rank=kv_rank, rope_size=rope,
        )  # fmt: skip
        return latent, note
    head_size = first(("head_dim",)) or max(d // heads, 1)
    return Attention(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size), note


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
