"""moefx: a compiler for mixture-of-experts training in PyTorch. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._plan import Plan
from .errors import MoefxError, NoMoEBlockFound

if TYPE_CHECKING:
    from .api import Block, Explanation, blocks, compile, explain, graph, history, verify
    from .distribute import clip_grad_norm_, expert_parameter_names, full_state_dict, save_routing

__version__ = "0.1.0"
__all__ = [
    "Block", "Explanation", "MoefxError", "NoMoEBlockFound", "Plan",
    "blocks", "clip_grad_norm_", "compile", "expert_parameter_names", "explain", "full_state_dict", "graph", "history",
    "save_routing", "verify",
]  # fmt: skip
_OF_SPREAD_MODELS = ("clip_grad_norm_", "expert_parameter_names", "full_state_dict", "save_routing")


def __getattr__(name: str) -> Any:
    # The rest loads on first use: `import moefx` must stay cheap beside `import torch`.
    if name in _OF_SPREAD_MODELS:
        from . import distribute  # torch.distributed takes a while, and is not in every build

        return getattr(distribute, name)
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module 'moefx' has no attribute {name!r}")
