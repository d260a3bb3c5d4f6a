"""Real text that every machine has: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Long, prose-rich modules of every Python since 3.10, so that the text hardly depends on the machine.
MODULES = (
    "argparse", "ast", "calendar", "collections/__init__", "configparser", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "doctest", "enum", "fractions", "functools", "heapq", "inspect",
    "ipaddress", "logging/__init__", "mailbox", "optparse", "pathlib", "pdb", "pickle", "pydoc", "random",
    "shutil", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "tokenize", "traceback", "turtle", "typing", "uuid", "zipfile",
)  # fmt: skip


def standard_library_text(num_bytes: int = 1_000_000) -> bytes:
    """Read at most `num_bytes` of the standard library's source, module after module; missing files are skipped.

    Raises:
        FileNotFoundError: Python was installed without its source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = b""
    for module in MODULES:
        file = root / f"{module}.py"
        if file.is_file() and len(text) < num_bytes:
            text += file.read_bytes()
    if not text:
        raise FileNotFoundError(f"no standard library source under {root}: the demo trains on it")
    return text[:num_bytes]


def batches(text: bytes, *, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless pairs of int64 (ids[batch, context], labels[batch, context]); a label is the next byte.

    The same seed gives the same batches.
    """
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - context - 1, (batch,), generator=generator)
        window = data[starts[:, None] + torch.arange(context + 1)]
        yield window[:, :-1], window[:, 1:]
