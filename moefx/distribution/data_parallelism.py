"""`parallelize`: shard a spread model with FSDP2, so that its gradients are of the mean loss of all ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from ..errors import InvalidInput, InvalidPlan
from ..runtime.block_forward import find_rewritten_blocks
from ..runtime.ranks.data_parallel_wrappers import DDP_REFUSAL, refuse_accelerate
from ..runtime.ranks.gradient_division import divide_gradients
from ..runtime.ranks.reductions import GRADIENT_WATCH
from ..runtime.ranks.replaced_parameters import GatheredParameters
from ..runtime.ranks.sharding import format_mesh
from ..runtime.ranks.staged_models import refuse_pipeline
from ..runtime.ranks.state_dicts import ShardOnLoad, join_name
from ..util.model_wrappers import unwrap_model
from .data_axes import DataAxes, DataMeshes, choose_data_axes
from .expert_layouts import find_expert_layouts
from .layer_container import CONTAINERS, find_layer_container
from .training_wiring import SPREAD_MESH, SpreadMesh

_REPLACED = "moefx.parallelize or moefx.pipeline replaced them. Build the optimizer afterwards"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    data: Literal["fsdp", "ddp", "hsdp"] = "fsdp",
    shard_axes: str | tuple[str, ...] | None = None,
    replicate_axes: str | tuple[str, ...] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard a model that `compile` has spread over a mesh with torch's FSDP2, in place. After `loss.backward()` each
    gradient is that of the mean of the losses of all data ranks. Collective: every rank of the mesh calls it.

    Experts are sharded over the data axes beside the expert axis, all other parameters over all data axes. Each
    parameter becomes a DTensor: `AdamW(foreach=True)` and `AdamW(fused=True)` take all of them in one group. Modules
    become FSDP modules: `model.set_requires_gradient_sync(False)` accumulates gradients without communication. Stacked
    experts without data axes of their own stay as they are: FSDP would copy them twice in each forward and backward.

    The data axes are those whose ranks have different tokens: all but "pp", the sequence axis, and "tp" unless experts
    are spread over it.

    Args:
        mesh: the mesh that `compile` was given.
        data: "fsdp" shards over all data axes. "ddp" shards nothing. "hsdp" replicates over `replicate_axes` and shards
            over the rest.
        shard_axes: the data axes over which to shard. Default: those that `data` implies.
        replicate_axes: the data axes over which to replicate. Default for "hsdp": axes with "replica" in their name.
        mp_policy: the precision of parameters and reductions, as for `fully_shard`.
        reshard_after_forward: free gathered parameters after the forward. Those of the outermost module only after a
            forward without gradients.

    Returns:
        The model.

    Raises:
        InvalidPlan: the mesh is not the one of `compile` or has a pipeline axis; an axis is unknown, is used twice or
            not at all; or a parameter that holds all experts cannot be cut evenly.
        InvalidInput: the model was not compiled over a mesh, is sharded already, or has parameters that FSDP cannot
            shard.
    """
    sharding = plan_sharding(model, mesh, data, shard_axes, replicate_axes, mp_policy, reshard_after_forward)
    sharding.apply()
    return model


