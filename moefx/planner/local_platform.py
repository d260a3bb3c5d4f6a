"""The platform that a program runs on: named by MOEFX_PLATFORM, or recognised by its device's name."""

from __future__ import annotations

import dataclasses
import os
import re

import torch

from ..errors import UnknownPlatform
from .platforms import PLATFORMS, Platform, find_platform

PLATFORM_VARIABLE = "MOEFX_PLATFORM"
_NEUTRAL = "dgx-h100"  # its figures compare layouts if the device is unknown
# Words in a device's name. Names that match `_OTHERS` are slower boards with the same chip, or slices of one.
_RECOGNISED = {"H200": "h200", "H100": "dgx-h100", "A100": "a100-40gb", "MI300X": "mi300x", "MI250X": "frontier"}
_OTHERS = re.compile(r"PCI|NVL|\bMIG\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class LocalPlatform:
    """A platform and the reason for it.

    Attributes:
        is_known: whether the figures are those of this kind of device. Otherwise they can compare layouts only, and
            seconds mean nothing.
    """

    platform: Platform
    why: str
    is_known: bool = True

    @property
    def figures(self) -> str:
        """Name of the platform whose figures are used."""
        return self.platform.name if self.is_known else _NEUTRAL


def find_local_platform(device_type: str, node: int | None = None) -> LocalPlatform:
    """Return the platform of this process.

    MOEFX_PLATFORM names a shipped platform or a file of `python -m moefx bench platform`. Without it, a GPU is
    recognised by its name, with its own memory and `node` ranks in a node. An unknown device has its own memory and
    the figures of DGX H100.

    Args:
        device_type: "cuda" (ROCm too) or "cpu".
        node: ranks of a node; by default LOCAL_WORLD_SIZE, or 1. On the CPU they share its memory.

    Raises:
        UnknownPlatform: MOEFX_PLATFORM names no platform, or the device has another type.
    """
    if name := os.environ.get(PLATFORM_VARIABLE):
        try:
            return LocalPlatform(find_platform(name), f"named by {PLATFORM_VARIABLE}")
        except UnknownPlatform as error:
            raise UnknownPlatform(f"{PLATFORM_VARIABLE}={name}: {error}") from None
    node = node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device, memory_bytes = _read_device(device_type, node)
    known_name = recognize_device(device)
    base = PLATFORMS[known_name or _NEUTRAL]
    nodes, *outer_networks = base.networks
    networks = (dataclasses.replace(nodes, ranks=node), *(n for n in outer_networks if not n.ranks or n.ranks > node))
    local_fields = dict(
        device=device, memory_bytes=memory_bytes, networks=networks, sources=base.sources | {"memory_bytes": "measured"}
    )
    if known_name:
        return LocalPlatform(dataclasses.replace(base, **local_fields), f"recognised by {device!r}")
    reason = (
        f"no figures for {device!r}: those of {_NEUTRAL} compare layouts. {PLATFORM_VARIABLE}=FILE takes what "
        "`python -m moefx bench platform --out FILE` measures"
    )
    return LocalPlatform(dataclasses.replace(base, name="unknown", **local_fields), reason, is_known=False)


def recognize_device(device: str) -> str | None:
    """Return the name of the shipped platform with this device, by torch's device name; None if unknown."""
    if _OTHERS.search(device):
        return None
    return next((name for word, name in _RECOGNISED.items() if re.search(rf"\b{word}\b", device)), None)


def _read_device(device_type: str, node: int) -> tuple[str, float]:
    """Return (device name, bytes of memory for a rank)."""
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return properties.name, float(properties.total_memory)
    if device_type == "cpu" and hasattr(os, "sysconf"):  # not on Windows
        return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / node
    raise UnknownPlatform(f"no figures for a device of type {device_type!r}: name its platform by {PLATFORM_VARIABLE}")
