"""Results of `bench platform`: as JSON lines, and as a `Platform`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..planner.platforms import FITTED, Network, Platform
from . import link_times
from .device_times import AttentionTime
from .link_times import RepeatedExchange
from .rate_fit import (
    ExpertTime,
    GemmTime,
    compute_expert_errors,
    compute_gemm_errors,
    fit_dense_rates,
    fit_expert_rates,
)
from .shapes import parse_shape

_LEVELS = ("node", "nodes", "units of nodes", "units above")  # names without a base platform


@dataclasses.dataclass(frozen=True)
class DeviceResults:
    """Measurements of a single device.

    Attributes:
        copy: bytes a second of a copy, read and written together.
        memory_bytes: bytes of its memory.
        overhead: bytes of the memory that are in use but belong to no tensor.
    """

    name: str
    copy: float
    memory_bytes: float
    overhead: float
    gemms: list[GemmTime] = dataclasses.field(default_factory=list)
    attention: list[AttentionTime] = dataclasses.field(default_factory=list)
    experts: list[ExpertTime] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class PlatformResults:
    """The measurements of one run.

    Attributes:
        how: device, dtype, versions and number of ranks, for readers.
        device: None if only exchanges were measured.
        handling: seconds a byte to pack and unpack rows, 0 if not measured.
        exchanges: exchanges by level, fine to coarse.
    """

    how: str
    device: DeviceResults | None = None
    handling: float = 0.0
    exchanges: list[RepeatedExchange] = dataclasses.field(default_factory=list)

    def rows(self) -> list[Mapping[str, Any]]:
        """List the rows of a JSON-lines file. Exchanges include the seconds of every repetition."""
        rows: list[Mapping[str, Any]] = [{"run": {"how": self.how, "handling": self.handling}}]
        if (device := self.device) is not None:
            numbers = {"copy": device.copy, "memory_bytes": device.memory_bytes, "overhead": device.overhead}
            rows += [{"device": {"name": device.name, **numbers}}]
            rows += [{"gemm": gemm._asdict()} for gemm in device.gemms]
            rows += [{"attention": entry._asdict()} for entry in device.attention]
            rows += [{"experts": entry._asdict() | {"shape": entry.shape.name}} for entry in device.experts]
        return [*rows, *({"exchange": dataclasses.asdict(entry)} for entry in self.exchanges)]

    @classmethod
    def read(cls, path: str | Path) -> PlatformResults:
        """Read a file with the rows of one run.

        Raises:
            InvalidInput: the file does not exist, or has other contents.
        """
        try:
            lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            items: list[tuple[str, Any]] = [
                (kind, _rename_old_keys(values)) for kind, values in (next(iter(row.items())) for row in lines)
            ]
            entries = {key: [values for name, values in items if name == key] for key, _ in items}
            (run,) = entries["run"]
            device = None
            if "device" in entries:
                gemms = [GemmTime(**x) for x in entries.get("gemm", [])]
                attention = [AttentionTime(**x) for x in entries.get("attention", [])]
                experts = [ExpertTime(parse_shape(x.pop("shape")), **x) for x in entries.get("experts", [])]
                device = DeviceResults(**entries["device"][0], gemms=gemms, attention=attention, experts=experts)
            return cls(**run, device=device, exchanges=[RepeatedExchange(**x) for x in entries.get("exchange", [])])
        except OSError as error:
            raise InvalidInput(f"no file {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            raise InvalidInput(f"{path} is not what one run of `bench platform --raw` wrote: {error!r}") from error

    def platform(self, name: str, base: Platform | None = None) -> Platform:
        """Make a platform, with a source for each figure.

        Args:
            base: provides the figures that were not measured: the data sheet's peak, networks of more devices, and
                without a `device` all of its figures.

        Raises:
            InvalidInput: there is neither a device nor a base, measurements are missing, or the base has fewer levels
                than were measured.
        """
        if self.device is None and base is None:
            raise InvalidInput("exchanges alone make no platform: a base must say whose device it is")
        if missing := self._list_missing():
            raise InvalidInput(_describe_missing(", ".join(missing)))
        numbers: dict[str, Any] = {"handling": self.handling} if self.handling else {}
        if self.device is not None:
            try:
                numbers |= fit_figures(self.device, base.peak if base else None)
            except ValueError as error:
                raise InvalidInput(_describe_missing(f"times of experts: {error}")) from error
        sources = dict.fromkeys(numbers, f"measured: {self.how}")
        if self.device is not None:
            sources |= dict.fromkeys(FITTED, f"fitted to measured times: {self.how}")
            numbers["device"] = self.device.name
            sources["peak"] = base.sources.get("peak", base.name) if base else f"{sources['peak']}; the fastest GEMM"
        networks = join_networks(self.networks(), base, self.device.copy if self.device else 0.0)
        if base is None:
            return Platform(name=name, networks=networks, sources=sources, **numbers)
        return dataclasses.replace(base, name=name, networks=networks, sources=base.sources | sources, **numbers)

    def _list_missing(self) -> list[str]:
        """Return the kinds of measurements without any value, of the device and of each level of exchanges."""
        device, missing = self.device, list[str]()
        if device is not None:
            kinds = {"GEMMs": device.gemms, "attention": device.attention, "experts": device.experts}
            missing += [f"times of {kind}" for kind, times in kinds.items() if not times]
        found = {(exchange.unit, exchange.kind) for exchange in self.exchanges}
        units = dict.fromkeys(unit for unit, _ in found)
        kinds = ("all_to_all", "p2p")
        return missing + [f"{kind} of {unit} ranks" for unit in units for kind in kinds if (unit, kind) not in found]

    def networks(self) -> list[Network]:
        """Return the measured networks, fine to coarse."""
        fitted = []
        levels = itertools.groupby(self.exchanges, lambda exchange: (exchange.unit, exchange.is_node))
        for i, ((unit, is_node), group) in enumerate(levels):
            at_level = list(group)
            exchanges, sends = ([r for r in at_level if r.kind == kind] for kind in ("all_to_all", "p2p"))
            latency, bandwidth = link_times.fit_medians(exchanges)
            _, p2p = link_times.fit_medians(sends)
            name = _LEVELS[min(i if is_node else max(i, 1), len(_LEVELS) - 1)]
            spread = link_times.measure_spread(exchanges)
            fitted.append(Network(name, unit, bandwidth, latency, p2p, f"measured: {self.how}", spread))
        return fitted


def _describe_missing(missing: str) -> str:
    return f"the measurements lack {missing}. The run ended early: run `python -m moefx bench platform` again"


def _rename_old_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row, also of an older file, which called `memory_bytes` "capacity" and `kind` "what"."""
    return {{"capacity": "memory_bytes", "what": "kind"}.get(key, key): value for key, value in values.items()}


