"""Platforms, that is GPUs and the links between them: shipped ones by name, or a file of `Platform.to_json`.

Figures of shipped platforms come from vendors and papers, each with its source. They are peaks that programs do not
reach. Without a measurement an efficiency is 1 and a latency 0, so times are mostly too short.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

from ..errors import UnknownPlatform, nearest

# Coefficients that are fitted to measured times. No single one can be measured by itself.
FITTED = (
    "matmul_efficiency", "dense_rows", "dense_launch", "expert_gemm", "expert_rows", "expert_weights", "expert_launch"
)  # fmt: skip
FREE = 1e30  # rate of a part that takes no time
_ABOVE_ZERO = ("memory_bytes", "peak", "memory_bandwidth", "matmul_efficiency", "attention_efficiency")
_AT_MOST_ONE = ("matmul_efficiency", "attention_efficiency")


@dataclasses.dataclass(frozen=True)
class Network:
    """One level of the topology: the links of a rank to the ranks of its unit that no finer level connects.

    Attributes:
        name: name of the level: "node", "switch group", ...
        ranks: ranks in a unit of this level, 0 for no limit.
        bandwidth: bytes a second that leave a rank if all ranks send at once.
        latency: seconds of an exchange beside its bytes, 0 if unknown.
        p2p: bytes a second that each rank sends to one other rank if all do so at once; 0: as `bandwidth`.
        source: origin of the figures.
        spread: times of repeated exchanges over their median, as means of equal parts in ascending order. With
            (0.9, 1.0, 4.0) a third of the exchanges takes four times as long. () if unknown.
    """

    name: str
    ranks: int
    bandwidth: float
    latency: float = 0.0
    p2p: float = 0.0
    source: str = ""
    spread: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """The figures of a machine that the planner needs.

    Attributes:
        device: name of a rank's device.
        memory_bytes: bytes of its memory.
        peak: FLOP a second, bfloat16, dense.
        memory_bandwidth: bytes a second, read and written together.
        networks: levels of the topology, fine to coarse; the first is the node.
        matmul_efficiency, attention_efficiency: share of the peak that large GEMMs and attention reach.
        dense_rows: bytes a second of the operands of GEMMs; 0: as `memory_bandwidth`.
        dense_launch: seconds of a GEMM's launch.
        expert_gemm, expert_rows, expert_weights, expert_launch: coefficients of the experts' time
            (`planner.compute`): FLOP a second, bytes a second of rows and of weights, seconds of a forward's launches.
            0: as for other GEMMs and memory. The two rates of bytes may exceed the memory's: most bytes move while the
            GEMMs run and add no time.
        handling: seconds a byte to pack rows for an exchange and to unpack them.
        overhead: bytes of the memory that the framework and its libraries take.
        fast_domain: ranks that expert parallelism should stay within (Piper eq. 10), 0 for no limit.
        sources: origin of each figure.
    """

    name: str
    device: str
    memory_bytes: float
    peak: float
    memory_bandwidth: float
    networks: tuple[Network, ...]
    matmul_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    dense_rows: float = 0.0
    dense_launch: float = 0.0
    expert_gemm: float = 0.0
    expert_rows: float = 0.0
    expert_weights: float = 0.0
    expert_launch: float = 0.0
    handling: float = 0.0
    overhead: float = 0.0
    fast_domain: int = 0
    sources: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fields(self, f"platform {self.name}", _ABOVE_ZERO)
        if not self.networks:
            raise UnknownPlatform(f"platform {self.name}: no networks; the first one is the node")
        for network in self.networks:
            _check_fields(network, f"platform {self.name}: network {network.name!r}", ("bandwidth",))
        unit_sizes = [network.ranks or math.inf for network in self.networks]
        if any(large <= small for small, large in itertools.pairwise(unit_sizes)):
            raise UnknownPlatform(
                f"platform {self.name}: units of {[n.ranks for n in self.networks]} ranks do not grow"
            )
        for network in self.networks:
            spread = network.spread
            if not all(0 < low <= high for low, high in itertools.pairwise((*spread[:1], *spread))):
                raise UnknownPlatform(f"platform {self.name}: network {network.name!r} has a spread of {spread}")

    @property
    def is_measured(self) -> bool:
        """Whether the figures include measured efficiencies, not only a vendor's peaks."""
        return self.matmul_efficiency < 1 and self.expert_gemm > 0

    @property
    def node_size(self) -> int:
        return self.networks[0].ranks or 1

    def dense_rates(self) -> dict[str, float]:
        """Return the symbols' values for GEMMs and attention in `compute`."""
        return {
            "peak": self.peak, "e_gemm": self.matmul_efficiency, "e_attn": self.attention_efficiency,
            "v_dense": self.dense_rows or self.memory_bandwidth, "t_dense": self.dense_launch,
        }  # fmt: skip

    def expert_rates(self) -> dict[str, float]:
        """Return the symbols' values for experts in `compute`."""
        return {
            "v_gemm": self.expert_gemm or self.peak * self.matmul_efficiency,
            "v_rows": self.expert_rows or self.memory_bandwidth,
            "v_weights": self.expert_weights or self.memory_bandwidth,
            "t_launch": self.expert_launch,
        }

    def find_network(self, group: int, stride: int = 1) -> Network:
        """Return the coarsest network between `group` ranks that are `stride` apart."""
        span = (group - 1) * stride + 1
        return next((n for n in self.networks if not n.ranks or span <= n.ranks), self.networks[-1])

    def list_levels(self, group: int, stride: int = 1) -> tuple[tuple[int, ...], tuple[Network, ...]]:
        """Return the levels of a group of ranks `stride` apart, as (sizes, networks), coarse to fine.

        A size is the number of units of the level within a unit of the level above. Levels with one unit are left out,
        and levels with equal links are merged, because a hop between them gains nothing.
        """
        if group == 1:
            return (1,), (self.networks[0],)
        sizes: list[int] = []
        networks: list[Network] = []
        num_parts = group  # of the level below: ranks at first
        for network in self.networks:
            is_last = network is self.networks[-1] or not network.ranks
            units = 1 if is_last else count_nodes(group, stride, network.ranks)[0]
            if num_parts % units or (units > 1 and group % max(network.ranks // stride, 1)):
                continue  # uneven parts: counted with the level above
            size, num_parts = num_parts // units, units
            if networks and size > 1 and _has_equal_links(networks[-1], network):
                sizes[-1], networks[-1] = sizes[-1] * size, network
            elif size > 1:
                sizes.append(size)
                networks.append(network)
            if num_parts == 1:
                break
        return tuple(reversed(sizes)), tuple(reversed(networks))

    def estimate_ring(self, group: int, stride: int = 1) -> float:
        """Estimate the seconds per byte that a rank sends in a ring of `group` ranks, `stride` apart (an all-reduce).

        As in NCCL and RCCL, there are as many rings as a node has ranks of the group. Each ring has a part of the bytes
        and leaves the node by another rank's NIC.
        """
        nodes, ranks_per_node = count_nodes(group, stride, self.node_size)
        if nodes == 1 or ranks_per_node == 0:
            return 1 / self.networks[0].bandwidth
        between_nodes = 1 / self.find_network(group, stride).bandwidth / ranks_per_node
        within_node = (ranks_per_node - 1) / ranks_per_node / self.networks[0].bandwidth
        return max(between_nodes, within_node)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "a platform") -> Platform:
        """Read the text of `to_json`.

        Args:
            where: name of the file in messages.

        Raises:
            UnknownPlatform: the text is not a JSON object, or has other fields.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            networks = tuple(
                Network(**{**network, "spread": tuple(network.get("spread", ()))}) for network in fields.pop("networks")
            )
            return cls(networks=networks, **fields)
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError, RecursionError) as error:
            field_names = ", ".join(field.name for field in dataclasses.fields(cls))
            problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise UnknownPlatform(f"{where} is no platform file: {problem}. Its fields are {field_names}") from error


def _check_fields(value: Any, owner: str, above_zero: tuple[str, ...]) -> None:
    """Check the types and ranges of a dataclass' numbers and texts.

    Args:
        owner: the name of `value` in messages.
        above_zero: fields that must not be 0.

    Raises:
        UnknownPlatform: a field is invalid; the message names the first one.
    """
    for field in dataclasses.fields(value):
        number = getattr(value, field.name)
        if field.type == "str" and not isinstance(number, str):
            raise UnknownPlatform(f"{owner}: {field.name} is {number!r}, expected a text")
        if field.type not in ("int", "float"):
            continue
        kinds = int if field.type == "int" else (int, float)
        if isinstance(number, bool) or not isinstance(number, kinds) or not math.isfinite(number):
            expected = "a whole number" if field.type == "int" else "a number"
            raise UnknownPlatform(f"{owner}: {field.name} is {number!r}, expected {expected}")
        is_too_small = number < 0 or (number == 0 and field.name in above_zero)
        if is_too_small or (number > 1 and field.name in _AT_MOST_ONE):
            lower_bound = "above 0" if field.name in above_zero else "0 or more"
            most = ", at most 1" if field.name in _AT_MOST_ONE else ""
            raise UnknownPlatform(f"{owner}: {field.name} is {number!r}, expected {lower_bound}{most}")


def _has_equal_links(first: Network, second: Network) -> bool:
    return (first.bandwidth, first.latency) == (second.bandwidth, second.latency)


def count_nodes(group: int, stride: int, node_size: int) -> tuple[int, int]:
    """Count (nodes, ranks of each node) of a group of ranks `stride` apart, numbered node by node.

    EP first: experts have stride 1, their replicas stride EP. DP first: the other way round (X-MoE appendix C.1).
    """
    nodes = min(group, math.ceil(group * stride / node_size)) if group > 1 else 1
    return nodes, group // nodes


_FRONTIER = "docs.olcf.ornl.gov/systems/frontier_user_guide.html"
_H100 = "NVIDIA H100 data sheet (SXM5)"
_H200 = "NVIDIA H200 data sheet"
_MI300X = "AMD MI300X data sheet"
_A100 = "NVIDIA A100 data sheet (SXM4)"
_DGX = "NVIDIA DGX H100 data sheet: a ConnectX-7 of 400 Gbit/s for each GPU"
_RESULTS = "benchmarks/results/platform_h200.jsonl"
_MEASURED = f"measured: {_RESULTS}"
_GIB = 2**30  # memory stacks have powers of two, although data sheets print GB
_SHIPPED = [
    Platform(
        name="frontier", device="AMD MI250X, one GCD", memory_bytes=64 * _GIB, peak=191.5e12, memory_bandwidth=1.6e12,
        networks=(
            Network("node", 8, 50e9, source=f"{_FRONTIER}: between MI250X 50 to 100 GB/s, within 200"),
            Network("switch group", 32, 12.5e9, source=f"{_FRONTIER}: four NICs of 25 GB/s for 8 GCDs; Piper III.C"),
            Network("rack", 256, 12.5e9, source="X-MoE appendix D: up to 256 GPUs; the user guide has 128 nodes"),
            Network("machine", 0, 12.5e9, source="as within a rack; X-MoE appendix D: often slower"),
        ),
        fast_domain=32,
        sources={
            "memory_bytes": _FRONTIER, "peak": "X-MoE appendix A",
            "memory_bandwidth": "AMD MI250X data sheet: 3.2 TB/s",
            "fast_domain": "Piper section III.C: four nodes share a switch",
        },
    ),
    Platform(
        name="dgx-h100", device="NVIDIA H100 80GB SXM5", memory_bytes=80 * _GIB, peak=989e12, memory_bandwidth=3.35e12,
        networks=(
            Network("node", 8, 450e9, source=f"{_H100}: NVLink, 900 GB/s both ways"),
            Network("cluster", 0, 50e9, source=_DGX),
        ),
        sources=dict.fromkeys(("memory_bytes", "peak", "memory_bandwidth"), _H100),
    ),
    Platform(
        name="h200", device="NVIDIA H200 141GB SXM5", memory_bytes=150.1e9, peak=989e12, memory_bandwidth=4.224e12,
        networks=(
            Network(
                "node", 8, 328.5e9, 48.4e-6, 356e9, f"{_MEASURED}, NCCL between two GPUs",
                (0.9717, 0.976, 0.9793, 0.983, 0.9856, 0.988, 0.9908, 0.9939, 0.9964, 0.999,
                 1.0011, 1.004, 1.0067, 1.0087, 1.0106, 1.0128, 1.0177, 1.0227, 1.0299, 1.1531),
            ),
            Network("cluster", 0, 50e9, source=_DGX),
        ),
        matmul_efficiency=0.7577, attention_efficiency=0.3896, dense_rows=3.022e12, dense_launch=7.797e-6,
        expert_gemm=686.2e12, expert_rows=9.781e12, expert_weights=17.19e12, expert_launch=34.46e-6,
        handling=0.1524e-12, overhead=1.123e9,
        sources={
            "peak": _H200,
            **dict.fromkeys(
                ("memory_bytes", "memory_bandwidth", "attention_efficiency", "handling", "overhead"), _MEASURED
            ),
            **dict.fromkeys(FITTED, f"fitted to measured times: {_RESULTS}"),
        },
    ),
    Platform(
        name="mi300x", device="AMD MI300X", memory_bytes=192 * _GIB, peak=1307.4e12, memory_bandwidth=5.3e12,
        networks=(
            Network("node", 8, 448e9, source="AMD MI300X platform data sheet: seven links of 64 GB/s one way"),
            Network("cluster", 0, 50e9, source="a NIC of 400 Gbit/s for each GPU, as in DGX H100"),
        ),
        sources=dict.fromkeys(("memory_bytes", "peak", "memory_bandwidth"), _MI300X),
    ),
    Platform(
        name="a100-40gb", device="NVIDIA A100 40GB SXM4", memory_bytes=40 * _GIB, peak=312e12,
        memory_bandwidth=1.555e12,
        networks=(
            Network("node", 8, 300e9, source=f"{_A100}: NVLink, 600 GB/s both ways"),
            Network("cluster", 0, 25e9, source="NVIDIA DGX A100 data sheet: a NIC of 200 Gbit/s for each GPU"),
        ),
        sources=dict.fromkeys(("memory_bytes", "peak", "memory_bandwidth"), _A100),
    ),
]  # fmt: skip
PLATFORMS = {platform.name: platform for platform in _SHIPPED}


def find_platform(name: str) -> Platform:
    """Find a shipped platform by name, or read one from a file.

    Raises:
        UnknownPlatform: there is neither. The message has similar names.
    """
    if (shipped := PLATFORMS.get(name.lower())) is not None:
        return shipped
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        try:
            return Platform.from_json(path.read_text(encoding="utf-8"), name)
        except OSError as error:
            raise UnknownPlatform(f"no platform file {name}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UnknownPlatform(f"{name} is no platform file: it is not UTF-8") from error
    raise UnknownPlatform(
        f"no platform {name!r}{nearest(name.lower(), PLATFORMS) or '.'} There are {', '.join(PLATFORMS)}, and JSON "
        "files with the fields of moefx.Platform"
    )
