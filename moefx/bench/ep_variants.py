"""Names of the variants of `bench ep`, also for scripts that list benchmarks without torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, get_args

from .._plan import Dispatch

if TYPE_CHECKING:
    from torch import nn

    from .ep_layers import Layer
    from .shapes import Shape

DISPATCHES = tuple(name for name in get_args(Dispatch) if name != "auto")
# The function of each peer that builds a layer with this rank's part of the experts of a given one.
PEERS = {
    "all_to_all": "ep_peers.build_all_to_all",
    "transformers": "external_peers.build_transformers",
    "torchtitan": "external_peers.build_torchtitan",
    "torchtitan_async": "external_peers.build_torchtitan_async",
    "deepspeed": "external_peers.build_deepspeed",
    "tutel": "external_peers.build_tutel",
}


def build_peer(name: str, layer: Layer, shape: Shape) -> nn.Module:
    """Build the layer of a peer, [T,d] to [T,d], with this rank's part of the experts of `layer`.

    Raises:
        PeerMissing: its library is not installed.
    """
    module, _, function = PEERS[name].partition(".")
    return getattr(importlib.import_module(f"{__package__}.{module}"), function)(layer, shape)
