"""Nodes on one machine: network namespaces whose links to each other have a rate. Linux, root, iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BRIDGE = "mfxbr"
_BACKLOG = Path("/proc/sys/net/core/netdev_max_backlog")
# As networks of clusters are: nothing is lost, nobody waits for windows to open, or takes what stands in a queue for
# lost. Else TCP's guesses are measured.
_LOSSLESS = (
    "tcp_slow_start_after_idle=0", "tcp_no_metrics_save=1", "tcp_rmem=16777216,16777216,16777216",
    "tcp_wmem=16777216,16777216,16777216", "tcp_congestion_control=reno", "tcp_early_retrans=0",
)  # fmt: skip


def missing() -> str:
    """What this machine lacks, "" if nothing."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"needs {' and '.join(tools)} (iproute2)"
    return "" if os.geteuid() == 0 else "needs root, for network namespaces"


@contextlib.contextmanager
def nodes(number: int, rate: str, racks: int = 1, rack_rate: str = "") -> Iterator[list[tuple[str, str]]]:
    """Namespaces with one shaped link each, both directions; (name, interface) of each. Gone afterwards.

    Args:
        rate: of each node's link, as `tc` takes it ("200mbit").
        racks: how many bridges the nodes are behind; between them there are links of `rack_rate`.
    """
    made = [(f"mfx{i}", f"mfxe{i}") for i in range(number)]
    _clear(number, racks)
    packets = _BACKLOG.read_text()
    try:
        _BACKLOG.write_text("100000")  # of the machine: a burst of more packets is lost before any queue
        for rack in range(racks):
            _run(f"ip link add {_BRIDGE}{rack} type bridge", f"ip link set {_BRIDGE}{rack} up")
        for rack in range(1, racks):
            up, down = f"mfxu{rack}", f"mfxd{rack}"
            _run(f"ip link add {up} type veth peer name {down}", f"ip link set {up} master {_BRIDGE}0",
                 f"ip link set {down} master {_BRIDGE}{rack}", f"ip link set {up} up", f"ip link set {down} up",
                 *(_shape(device, rack_rate) for device in (up, down)))  # fmt: skip
        for i, (space, inside) in enumerate(made):
            outside = f"mfxv{i}"
            _run(
                f"ip netns add {space}",
                f"ip link add {outside} type veth peer name {inside}",
                f"ip link set {inside} netns {space}",
                f"ip link set {outside} master {_BRIDGE}{i * racks // number}",
                f"ip link set {outside} up",
                f"ip -n {space} link set lo up",
                f"ip -n {space} addr add {address(i)}/24 dev {inside}",
                f"ip -n {space} link set {inside} up",
                f"ip -n {space} route change 10.77.0.0/24 dev {inside} initcwnd 10000 initrwnd 10000 rto_min 10s",
                *(f"ip netns exec {space} sysctl -qw net.ipv4.{setting}" for setting in _LOSSLESS),
                f"ip netns exec {space} {_shape(inside, rate)}",
                _shape(outside, rate),
            )
        yield made
    finally:
        _BACKLOG.write_text(packets)
        _clear(number, racks)


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def sent_bytes(space: str, interface: str) -> int:
    """What a node has sent over its link."""
    path = f"/sys/class/net/{interface}/statistics/tx_bytes"
    return int(subprocess.run(["ip", "netns", "exec", space, "cat", path], capture_output=True, check=True).stdout)


def _shape(device: str, rate: str) -> str:
    return f"tc qdisc add dev {device} root tbf rate {rate} burst 64kb limit 64mb"


def _run(*commands: str) -> None:
    """A comma stands for a space within a word."""
    for command in commands:
        subprocess.run([word.replace(",", " ") for word in command.split()], check=True, capture_output=True)


def _clear(number: int, racks: int) -> None:
    for i in range(number):
        subprocess.run(["ip", "netns", "del", f"mfx{i}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"mfxv{i}"], capture_output=True)
    for rack in range(racks):
        subprocess.run(["ip", "link", "del", f"mfxu{rack}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{_BRIDGE}{rack}"], capture_output=True)
