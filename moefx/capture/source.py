"""Where in the user's program something happens."""

from __future__ import annotations

import dataclasses
import sys
import threading

import torch


@dataclasses.dataclass(frozen=True)
class Source:
    """A place in the user's program."""

    file: str
    line: int
    offset: int  # bytecode offset: tells two reads on one line apart

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def text(self) -> str:
        import linecache

        return linecache.getline(self.file, self.line).strip()


_OURS = (__file__.rsplit("/capture/", 1)[0] + "/", torch.__file__.rsplit("/", 1)[0] + "/")


# generated code: not of torch's files, but not the user's either (a notebook cell, also in brackets, is)
_NOBODYS = ("<frozen", "<string>", "<eval_with_key", "<__", threading.__file__)


def is_ours(file: str) -> bool:
    """Whether a file of code is of torch or of this package."""
    return file.startswith(_OURS)


def is_users(file: str) -> bool:
    """Whether a file of code is the user's: neither torch's, nor this package's, nor generated."""
    return not file.startswith((*_OURS, *_NOBODYS))


def user_source() -> Source:
    """The innermost frame that belongs neither to torch nor to this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return Source(name, frame.f_lineno, frame.f_lasti)
        frame = frame.f_back
    return Source("?", 0, 0)