def plan_sharding(
    model: nn.Module,
    mesh: DeviceMesh,
    data: Literal["fsdp", "ddp", "hsdp"],
    shard_axes: str | tuple[str, ...] | None,
    replicate_axes: str | tuple[str, ...] | None,
    mp_policy: MixedPrecisionPolicy | None,
    reshard_after_forward: bool,
) -> Sharding:
    """Check the arguments of `parallelize`, and plan how it shards the model. Changes nothing, makes no process group.

    Raises:
        InvalidPlan, InvalidInput: see `parallelize`.
    """
    root = unwrap_model(model)
    refuse_pipeline(root, "parallelize")
    spread_mesh = _find_spread_mesh(root, mesh)
    expert_reduction, other_reduction = spread_mesh.reductions["experts"], spread_mesh.reductions["others"]
    axes = choose_data_axes(mesh, other_reduction.axes, data, shard_axes, replicate_axes)
    expert_axes = axes.restrict(expert_reduction.axes)
    experts = _group_expert_parameters(root)
    _check_parameters(root, experts)
    all_experts = {parameter for parameters in experts.values() for parameter in parameters}
    placements = dict(choose_placements(root, all_experts, expert_axes.count_shards(mesh)))
    policy = mp_policy or MixedPrecisionPolicy()
    whole = set() if expert_axes.shard or expert_axes.replicate else set(_find_whole_blocks(experts, policy))
    # FSDP averages over the ranks that reduce an expert's gradient. Divide by the ranks of the expert axis here: the
    # gradient is summed over them already. `set_gradient_divide_factor` divides twice on a shard axis of one rank.
    divisor = expert_reduction.divisor // math.prod(mesh[name].size() for name in expert_reduction.axes)
    return Sharding(
        root, mesh, spread_mesh, axes, expert_axes, experts, placements, whole, divisor, policy, reshard_after_forward
    )


@dataclasses.dataclass(frozen=True)
class Sharding:
    """The arguments of torch's `fully_shard` for the modules of a model that `compile` has spread.

    Attributes:
        root, mesh: the model and its mesh. spread_mesh: the record of `compile`.
        axes, expert_axes: the data axes of all other parameters, and of experts.
        experts: the parameters of this rank's experts by block.
        placements: the dimension over which each parameter that holds all experts is sharded.
        whole: the blocks whose experts stay as they are.
        divisor: the number by which gradients of experts are divided after their reduction.
        policy, reshard_after_forward: as for `parallelize`.
    """

    root: nn.Module
    mesh: DeviceMesh
    spread_mesh: SpreadMesh
    axes: DataAxes
    expert_axes: DataAxes
    experts: dict[str, set[nn.Parameter]]
    placements: dict[nn.Parameter, Shard]
    whole: set[str]
    divisor: int
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool

    def apply(self) -> None:
        """Shard the model in place. Collective over the mesh."""
        root, mesh = self.root, self.mesh
        replaced = self._mark_replaced_parameters()
        meshes = DataMeshes(mesh)
        self._shard_others(meshes.build(self.axes))
        self._shard_experts(meshes.build(self.expert_axes))
        for module in root.modules():
            if isinstance(module, FSDPModule):
                _set_reductions(module, mesh)
        root.register_load_state_dict_pre_hook(ShardOnLoad())
        finish_forward: Any = GatheredParameters(replaced, self.reshard_after_forward)
        root.register_forward_hook(finish_forward)
        lines = (
            f"{'experts':<12}{self.expert_axes}",
            f"{'others':<12}{self.axes}",
            f"{'all':<12}reduced by moefx.parallelize",
        )
        vars(root)[SPREAD_MESH] = dataclasses.replace(self.spread_mesh, parallelized=lines)
        DDP_REFUSAL.install(root)
        refuse_accelerate(root, mesh)

    def _mark_replaced_parameters(self) -> Any:
        """Mark the parameters that FSDP replaces, so that an optimizer of the old ones raises. Returns the marks."""
        kept = {parameter for name in self.whole for parameter in self.experts[name]}
        replaced = vars(self.root)[GRADIENT_WATCH].replaced
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            if parameter not in kept:
                replaced.mark(parameter, name, _REPLACED)
        return replaced

    def _shard_others(self, mesh: DeviceMesh) -> None:
        """Shard all parameters but the experts': each layer is gathered as one unit."""
        all_experts = {parameter for parameters in self.experts.values() for parameter in parameters}
        shard = functools.partial(fully_shard, mesh=mesh, ignored_params=all_experts, mp_policy=self.policy)
        for layer in _list_layers(self.root):
            shard(layer, reshard_after_forward=self.reshard_after_forward)
        # None: torch's choice for roots
        shard(self.root, reshard_after_forward=None if self.reshard_after_forward else False)

    def _shard_experts(self, mesh: DeviceMesh) -> None:
        """Shard the experts of each block, and divide their gradients."""
        for name, parameters in self.experts.items():
            block: Any = self.root.get_submodule(name)
            vars(block)["forward"].watch.is_parallelized = True
            if name in self.whole:
                divide_gradients(block, parameters, self.divisor)
                continue
            block.register_forward_hook(_copy_views)
            fully_shard(
                block,
                mesh=mesh,
                ignored_params={p for p in block.parameters() if p not in parameters},
                shard_placement_fn=self.placements.get,
                mp_policy=self.policy,
                reshard_after_forward=self.reshard_after_forward,
            )
            if self.divisor > 1:
                block.set_all_reduce_hook(functools.partial(_divide, divisor=self.divisor))


