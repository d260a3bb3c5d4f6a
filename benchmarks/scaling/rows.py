"""The rows of `benchmarks/scale.py`: each is one benchmark over some GPUs, in processes of its own."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

from moefx.bench.ep_variants import DISPATCHES, PEERS

PARTS = {
    1: "one layer, weak scaling",
    2: "shards of a sequence (SSMB)",
    3: "whole models",
    4: "layers of other libraries",
    5: "a skewed layer",
    6: "stragglers",
    7: "failures",
}
_TOKENS = 8192  # of a rank
_SHAPES = ("qwen3_30b", "dsv3_e64", "olmoe", "gptoss20b")
_DRY_SHAPE, _DRY_TOKENS = "64x32x16x16x4", 64
_KILLED_IN = (*DISPATCHES, "gather+graph", "pull+graph")


@dataclasses.dataclass(frozen=True)
class ScalingRow:
    """One benchmark over some GPUs.

    Attributes:
        part: number of the group, see `PARTS`.
        module: what runs it. It takes `--out FILE`, and appends a JSON line for each result.
        starts_ranks: whether the module starts its ranks itself; otherwise torchrun does.
    """

    name: str
    part: int
    gpus: int
    module: str
    arguments: tuple[str, ...]
    starts_ranks: bool = False

    def is_selected(self, patterns: Sequence[str]) -> bool:
        """Return whether a pattern is the number of this row's part, or fits its name."""
        return not patterns or any(
            pattern == str(self.part) or fnmatch.fnmatch(self.name, pattern) for pattern in patterns
        )


def list_variants(gpus: int, tokens: int) -> list[str]:
    """List the variants of `bench ep` that a layer over some GPUs is timed with.

    The host reads row counts in "flat", "dedup", "rbd" and "halo": no graph can hold them.
    """
    variants = ["one", "one+graph"]
    if gpus == 1:
        return variants
    limit = f",max_tokens={tokens}"
    variants += [
        "flat",
        "dedup",
        "gather",
        f"gather{limit}",
        f"pull{limit}",
        f"gather{limit}+graph",
        f"pull{limit}+graph",
    ]
    nodes = [size for size in (2, 4) if size < gpus]
    variants += [f"{variant},node_size={size}" for variant in ("rbd", "halo") for size in nodes]
    return [*variants, "auto", f"auto{limit}"]


def list_systems(gpus: int, is_dry: bool = False) -> list[str]:
    """List the systems of `bench train` for some GPUs. A CPU captures no graphs."""
    captured = () if is_dry else ("fsdp:grouped_mm+graph", "ep:gather+graph", "ep:pull+graph")
    systems = ["fsdp:grouped_mm", "fsdp"]
    if gpus > 1:
        systems += ["ep", "ep:gather", "pp:1f1b", *captured]
    if gpus == 4:
        systems += ["dp2xep2", "pp2xep2:1f1b", "pp2xep2:interleaved", "pp2xep2:zbv"]
    if gpus == 8:
        systems += ["dp2xep4", "pp2xep4:1f1b", "pp4xep2:1f1b", "pp2xdp2xep2:1f1b"]
        systems += ["pp2xep4:interleaved", "pp2xep4:zbv"]
    return systems


def build_rows(is_dry: bool) -> list[ScalingRow]:
    """Build all rows, larger numbers of GPUs first within a part.

    Args:
        is_dry: tiny sizes on a CPU, to test the script.
    """
    rows = list(_build_rows(is_dry))
    assert len({row.name for row in rows}) == len(rows)
    return sorted(rows, key=lambda row: (row.part, -row.gpus))


def _build_rows(is_dry: bool) -> Iterator[ScalingRow]:
    tokens, shapes = (_DRY_TOKENS, (_DRY_SHAPE,)) if is_dry else (_TOKENS, _SHAPES)
    device = ("--device", "cpu") if is_dry else ()
    few = ("--rounds", "1") if is_dry else ()

    def layer(name: str, part: int, gpus: int, shape: str, variants: Sequence[str], *options: str) -> ScalingRow:
        sizes = ("--shapes", shape, "--tokens", str(tokens), "--node-size", str(gpus))
        arguments = (*sizes, "--variants", " ".join(variants), *options, *few, *device)
        return ScalingRow(f"{name}/{shape}/{gpus}", part, gpus, "moefx.bench.ep", arguments)

    for gpus in (1, 2, 4, 8):
        for shape in shapes:
            yield layer("layer", 1, gpus, shape, list_variants(gpus, tokens), "--bytes")
    for gpus in (2, 4, 8):
        for shape in shapes[:2]:
            for tp in (1, 2, 4):
                if tp <= gpus:
                    arguments = ("--shape", shape, "--tokens", str(tokens), "--tensor-parallel", str(tp), *few, *device)
                    yield ScalingRow(f"ssmb/{shape}/tp={tp}/{gpus}", 2, gpus, "benchmarks.ssmb", arguments)
    sizes = ("--layers", "12", "--sequences", "16", "--length", "4096", "--most", "2")
    for gpus in (1, 2, 4, 8):
        for system in list_systems(gpus, is_dry):
            if is_dry:
                layers = str(gpus if system == "pp:1f1b" else 4)
                sizes = ("--layers", layers, "--sequences", "8", "--length", "8", "--most", "1", "--steps", "2")
            arguments = ("--systems", system, *sizes, *device)
            yield ScalingRow(f"model/{system}/{gpus}", 3, gpus, "moefx.bench.train", arguments)
    for gpus in (2, 4, 8):
        for shape in shapes[:2]:
            variants = ["one", "dedup", f"gather,max_tokens={tokens}", *PEERS]
            yield layer("peers", 4, gpus, shape, variants)
            yield layer("skew", 5, gpus, shape, list_variants(gpus, tokens), "--bytes", "--routing", "zipf")
        repeats = ("--repeats", "20", "--seconds", "0.2") if is_dry else ("--repeats", "1000", "--seconds", "40")
        yield ScalingRow(f"stragglers/exchanges/{gpus}", 6, gpus, "benchmarks.scaling.stragglers", (*repeats, *device))
        yield layer("stragglers/late_rank", 6, gpus, shapes[0], list_variants(gpus, tokens), "--slow-rank", "2")
        for variant in _KILLED_IN:
            if variant in ("rbd", "halo") and gpus == 2:
                continue  # needs two nodes
            seconds = "3" if is_dry else "20"
            arguments = ("--variant", variant, "--ranks", str(gpus), "--seconds", seconds, *device)
            yield ScalingRow(
                f"failures/{variant}/{gpus}", 7, gpus, "benchmarks.scaling.failures", arguments, starts_ranks=True
            )
