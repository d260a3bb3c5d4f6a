"""Locate the user's code that runs: the source line of an op, a read or a comparison, and its call stack.

Frames of torch and of this package are left out. Proofs compare captures and force outcomes by these locations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import itertools
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch

from ...errors import MoefxError
from ...util.user_code import GENERATED, PACKAGE_DIR, PYTHON_DIR, TORCH_DIR, is_user_file


@dataclasses.dataclass(frozen=True)
class Source:
    """A location in the user's program.

    Attributes:
        offset: a hash of the expression's position, which tells two reads on one line apart.
        where: first and last line, first and last column of the expression; None before Python 3.11.
    """

    file: str
    line: int
    offset: int
    where: tuple[int, int, int, int] | None = dataclasses.field(default=None, compare=False)

    def __hash__(self) -> int:  # called often for each node of a capture
        return self.offset

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def text(self) -> str:
        import linecache

        return linecache.getline(self.file, self.line).strip()


_FOLDER = __file__.removesuffix("environment/code_locations.py")
_CAPTURE = _FOLDER + "concolic.py"
_NUMBER_FILES = ("sizes/routed_numbers.py", "sizes/symbolic_sizes.py", "tracing/host_reads.py")
_NUMBERS = (__file__, *(_FOLDER + name for name in _NUMBER_FILES))
_WRAPPERS = ("_tensor.py", "overrides.py", "functional.py", "_ops.py", "_compile.py", "_dynamo/", "utils/")
_TENSORS = tuple(TORCH_DIR + name for name in _WRAPPERS)
_STAND_INS = __file__.replace("capture/environment/code_locations.py", "ir/passed_objects.py")


def is_user_access(frame: types.FrameType | None) -> bool:
    """Return whether the captured program reads an attribute, directly or through Python's library, such as
    `copy.copy`."""
    while frame is not None and (file := frame.f_code.co_filename).startswith((*GENERATED, PYTHON_DIR, _STAND_INS)):
        if "-packages/" in file:
            break
        frame = frame.f_back
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return False
    while frame is not None and frame.f_code.co_filename != _CAPTURE:
        frame = frame.f_back
    return frame is not None


_sources: dict[tuple[int, int], tuple[types.CodeType, Source]] = {}  # with the code objects, so that ids stay unique


def _locate_frame(frame: types.FrameType) -> Source:
    """Return the location of the expression that a frame runs.

    Its position identifies it, not its instruction: the interpreter specializes instructions of warm code.
    """
    code, instruction = frame.f_code, frame.f_lasti
    key = (id(code), instruction)
    if key not in _sources:
        if len(_sources) > 1 << 14:
            _sources.clear()
        positions = getattr(code, "co_positions", None)  # since Python 3.11, which also introduced specialization
        position = next(itertools.islice(positions(), instruction // 2, None)) if positions else (None,)
        span: Any = None if None in position else position
        offset = instruction if span is None else hash(span)
        _sources[key] = code, Source(code.co_filename, frame.f_lineno, offset, span)
    return _sources[key][1]


class _Override(threading.local):
    stack: tuple[Source, ...] = ()  # for all threads: to miss an attribute of `threading.local` takes long


_local = _Override()


@contextlib.contextmanager
def override_user_stack(sources: tuple[Source, ...]) -> Iterator[None]:
    """Report this call stack in the context, for an op of a graph whose frames are gone. The innermost is first."""
    before, _local.stack = _local.stack, sources
    try:
        yield
    finally:
        _local.stack = before


def find_user_source() -> Source:
    """Return the innermost location that belongs neither to torch nor to this package."""
    if stack := _local.stack:
        return stack[0]
    frame = _user_frame(sys._getframe(1))
    return NOWHERE if frame is None else _locate_frame(frame)


def find_user_stack() -> tuple[Source, ...]:
    """Return the call stack of the user's code, the innermost location first."""
    if stack := _local.stack:
        return stack
    sources, frame = [], _user_frame(sys._getframe(1))
    while frame is not None:
        sources.append(_locate_frame(frame))
        frame = _user_frame(frame.f_back)
    return tuple(sources)


def iterate_user_frames() -> Iterator[tuple[Source, types.FrameType]]:
    """Yield the locations of `find_user_stack` with their frames; none for an op of a graph."""
    frame = None if _local.stack else _user_frame(sys._getframe(1))
    while frame is not None:
        yield _locate_frame(frame), frame
        frame = _user_frame(frame.f_back)


def is_user_asking_number() -> bool:
    """Return whether the user's code, not this package, called the running method of a symbolic or routed number."""
    return _is_called_by_user(_NUMBERS)


def is_user_asking_tensor() -> bool:
    """Return whether the user's code, not Python code of torch such as argument checks, reads a tensor."""
    return _is_called_by_user((PACKAGE_DIR, *_TENSORS))


def _is_called_by_user(skipped_files: tuple[str, ...]) -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(skipped_files):
        frame = frame.f_back
    return frame is not None and frame is _user_frame(frame)


def find_user_opcode() -> str:
    """Return the name of the instruction that the user's code runs."""
    frame = None if _local.stack else _user_frame(sys._getframe(1))
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame is not None else ""


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the first user frame from this one outwards to the capture. Runs at each op of a program."""
    while frame is not None:
        name = frame.f_code.co_filename
        if (is_user := _is_user_file.get(name)) is None:
            if len(_is_user_file) > 1 << 12:
                _is_user_file.clear()
            is_user = _is_user_file[name] = is_user_file(name)
        if is_user:
            return frame
        if name == _CAPTURE:
            return None  # the caller of the capture is no part of the program
        frame = frame.f_back
    return None


_is_user_file: dict[str, bool] = {}
NOWHERE = Source("?", 0, 0)


def is_raised_by_program(error: BaseException) -> bool:
    """Return whether the program itself raised an error, by a `raise` or an `assert`.

    Argument checks in torch's Python code, such as those of `torch.distributions`, count. A failing op does not.
    """
    trace, is_raised = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_file(file):
            is_raised = True
        elif not file.startswith(TORCH_DIR):
            is_raised = False  # an op or a module that captures run
        elif trace.tb_next is None and trace.tb_frame.f_code.co_name != torch._assert.__name__:
            is_raised = is_raised and _find_opcode(trace) == "RAISE_VARARGS"
        trace = trace.tb_next
    return is_raised


def _find_opcode(trace: types.TracebackType) -> str:
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]


def is_internal_error(error: BaseException) -> bool:
    """Return whether an error is a bug of this package: not raised on purpose, nor by the program's code or ops."""
    if isinstance(error, MoefxError):
        return False
    trace = caller = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace, caller = trace.tb_next, trace
    if trace is not None and isinstance(error, AttributeError) and _find_opcode(trace) == "RAISE_VARARGS":
        trace = caller  # a stand-in lacks an attribute
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(PACKAGE_DIR):
        return False
    return isinstance(error, _BUG_TYPES) or not _find_opcode(trace).startswith(("CALL", "PRECALL", "RAISE_VARARGS"))


# other types may come from C++ code of torch, without frames
_BUG_TYPES = (AssertionError, AttributeError, KeyError, NameError)


def is_program_error(error: BaseException) -> bool:
    """Return whether an error comes from the user's program: it is neither a refusal nor a bug of this package."""
    return not isinstance(error, MoefxError) and not is_internal_error(error)


@contextlib.contextmanager
def suppress_program_errors(*others: type[MoefxError]) -> Iterator[None]:
    """Suppress errors of the user's program, and `others`. Bugs of this package pass (see `is_internal_error`)."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, others) and not is_program_error(error):
            raise