def _find_spread_mesh(model: nn.Module, mesh: DeviceMesh) -> SpreadMesh:
    """Return the mesh over which a model is spread.

    Raises:
        InvalidInput: it is spread over none, or FSDP has sharded it. InvalidPlan: it is spread over another mesh.
    """
    spread = vars(model).get(SPREAD_MESH)
    if spread is None and (inner := [name for name, module in model.named_modules() if SPREAD_MESH in vars(module)]):
        raise InvalidInput(
            f"{type(model).__name__} is around a model that was compiled over a mesh, {inner[0]}: call "
            f"moefx.parallelize(model.{inner[0]}, mesh), which works in place, if all parameters are in it, as with "
            "adapters of PEFT. Else call moefx.compile on the outer model first"
        )
    if spread is None:
        raise InvalidInput(
            f"{type(model).__name__} was not compiled over a mesh: call moefx.compile(model, mesh=mesh) first, then "
            "moefx.parallelize with the model that it returns. Without a mesh for experts, use torch's fully_shard"
        )
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if spread.parallelized:
        raise InvalidInput(f"{type(model).__name__} is parallelized already: call moefx.parallelize once")
    if sharded:
        raise InvalidInput(
            f"fully_shard was called on {sharded[0] or 'the model'} already: call moefx.parallelize instead of it. It "
            "shards experts and all other parameters over the right axes"
        )
    if mesh != spread.mesh:
        raise InvalidPlan(
            f"the model was compiled over the mesh ({format_mesh(spread.mesh)}), and parallelize was given another one"
            f" ({format_mesh(mesh)}): pass the same mesh to both"
        )
    return spread


def _group_expert_parameters(model: nn.Module) -> dict[str, set[nn.Parameter]]:
    """Return the parameters of this rank's experts by block."""
    by_block = {}
    for name, layout in find_expert_layouts(model).items():
        tensors = layout.parameters.tensors(model.get_submodule(name), layout.placement.local_experts)
        by_block[name] = {t for t in tensors if isinstance(t, nn.Parameter)}
    return by_block


def _find_whole_blocks(experts: dict[str, set[nn.Parameter]], policy: MixedPrecisionPolicy) -> Iterator[str]:
    """Find the blocks whose experts need no FSDP if no axis shards or replicates them: DTensors that keep their
    precision. FSDP makes DTensors of separate experts, which an optimizer takes together with the other parameters."""
    if policy.param_dtype is None and policy.output_dtype is None:
        for name, parameters in experts.items():
            if all(isinstance(parameter, DTensor) for parameter in parameters):
                yield name


