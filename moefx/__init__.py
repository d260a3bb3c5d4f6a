"""moefx: a compiler for mixture-of-experts training in PyTorch. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._plan import Plan
from ._version import __version__ as __version__
from .errors import MoefxError, NoMoEBlockFound
from .ir.op_providers import load_before_first_choice

if TYPE_CHECKING:
    from .api import Explanation, compile, explain, verify
    from .compiled_blocks import Block, blocks, graph, history
    from .distribution.block_distribution import (
        clip_grad_norm_,
        expert_parameter_names,
        full_state_dict,
        save_routing,
    )
    from .distribution.data_parallelism import parallelize
    from .distribution.pipelines.pipeline_model import Pipeline
    from .distribution.pipelines.pipeline_parallelism import pipeline
    from .frontends.dynamo.backend import rewrite_graph
    from .planner.platforms import Platform
    from .planner.ranking import plan
    from .runtime.captured_step import capture_step
    from .runtime.ranks.host_order import order_hosts

__all__ = [
    "Block", "Explanation", "MoefxError", "NoMoEBlockFound", "Pipeline", "Plan", "Platform",
    "blocks", "capture_step", "clip_grad_norm_", "compile", "expert_parameter_names", "explain", "full_state_dict",
    "graph", "history", "order_hosts", "parallelize", "pipeline", "plan", "rewrite_graph", "save_routing", "verify",
]  # fmt: skip
# torch.distributed takes a while to load, and is not in every build.
_OF_SPREAD_MODELS = ("clip_grad_norm_", "expert_parameter_names", "full_state_dict", "save_routing")
_PLANNER = {"Platform": ".planner.platforms", "plan": ".planner.ranking"}
_MODULES = _PLANNER | dict.fromkeys(_OF_SPREAD_MODELS, ".distribution.block_distribution")
_MODULES |= dict.fromkeys(("Block", "blocks", "graph", "history"), ".compiled_blocks")
_MODULES |= {"order_hosts": ".runtime.host_order", "rewrite_graph": ".frontends.dynamo.backend"}
_MODULES |= {"parallelize": ".distribution.data_parallelism", "pipeline": ".distribution.pipeline_parallelism"}
_MODULES |= {"Pipeline": ".distribution.pipeline_model", "capture_step": ".runtime.captured_step"}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    # The rest loads on first use: `import moefx` must stay cheap beside `import torch`.
    if name in __all__:
        return getattr(importlib.import_module(_MODULES.get(name, ".api"), __name__), name)
    raise AttributeError(f"module 'moefx' has no attribute {name!r}")


load_before_first_choice(lambda: importlib.import_module(".lowering.register", __name__))
