"""MoE layers of other libraries with their experts over all ranks, for `bench ep`.

Each has the weights and the routing of the given layer, so its output can be compared. A library that is not installed,
or whose layer cannot compute this one, raises `PeerMissing`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .shapes import Shape

if TYPE_CHECKING:
    from .ep_layers import Layer


class PeerMissing(Exception):
    """A library is not installed, is too old, or has no layer that computes the same."""


def build_transformers(layer: Layer, shape: Shape) -> nn.Module:
    """Build the experts of transformers' Qwen3 with its own expert parallelism (5.24), all-to-all and `grouped_mm`."""
    _refuse_ungated("transformers", shape)
    parallel = _find("transformers", "transformers.distributed.expert_parallel", "apply_expert_parallelism")
    config_class = _find("transformers", "transformers", "Qwen3MoeConfig")
    experts_class = _find("transformers", "transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")
    config = config_class(
        hidden_size=shape.d, moe_intermediate_size=shape.h, num_experts=shape.E, num_experts_per_tok=shape.K
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts = experts_class(config)
    experts.gate_up_proj, experts.down_proj = (nn.Parameter(p.detach()) for p in (layer.up, layer.down))
    ranks = dist.get_world_size()
    mesh = init_device_mesh(layer.up.device.type, (ranks, 1), mesh_dim_names=("ep", "tp"))
    built = _PeerLayer(layer, lambda x, weights, ids: experts(x, ids, weights.to(x.dtype)))
    built.experts = experts
    plan = {f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    plan |= {"experts": "ep_dispatch_experts"}  # last: it reads the number of local experts
    parallel(built, mesh["ep"], mesh["tp"], plan, "all_to_all")
    return built


def build_torchtitan(layer: Layer, shape: Shape) -> nn.Module:
    """Build torchtitan's grouped experts behind its all-to-all."""
    dispatcher = _find("torchtitan", "torchtitan.models.common.token_dispatcher", "AllToAllTokenDispatcher")
    return _build_titan(layer, shape, dispatcher(dispatcher.Config(num_experts=shape.E, top_k=shape.K)))


def build_torchtitan_async(layer: Layer, shape: Shape) -> nn.Module:
    """Build torchtitan's grouped experts behind MinimalAsyncEP, which writes to the memory of other GPUs."""
    dispatcher = _find("torchtitan", "torchtitan.models.common.token_dispatcher", "MinimalAsyncEPTokenDispatcher")
    if layer.up.device.type != "cuda":
        raise PeerMissing("torchtitan's MinimalAsyncEP needs GPUs")
    sizes = dict(num_experts=shape.E, top_k=shape.K, hidden_dim=shape.d, num_max_tokens_per_rank=shape.T)
    return _build_titan(layer, shape, dispatcher(dispatcher.Config(**sizes, dtype=torch.bfloat16)))


def _build_titan(layer: Layer, shape: Shape, dispatcher: Any) -> nn.Module:
    _refuse_ungated("torchtitan", shape)
    experts_class = _find("torchtitan", "torchtitan.models.common.moe", "GroupedExperts")
    ranks = dist.get_world_size()
    per_rank = shape.E // ranks
    own = slice(per_rank * dist.get_rank(), per_rank * (dist.get_rank() + 1))
    config = experts_class.Config(dim=shape.d, hidden_dim=shape.h, num_experts=per_rank)
    with torch.device("meta"):
        experts = experts_class(config)
    gate, up = (part[own].detach().clone() for part in layer.up.chunk(2, 1))
    parts = {"w1_EFD": gate, "w3_EFD": up, "w2_EDF": layer.down[own].detach().clone()}
    for name, part in parts.items():
        if not hasattr(experts, name):
            raise PeerMissing(f"torchtitan {metadata.version('torchtitan')} has experts without {name}: 0.3 has it")
        setattr(experts, name, nn.Parameter(part))
    # Its collectives without the checks of types; those with them cannot run uneven all-to-alls over gloo.
    _find("torchtitan", "torchtitan.distributed.utils", "set_spmd_backend")("partial_dtensor")
    dispatcher.wire_meshes(ep_mesh=init_device_mesh(layer.up.device.type, (ranks,), mesh_dim_names=("ep",)))

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        counts = torch.bincount(ids.flatten(), minlength=shape.E)
        rows, arrived, state = dispatcher.dispatch(x, weights, ids, counts)
        return dispatcher.combine(experts(rows, arrived), state, x)

    built = _PeerLayer(layer, run)
    built.experts = experts
    return built


def build_deepspeed(layer: Layer, shape: Shape) -> nn.Module:
    import_library("deepspeed")
    raise PeerMissing(
        "DeepSpeed-MoE is installed and not measured: it routes by a gate of its own, with a capacity, so its layer "
        "computes another function"
    )


def build_tutel(layer: Layer, shape: Shape) -> nn.Module:
    import_library("tutel")
    raise PeerMissing("Tutel is installed and not measured: its experts have no gate, so its layer is another one")


class _PeerLayer(nn.Module):
    """The given layer's router before the experts of a peer, [T,d] to [T,d].

    Args:
        run: experts on tokens [T,d], weights [T,K] and ids [T,K].
    """

    experts: nn.Module

    def __init__(self, layer: Layer, run: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.router, self.run, self._choose = layer.router, run, layer.choose

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self._choose(x))


def import_library(name: str) -> Any:
    """Import a module.

    Raises:
        PeerMissing: it is not installed, or its import fails here.
    """
    library = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise PeerMissing(f"{library} is not installed: {error}") from None
    except Exception as error:  # of its own extensions
        raise PeerMissing(f"{library} cannot be imported here: {type(error).__name__}: {error}") from error


def _find(library: str, module: str, name: str) -> Any:
    import_library(library)
    try:
        return getattr(import_library(module), name)
    except (PeerMissing, AttributeError) as error:
        version = metadata.version(library)
        raise PeerMissing(f"{library} {version} has no {module}.{name} that can be imported: {error}") from None


def _refuse_ungated(library: str, shape: Shape) -> None:
    if not shape.gated:
        raise PeerMissing(f"{library} is measured with SwiGLU alone")