def fit_figures(device: DeviceResults, peak: float | None) -> dict[str, float]:
    """Return the figures of a `Platform` for a device. Without a peak the fastest GEMM's rate counts as one."""
    peak = peak or max(gemm.flop / gemm.seconds for gemm in device.gemms)
    shares = [3 * a.flop / a.seconds / peak for a in device.attention]
    return {
        "memory_bytes": device.memory_bytes, "peak": peak, "memory_bandwidth": device.copy, "overhead": device.overhead,
        "attention_efficiency": min(sum(shares) / len(shares), 1.0),
        **fit_dense_rates(device.gemms, peak), **fit_expert_rates(device.experts),
    }  # fmt: skip


def join_networks(measured: Sequence[Network], base: Platform | None, copy: float) -> tuple[Network, ...]:
    """Join measured networks, fine to coarse, with those of a base.

    Measured networks replace the finest ones of the base and keep its numbers of ranks. Without a base the coarsest
    network has no limit.

    Args:
        copy: bytes a second of a copy, used for a single rank without a base.

    Raises:
        InvalidInput: the base has fewer levels.
    """
    if base is None and not measured:
        return (Network("node", 1, copy / 2, source="not measured, there was one rank: half of a copy's bandwidth"),)
    if base is None:
        *finer, last = measured
        return (*finer, dataclasses.replace(last, ranks=0)) if finer else (last,)
    if len(measured) > len(base.networks):
        raise InvalidInput(
            f"platform {base.name} has {len(base.networks)} levels, and {len(measured)} were measured: leave it out"
        )
    networks = [
        dataclasses.replace(new, name=old.name, ranks=old.ranks)
        for new, old in zip(measured, base.networks[: len(measured)], strict=True)
    ]
    return (*networks, *base.networks[len(networks) :])


def format_report(results: PlatformResults, platform: Platform) -> str:
    """Format the measurements, and the errors of the fitted rates."""
    return "\n".join(
        [*(_format_device(results.device, platform) if results.device else []), *map(str, results.exchanges)]
    )


def _format_device(device: DeviceResults, platform: Platform) -> list[str]:
    lines = [f"{device.name}: {device.memory_bytes / 2**30:.1f} GiB, {device.overhead / 2**30:.2f} of them in use"]
    lines.append(f"copy        {device.copy / 1e9:9.1f} GB/s, read and written together")
    for group, choose in (("fastest", max), ("slowest", min)):
        gemm = choose(device.gemms, key=lambda g: g.flop / g.seconds)
        shape = f"{group} of {len(device.gemms)}: [{gemm.rows}, {gemm.inner}] x [{gemm.inner}, {gemm.columns}]"
        lines.append(f"GEMM        {gemm.flop / gemm.seconds / 1e12:9.3f} TFLOP/s, {shape}")
    for a in device.attention:
        shape = f"{a.sequences} x {a.tokens} tokens, {a.heads} heads of {a.head_size}, forward and backward"
        lines.append(f"attention   {3 * a.flop / a.seconds / 1e12:9.3f} TFLOP/s, {shape}")
    for shape, seconds, is_step in device.experts:
        speed = (3 if is_step else 1) * shape.matrices * shape.flops / seconds / 1e12
        lines.append(f"experts     {speed:9.3f} TFLOP/s, {shape.name}, {'and backward' if is_step else 'forward'}")
    errors_by_group = {
        "GEMMs": compute_gemm_errors(device.gemms, platform),
        "experts": list(compute_expert_errors(device.experts, platform).values()),
    }
    for group, errors in errors_by_group.items():
        lines.append(f"rates of {group} say these times again to {min(errors):+.1%} .. {max(errors):+.1%}")
    return lines
