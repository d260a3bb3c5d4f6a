"""Read parts of tensors from safetensors files, and write such files one tensor after the other.

Reading uses the library's `safe_open`, which maps files. Its `save_file` takes all tensors of a file at once. Writing
follows the format itself: eight bytes with the header's length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidCheckpoint, MoefxError
from ..util.save_folder import find_checkpoint
from ..util.tensor_bytes import view_bytes
from .tensor_regions import Region

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ENTRY_FILES = (INDEX_FILE, SINGLE_FILE)  # a checkpoint has one of them
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class TensorEntry(NamedTuple):
    """Name, shape and dtype of a tensor in a file."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CheckpointFiles:
    """The tensors of a folder in the Hugging Face layout. Use it as a context: it keeps files open.

    Attributes:
        keys: the names of all tensors.

    Raises:
        InvalidCheckpoint: the folder has no safetensors files, or its index names files that are missing.
        MoefxError: the package safetensors is not installed.
    """

    def __init__(self, folder: str | Path):
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MoefxError(
                "load_pretrained reads files by the package safetensors: pip install safetensors"
            ) from error
        self.folder = find_checkpoint(Path(folder), ENTRY_FILES)
        self._open_file: Any = safe_open
        self._stack, self._files = contextlib.ExitStack(), dict[str, Any]()
        index = self.folder / INDEX_FILE
        if (self.folder / SINGLE_FILE).is_file():  # as transformers, whose saves may leave an older index behind
            self._file_of_key: dict[str, str] = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)
        elif index.is_file():
            self._file_of_key = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            missing = [name for name in sorted(set(self._file_of_key.values())) if not (self.folder / name).is_file()]
            if missing:
                raise InvalidCheckpoint(f"{index} names files that {self.folder} does not have: {list_some(missing)}")
        else:
            seen = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
            raise InvalidCheckpoint(
                f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it has {list_some(seen) or 'no files'}. "
                "Pass the local folder of a checkpoint in safetensors files (huggingface_hub.snapshot_download returns "
                "one); transformers' from_pretrained and save_pretrained convert older files"
            )
        self.keys = list(self._file_of_key)

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._files.clear()

    def describe(self, key: str) -> TensorEntry:
        """Return shape and dtype of a tensor, from the header of its file."""
        part = self._get_slice(key)
        name = part.get_dtype()
        if not hasattr(torch, _DTYPES.get(name, "")):
            raise InvalidCheckpoint(f"{key} of {self.folder} has the dtype {name}, which torch has not")
        return TensorEntry(key, tuple(part.get_shape()), getattr(torch, _DTYPES[name]))

    def read(self, key: str, region: Region, out: Tensor) -> None:
        """Copy a region of a tensor into `out`, which has the region's shape. Only the region's bytes are read."""
        if not region:
            out.copy_(self._open(self._file_of_key[key]).get_tensor(key))
        else:
            out.copy_(self._get_slice(key)[tuple(slice(*bounds) for bounds in region)])

    def _get_slice(self, key: str) -> Any:
        name = self._file_of_key[key]
        try:
            return self._open(name).get_slice(key)
        except Exception as error:  # the library has an error of its own
            raise InvalidCheckpoint(f"{self.folder / name} does not have the tensor {key}: {error}") from error

    def _open(self, name: str) -> Any:
        if name not in self._files:
            try:
                file = self._open_file(str(self.folder / name), framework="pt")
                self._files[name] = self._stack.enter_context(file)
            except Exception as error:
                raise InvalidCheckpoint(f"{self.folder / name} is no safetensors file: {error}") from error
        return self._files[name]


class ShardFile:
    """A safetensors file that is written one tensor after the other. Use it as a context.

    Args:
        entries: the tensors, in the order in which `append` gets them. An order of falling item sizes aligns them.
    """

    def __init__(self, path: Path, entries: Iterable[TensorEntry]):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            end = offset + entry.nbytes
            header[entry.key] = {
                "dtype": find_dtype_name(entry), "shape": list(entry.shape), "data_offsets": [offset, end]
            }  # fmt: skip
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: Tensor) -> None:
        self._file.write(view_bytes(tensor))

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


def find_dtype_name(entry: TensorEntry) -> str:
    """Return the name of a tensor's dtype in files.

    Raises:
        InvalidCheckpoint: files cannot hold the dtype.
    """
    for name, value in _DTYPES.items():
        if getattr(torch, value, None) == entry.dtype:
            return name
    raise InvalidCheckpoint(f"{entry.key} has the dtype {entry.dtype}, which safetensors files cannot hold")


def split_into_shards(entries: Sequence[TensorEntry], max_bytes: int) -> dict[str, list[TensorEntry]]:
    """Share out tensors over files in order. A tensor above the limit has a file of its own.

    Returns:
        The tensors of each file, by the file's name; each file's tensors are in an order that aligns them.
    """
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    return {
        name: sorted(shard, key=lambda e: -e.dtype.itemsize) for name, shard in zip(names, shards, strict=True)
    }  # fmt: skip


def is_weights_file(name: str) -> bool:
    """Return whether a file of this name belongs to the tensors of a checkpoint."""
    return name in ENTRY_FILES or _SHARD.fullmatch(name) is not None


def write_index(folder: Path, shards: dict[str, list[TensorEntry]]) -> None:
    """Write the index of several files."""
    index = {
        "metadata": {"total_size": sum(entry.nbytes for shard in shards.values() for entry in shard)},
        "weight_map": {entry.key: name for name, shard in shards.items() for entry in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parse_size(size: int | str) -> int:
    """Return a number of bytes from a number, or from text such as "5GB" (10**9 bytes) or "5GiB" (2**30 bytes).

    Raises:
        InvalidCheckpoint: the text is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", str(size).strip().upper())
    number = int(size) if isinstance(size, int) else int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number <= 0:
        raise InvalidCheckpoint(f"max_shard_size={size!r}: expected a number of bytes, or text such as '5GB'")
    return number


def list_some(names: Sequence[str], count: int = 8) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
