"""Time every candidate configuration of every kernel on the ten shapes.

    python -m moefx bench tune [--shapes qwen3_30b,olmoe] [--kernels up,outer] [--workers 12] --out tuned.jsonl

Several processes compile the kernels first; Triton caches them on disk.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from ..lowering.triton.autotune import time_candidates
from ..lowering.triton.tile_configs import KERNELS, GemmConfig, get_target, list_candidates
from ..lowering.triton.tuning import format_line
from .mlp_pieces import MlpPieces
from .results import add_shapes, add_workers, append_row, build_parser, compile_in_parallel
from .shapes import Shape

_SETTLE_SECONDS = 0.04


def list_jobs(kernels: list[str]) -> Iterator[tuple[str, GemmConfig]]:
    for kernel in kernels:
        for tiles in list_candidates(kernel, torch.device("cuda"), torch.bfloat16):
            yield kernel, tiles


def compile_share(shapes: list[Shape], kernels: list[str], share: int, num_shares: int) -> None:
    """Compile every `num_shares`-th job by running it on few tokens. Sizes that vary between calls are not compiled
    in."""
    for shape in shapes:
        case = None
        for i, (kernel, tiles) in enumerate(list_jobs(kernels)):
            if i % num_shares == share:
                case = case or MlpPieces(shape.small)
                try:
                    case.list_tuned_kernels()[kernel][1](tiles)
                except Exception as error:
                    print(f"{shape.name} {kernel} {tiles}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser("tune", __doc__)
    add_shapes(parser)
    parser.add_argument("--kernels", default=",".join(KERNELS))
    add_workers(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--table", default=None, help="the best of each, as lines of the tuning table")
    options = parser.parse_args(argv)
    shapes, kernels = options.shapes, options.kernels.split(",")
    begin = time.time()
    if options.share is not None:
        return compile_share(shapes, kernels, options.share, options.workers)
    # Shapes share most compiled kernels, so a process for each shape would repeat work.
    arguments = ["--kernels", options.kernels, "--shapes", ",".join(shape.name for shape in shapes)]
    print(f"compiled in {compile_in_parallel(__spec__.name, arguments, options.workers):.0f} s", flush=True)
    for shape in shapes:
        case = MlpPieces(shape)
        for kernel, (matrices, work) in case.list_tuned_kernels().items():
            if kernel not in kernels:
                continue
            candidates = list_candidates(kernel, torch.device("cuda"), torch.bfloat16)
            seconds_left = options.seconds - (time.time() - begin)
            times, is_complete = time_candidates(
                candidates, work, rounds=options.rounds, repeats=3, seconds=seconds_left, settle_seconds=_SETTLE_SECONDS
            )
            if not is_complete:
                return print("out of time")
            results = [(statistics.median(ms), tiles) for tiles, ms in times.items()]
            for ms, tiles in results if options.out else ():
                row = dict(shape=shape.name, kernel=kernel, ms=ms, tflops=matrices * shape.flops / ms / 1e9)
                append_row({**row, "config": dataclasses.asdict(tiles)}, options.out)
            results.sort(key=lambda r: r[0])
            if options.table and results:
                best = format_line(
                    get_target(torch.device("cuda")), "bfloat16", kernel, case.get_sizes(kernel), results[0][1]
                )
                with open(options.table, "a") as file:
                    print(best, file=file)
            for ms, tiles in results[:3]:
                tflops = matrices * shape.flops / ms / 1e9
                print(f"{shape.name:10} {kernel:13} {ms:8.3f} ms {tflops:6.0f} TFLOP/s  {tiles.text}", flush=True)
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
