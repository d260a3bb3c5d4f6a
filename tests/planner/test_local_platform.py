"""Platform of the current process."""

from __future__ import annotations

import os
import types

import pytest
import torch

from moefx.errors import UnknownPlatform
from moefx.planner.local_platform import find_local_platform, recognize_device
from moefx.planner.platforms import PLATFORMS, find_platform

RAM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def unnamed(monkeypatch):
    monkeypatch.delenv("MOEFX_PLATFORM", raising=False)


def fake_gpu(monkeypatch, name: str, memory: float) -> None:
    properties = types.SimpleNamespace(name=name, total_memory=memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


@pytest.mark.parametrize(
    ("device", "platform"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "frontier"),
        # other chips, boards and slices
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD Instinct MI250", None),
        ("NVIDIA A10", None),
        ("NVIDIA B200", None),
    ],
)
def test_devices_are_recognised_by_their_names(device, platform):
    assert recognize_device(device) == platform


def test_a_gpu_has_its_own_memory_and_nodes(monkeypatch):
    fake_gpu(monkeypatch, "NVIDIA H200", 100e9)
    here = find_local_platform("cuda", 4)
    assert here.is_known and here.why == "recognised by 'NVIDIA H200'"
    assert here.platform.memory_bytes == 100e9 and here.platform.peak == find_platform("h200").peak
    assert [n.ranks for n in here.platform.networks] == [4, 0]


@pytest.mark.parametrize("node", [1, 8, 16, 32, 64])
def test_nodes_of_any_size(monkeypatch, node):
    """Omit units that are not larger than a node."""
    fake_gpu(monkeypatch, "AMD Instinct MI250X", 64e9)
    networks = find_local_platform("cuda", node).platform.networks
    assert [n.ranks for n in networks] == [node, *(r for r in (32, 256) if r > node), 0]


def test_unknown_devices_have_their_memory_and_a_note(monkeypatch):
    fake_gpu(monkeypatch, "NVIDIA B300", 288e9)
    here = find_local_platform("cuda", 8)
    assert not here.is_known and here.platform.memory_bytes == 288e9
    assert here.why.startswith("no figures for 'NVIDIA B300': those of dgx-h100 compare layouts")
    assert here.platform.peak == find_platform("dgx-h100").peak and here.platform.name not in PLATFORMS


def test_ranks_of_a_node_share_its_memory():
    assert find_local_platform("cpu").platform.memory_bytes == RAM
    assert find_local_platform("cpu", 4).platform.memory_bytes == RAM / 4


def test_other_types_of_devices():
    with pytest.raises(UnknownPlatform, match="no figures for a device of type 'xpu': name its platform by MOEFX_PLAT"):
        find_local_platform("xpu")


def test_the_environment_names_a_platform_or_a_file(monkeypatch, tmp_path):
    for device_type in ("cpu", "xpu"):
        monkeypatch.setenv("MOEFX_PLATFORM", "frontier")
        here = find_local_platform(device_type, 2)
        assert here.platform == find_platform("frontier") and here.is_known and here.why == "named by MOEFX_PLATFORM"
    file = tmp_path / "mine.json"
    file.write_text(find_platform("h200").to_json())
    monkeypatch.setenv("MOEFX_PLATFORM", str(file))
    assert find_local_platform("cpu").platform == find_platform("h200")


@pytest.mark.parametrize(
    ("name", "message"),
    [("h300", "MOEFX_PLATFORM=h300: no platform 'h300'; did you mean h200"), ("no.json", "no platform file no.json")],
)
def test_a_wrong_name_in_the_environment_is_refused(monkeypatch, name, message):
    monkeypatch.setenv("MOEFX_PLATFORM", name)
    with pytest.raises(UnknownPlatform, match=message):
        find_local_platform("cpu")
