"""Find the user's lines: distinguish the user's files from those of torch, Python and this package."""

from __future__ import annotations

import functools
import sysconfig

import torch
import typing_extensions
from torch import nn

TORCH_DIR = torch.__file__.rsplit("/", 1)[0] + "/"
PYTHON_DIR = sysconfig.get_path("stdlib") + "/"
PACKAGE_DIR = __file__.rsplit("/util/", 1)[0] + "/"
_LIBRARY_DIRS = (PACKAGE_DIR, TORCH_DIR)
# Prefixes of generated code and of wrappers of deprecated functions. Notebook cells, although in brackets, are the
# user's.
GENERATED = (
    "<frozen", "<string>", "<eval_with_key", "<__", typing_extensions.__file__,
)  # fmt: skip


def is_library_file(file: str) -> bool:
    """Return whether a source file belongs to torch or to this package."""
    return file.startswith(_LIBRARY_DIRS)


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether a source file is the user's: not of torch, this package or Python, and not generated."""
    is_stdlib = file.startswith(PYTHON_DIR) and "/site-packages/" not in file and "/dist-packages/" not in file
    return not is_stdlib and not file.startswith((*_LIBRARY_DIRS, *GENERATED))


def forward_line(module: nn.Module) -> str:
    """Return the `file.py:line` at which the forward of a module begins."""
    code = getattr(type(module).forward, "__code__", None)
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}" if code else ""


def user_line(error: BaseException) -> str:
    """Return the user's innermost line in a traceback, or ""."""
    trace, line = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_file(file):
            line = f"{file.rsplit('/', 1)[-1]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