def _check_parameters(model: nn.Module, experts: dict[str, set[nn.Parameter]]) -> None:
    """Check that each parameter can belong to one FSDP module.

    Raises:
        InvalidInput: the model is a block itself, modules that are sharded separately share a parameter, or a parameter
            has no dimension.
    """
    if "" in experts:
        raise InvalidInput(
            f"{type(model).__name__} is an MoE block itself, and parallelize shards its experts apart from the rest: "
            "compile a model around it, such as nn.Sequential(block)"
        )
    owners: dict[nn.Parameter, tuple[nn.Module | None, str]] = {}
    layers, blocks = set(_list_layers(model)), {model.get_submodule(name) for name in experts}
    of_experts = {parameter for parameters in experts.values() for parameter in parameters}

    pending: list[tuple[nn.Module, str, nn.Module, nn.Module | None]] = [(model, "", model, None)]
    while pending:
        module, path, outer, block = pending.pop()
        outer, block = module if module in layers else outer, module if module in blocks else block
        for last, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, sharded_by = join_name(path, last), block if parameter in of_experts else outer
            if not parameter.dim():
                raise InvalidInput(f"{name} has no dimension, and FSDP shards the first one: make it a tensor [1]")
            other, other_name = owners.setdefault(parameter, (sharded_by, name))
            if other is not sharded_by:
                raise InvalidInput(
                    f"{other_name} and {name} are the same parameter, but parallelize would shard it with "
                    f"{type(other).__name__} and again with {type(sharded_by).__name__}: use it in one of them"
                )
        children = [
            (child, join_name(path, name), outer, block) for name, child in module._modules.items() if child is not None
        ]
        pending += reversed(children)


def _list_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that are gathered as one unit each: those around blocks, or all of a model without blocks."""
    if blocks := list(find_rewritten_blocks(model)):
        return _list_layers_around_blocks(model, blocks)
    layers = model.get_submodule(find_layer_container(model)).children()
    return [layer for layer in layers if next(layer.parameters(), None) is not None]


def _list_layers_around_blocks(model: nn.Module, blocks: list[str]) -> list[nn.Module]:
    """Return the layers around blocks, such as those of a decoder, inner ones first.

    They are the elements of a `ModuleList`, and those of a `ModuleDict` or `Sequential` whose class holds a block. An
    element that is a block itself is left to the module around it.
    """
    layers: set[nn.Module] = set()
    for block in blocks:
        parts = block.split(".")
        for length in range(len(parts)):
            container = model.get_submodule(".".join(parts[:length]))
            elements = [e for e in container.children() if not isinstance(e, CONTAINERS)]
            if isinstance(container, nn.ModuleList):
                layers.update(elements)
            elif isinstance(container, CONTAINERS):
                holder = container.get_submodule(parts[length])
                layers.update(e for e in elements if type(e) is type(holder))
    layers -= {model.get_submodule(block) for block in blocks}
    return [module for module in reversed(list(model.modules())) if module in layers]


def choose_placements(
    model: nn.Module, experts: set[nn.Parameter], num_shards: int
) -> Iterator[tuple[nn.Parameter, Shard]]:
    """Choose the dimension over which each parameter that holds all experts is sharded.

    Raises:
        InvalidPlan: no dimension of a parameter can be cut evenly.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter not in experts:
            continue
        shape = parameter.to_local().shape
        # The first dimension is the last choice: it holds the experts, and is sharded over their axis already.
        dim = next((d for d in (*range(1, len(shape)), 0) if shape[d] % num_shards == 0), None)
        if dim is None:
            raise InvalidPlan(
                f"{name} has the shape {list(shape)} on a rank, and no dimension can be cut into {num_shards} equal "
                "parts: replicate it, with data='hsdp' or 'ddp'"
            )
        yield parameter, Shard(dim)


def _set_reductions(module: Any, mesh: DeviceMesh) -> None:
    """Choose how an FSDP module reduces gradients."""
    if mesh.device_type == "cpu" or dist.get_backend(mesh.get_group(0)) == "gloo":
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
        # Else ranks would reduce buffers of different sizes if a module runs for some tokens only.
        module.set_reduce_scatter_unused_params(True)


def _copy_views(block: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy outputs of a block that are views. A write in place to a view loses the hook by which FSDP gathers the
    experts for the backward."""
    return tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad and t._is_view() else t, output)


def _divide(gradient: Tensor, *, divisor: int) -> None:
    gradient.div_(divisor)
