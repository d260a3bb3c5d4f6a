"""Where in the user's program something happens."""

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

from ..util.user_code import GENERATED, PACKAGE_DIR, PYTHON_DIR, TORCH_DIR, is_user_file


@dataclasses.dataclass(frozen=True)
class Source:
    """A place in the user's program."""

    file: str
    line: int
    offset: int  # where the expression begins and ends on its line: tells two reads on one line apart
    where: tuple[int, int, int, int] | None = dataclasses.field(default=None, compare=False)  # lines, columns

    def __hash__(self) -> int:  # asked for each node of a capture, again and again
        return self.offset

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"

    @property
    def text(self) -> str:
        import linecache

        return linecache.getline(self.file, self.line).strip()


_FOLDER = __file__.removesuffix("code_locations.py")
_CAPTURE = _FOLDER + "concolic.py"
_NUMBERS = (__file__, *(_FOLDER + name for name in ("routed_numbers.py", "symbolic_sizes.py", "host_reads.py")))
_WRAPPERS = ("_tensor.py", "overrides.py", "functional.py", "_ops.py", "_compile.py", "_dynamo/", "utils/")
_TENSORS = tuple(TORCH_DIR + name for name in _WRAPPERS)
_STAND_INS = __file__.replace("capture/code_locations.py", "ir/passed_objects.py")


def is_user_access(frame: types.FrameType | None) -> bool:
    """Whether the program that is captured asks for an attribute, itself or by a function of Python's own, as by
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


_sources: dict[tuple[int, int], tuple[types.CodeType, Source]] = {}  # with the code, so that no other gets its id


def _source_of(frame: types.FrameType) -> Source:
    """The expression that a frame runs. The interpreter replaces instructions of warm code by others, beside them: the
    instruction alone may be another one at the next call."""
    code, instruction = frame.f_code, frame.f_lasti
    key = (id(code), instruction)
    if key not in _sources:
        if len(_sources) > 1 << 14:
            _sources.clear()
        positions = getattr(code, "co_positions", None)  # since Python 3.11, as the replacing is
        where = next(itertools.islice(positions(), instruction // 2, None)) if positions else (None,)
        span: Any = None if None in where else where
        offset = instruction if span is None else hash(span)
        _sources[key] = code, Source(code.co_filename, frame.f_lineno, offset, span)
    return _sources[key][1]


_local = threading.local()


@contextlib.contextmanager
def override_user_stack(sources: tuple[Source, ...]) -> Iterator[None]:
    """What runs in this context is of these places, the innermost first: an op of a graph, its own frames gone."""
    before, _local.said = getattr(_local, "said", ()), sources
    try:
        yield
    finally:
        _local.said = before


def find_user_source() -> Source:
    """The innermost frame that belongs neither to torch nor to this package."""
    if given := getattr(_local, "said", ()):
        return given[0]
    frame = _user_frame(sys._getframe(1))
    return NOWHERE if frame is None else _source_of(frame)


def find_user_stack() -> tuple[Source, ...]:
    """All of these, the innermost first: a function of the user's may be called at several places."""
    if given := getattr(_local, "said", ()):
        return given
    found, frame = [], _user_frame(sys._getframe(1))
    while frame is not None:
        found.append(_source_of(frame))
        frame = _user_frame(frame.f_back)
    return tuple(found)


def iterate_user_frames() -> Iterator[tuple[Source, types.FrameType]]:
    """Yield the places of `user_calls` with their frames; none for an op of a graph."""
    frame = None if getattr(_local, "said", ()) else _user_frame(sys._getframe(1))
    while frame is not None:
        yield _source_of(frame), frame
        frame = _user_frame(frame.f_back)


def is_user_asking_number() -> bool:
    """Whether the user's code asks a number something, rather than a part of this package."""
    return _is_users(_NUMBERS)


def is_user_asking_tensor() -> bool:
    """Whether the user's code asks a tensor something, rather than Python code of torch, as checks of arguments do."""
    return _is_users((PACKAGE_DIR, *_TENSORS))


def _is_users(passed_over: tuple[str, ...]) -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(passed_over):
        frame = frame.f_back
    return frame is not None and frame is _user_frame(frame)


def find_user_opcode() -> str:
    """The instruction of the user's code that runs at this moment."""
    frame = None if getattr(_local, "said", ()) else _user_frame(sys._getframe(1))
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame is not None else ""


def _user_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """The first frame of the user's, from this one outwards to the capture. Asked at each op of a program."""
    while frame is not None:
        name = frame.f_code.co_filename
        if (is_user := _is_user_file.get(name)) is None:
            if len(_is_user_file) > 1 << 12:
                _is_user_file.clear()
            is_user = _is_user_file[name] = is_user_file(name)
        if is_user:
            return frame
        if name == _CAPTURE:
            return None  # who asked for the capture is no part of the program
        frame = frame.f_back
    return None


_is_user_file: dict[str, bool] = {}
NOWHERE = Source("?", 0, 0)


def is_raised_by_program(error: BaseException) -> bool:
    """Whether the program itself raised an error, by a `raise` or an `assert` of the user's code or of Python code of
    torch that this called, such as the argument checks of `torch.distributions`. An op that fails does not count."""
    trace, is_raised = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if is_user_file(file):
            is_raised = True
        elif not file.startswith(TORCH_DIR):
            is_raised = False  # an op or a module that capture follows
        elif trace.tb_next is None and trace.tb_frame.f_code.co_name != torch._assert.__name__:
            is_raised = is_raised and _is_at_raise(trace)
        trace = trace.tb_next
    return is_raised


def _is_at_raise(trace: types.TracebackType) -> bool:
    return _opcode(trace) == "RAISE_VARARGS"


def _opcode(trace: types.TracebackType) -> str:
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]


def is_internal_error(error: BaseException) -> bool:
    """Whether an error is a mistake in this package's own code: it was neither raised on purpose, nor by code or an op
    that this package called for the program."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(PACKAGE_DIR):
        return False
    return isinstance(error, _MISTAKES) or not _opcode(trace).startswith(("CALL", "PRECALL", "RAISE_VARARGS"))


_MISTAKES = (AssertionError, AttributeError, KeyError, NameError)  # torch raises others, from code without frames
