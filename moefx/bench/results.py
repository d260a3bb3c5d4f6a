"""Shared parts of the benchmarks: parsers of options, and JSON lines with the environment of the measurement."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._environment import environment
from .shapes import SHAPES, Shape, parse_shape


def build_parser(
    name: str, description: str | None, out: str = "append JSON lines to this file"
) -> argparse.ArgumentParser:
    """Build the parser of `python -m moefx bench NAME`.

    Args:
        out: help text of `--out`.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog=f"python -m moefx bench {name}", description=description, formatter_class=formatter
    )
    parser.add_argument("--out", default=None, help=out)
    return parser


def add_shapes(parser: argparse.ArgumentParser) -> None:
    text = "by name, name@T or TxdxhxExK; with /silu behind it without a gate"
    parser.add_argument("--shapes", type=_parse_shapes, default=SHAPES, metavar="LIST", help=text)


def add_routings(parser: argparse.ArgumentParser) -> None:
    text = "uniform, zipf, hot: one expert is everybody's first choice"
    parser.add_argument("--routing", type=lambda text: text.split(","), default=["uniform"], metavar="LIST", help=text)


def _parse_shapes(text: str) -> list[Shape]:
    try:
        return [parse_shape(name) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=12, metavar="N", help="processes that compile kernels first")
    parser.add_argument("--share", type=int, default=None, help=argparse.SUPPRESS)


def compile_in_parallel(module: str, arguments: Sequence[str], workers: int) -> float:
    """Compile a benchmark's kernels in `workers` processes, each with its `--share`. Triton caches them on disk.

    Returns:
        Seconds.
    """
    begin = time.time()
    command = [sys.executable, "-m", module, *arguments, "--workers", str(workers)]
    running = [subprocess.Popen([*command, "--share", str(i)]) for i in range(workers)]
    for worker in running:
        worker.wait()
    return time.time() - begin


def append_row(row: Mapping[str, Any], path: str) -> None:
    """Append a JSON line. The first line of a file is the environment of the measurement."""
    file = Path(path)
    if not file.exists():
        file.write_text(json.dumps({"environment": {"date": f"{datetime.date.today()}", **environment()}}) + "\n")
    with file.open("a") as lines:
        print(json.dumps(row), file=lines)
