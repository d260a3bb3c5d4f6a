"""Time each kernel of an expert MLP's step by itself, beside the limits of the GPU.

    python -m moefx bench stages [--shapes qwen3_30b,olmoe@512] [--routing uniform,zipf,hot] [--out stages.jsonl]
    python -m moefx bench stages --forward      # gating, dispatch, experts, combine, as X-MoE's figure 11 has them

Reports TFLOP/s of the GEMMs, and GB/s of the bytes that must be read and written at least once. Leaves out autograd,
and the gradient of the routing weights, which is small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..lowering.triton.timing import measure_milliseconds, settle_clock
from .mlp_pieces import MlpPieces
from .results import add_routings, add_shapes, append_row, build_parser


def measure_stages(case: MlpPieces) -> list[dict[str, object]]:
    """Measure each stage of a step; a row for each."""
    rows, stages = [], case.list_stages()
    settle_clock(lambda: [work() for _, _, work in stages.values()])
    for name, (flops, num_bytes, work) in stages.items():
        ms = measure_milliseconds(work)
        rows.append(dict(stage=name, ms=ms, tflops=flops / ms / 1e9, gbs=num_bytes / ms / 1e6))
    return rows


def measure_forward(case: MlpPieces) -> list[dict[str, object]]:
    """Measure each part of a forward on each system; a row for each."""
    works = [(name, system, work) for name, parts in case.list_parts().items() for system, work in parts.items()]
    settle_clock(lambda: [work() for _, _, work in works])
    return [dict(stage=name, system=system, ms=measure_milliseconds(work)) for name, system, work in works]


def measure_ceilings() -> list[dict[str, object]]:
    """Measure a large matrix product of torch, and a copy."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    product = measure_milliseconds(lambda: a @ b)
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    copy = measure_milliseconds(source.clone)
    return [
        dict(stage="8192 x 8192 x 8192", ms=product, tflops=2 * 8192**3 / product / 1e9, gbs=0.0),
        dict(stage="copy of 1 GiB", ms=copy, tflops=0.0, gbs=2 * source.numel() / copy / 1e6),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("stages", __doc__)
    add_shapes(parser)
    add_routings(parser)
    parser.add_argument("--forward", action="store_true", help="the parts of a forward, beside torch's grouped_mm")
    options = parser.parse_args(argv)
    tables = [] if options.forward else [("this GPU", "", measure_ceilings())]
    for shape in options.shapes:
        for kind in options.routing:
            case = MlpPieces(shape, kind=kind)
            tables.append((shape.name, kind, measure_forward(case) if options.forward else measure_stages(case)))
            del case
            torch.cuda.empty_cache()
    for shape, kind, rows in tables:
        print(f"{shape} {kind}")
        for row in rows:
            details = row["system"] if options.forward else f"{row['tflops']:7.0f} TFLOP/s {row['gbs']:7.0f} GB/s"
            print(f"  {row['stage']:20} {row['ms']:9.3f} ms  {details}", flush=True)
            if options.out:
                append_row(dict(shape=shape, routing=kind) | row, options.out)


if __name__ == "__main__":
    main()
