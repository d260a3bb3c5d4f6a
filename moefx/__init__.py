"""moefx: a compiler for mixture-of-experts training in PyTorch. See README.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._plan import Plan
from ._version import __version__ as __version__
from .errors import MoefxError, NoMoEBlockFound
from .ir.op_providers import load_before_first_choice

if TYPE_CHECKING:
    from . import integrations
    from .api import Explanation, compile, explain, verify
    from .checkpoints.load import load_pretrained
    from .checkpoints.save import save_pretrained
    from .compiled_blocks import Block, blocks, graph, history
    from .distribution.data_parallelism import parallelize
    from .distribution.spread_models import (
        clip_grad_norm_,
        expert_parameter_names,
        full_state_dict,
        save_routing,
    )
    from .frontends.dynamo.backend import rewrite_graph
    from .pipelines.pipeline_model import Pipeline
    from .pipelines.pipeline_parallelism import pipeline
    from .planner.platforms import Platform
    from .ranking import plan
    from .runtime.captured_step import capture_step
    from .runtime.ranks.host_order import order_hosts

__all__ = [
    "Block", "Explanation", "MoefxError", "NoMoEBlockFound", "Pipeline", "Plan", "Platform",
    "blocks", "capture_step", "clip_grad_norm_", "compile", "expert_parameter_names", "explain", "full_state_dict",
    "graph", "history", "integrations", "load_pretrained", "order_hosts", "parallelize", "pipeline", "plan",
    "rewrite_graph", "save_pretrained", "save_routing", "verify",
]  # fmt: skip
# Names that are imported on first use: `import moefx` must stay cheap beside `import torch`, and torch.distributed is
# not in every build.
_NAMES = {
    ".api": ("Explanation", "compile", "explain", "verify"),
    ".checkpoints.load": ("load_pretrained",),
    ".checkpoints.save": ("save_pretrained",),
    ".compiled_blocks": ("Block", "blocks", "graph", "history"),
    ".distribution.data_parallelism": ("parallelize",),
    ".pipelines.pipeline_model": ("Pipeline",),
    ".pipelines.pipeline_parallelism": ("pipeline",),
    ".distribution.spread_models": ("clip_grad_norm_", "expert_parameter_names", "full_state_dict", "save_routing"),
    ".frontends.dynamo.backend": ("rewrite_graph",),
    ".planner.platforms": ("Platform",),
    ".ranking": ("plan",),
    ".runtime.captured_step": ("capture_step",),
    ".runtime.ranks.host_order": ("order_hosts",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module(".integrations", __name__)
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module 'moefx' has no attribute {name!r}")


load_before_first_choice(lambda: importlib.import_module(".lowering.register", __name__))
