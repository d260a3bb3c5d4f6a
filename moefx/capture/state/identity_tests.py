"""Find identity and type tests in the code of a block, which a stand-in for an object cannot detect.

Blocks that get an object, such as a key-value cache, run with a `PassedObject` in its place. `cache is other` would
then compare the stand-in.
"""

from __future__ import annotations

import dis
import itertools
import types
from collections.abc import Collection, Iterator

from torch import nn

from ...errors import Refused
from ...ir.guards.code_closure import unwrap_callable
from ...util.user_code import is_user_file


def refuse_identity_tests(block: nn.Module) -> None:
    """Check that no method of a block, nor a function that these name, tests the identity or type of a variable.

    It must not use `is`, `type`, `id` or `callable`. The forwards of submodules do not count, as captures skip those
    that get a stand-in.

    Raises:
        Refused: a function uses one.
    """
    members = [(k, v) for cls in type(block).__mro__ for k, v in vars(cls).items()]
    todo = [v for k, v in [*members, *vars(block).items()] if not k.startswith("__") or k == "__call__"]
    hosts = {type(v) for m in block.modules() for v in (m, *vars(m).values())} - {*type(block).__mro__}
    seen: set[types.CodeType] = set()
    while todo:
        value = todo.pop()
        value = value.fget if isinstance(value, property) else value
        function = unwrap_callable(value.__func__ if isinstance(value, (classmethod, staticmethod)) else value)
        if not isinstance(function, types.FunctionType) or (code := function.__code__) in seen:
            continue
        if not is_user_file(code.co_filename) and not code.co_filename.startswith("<string>"):
            continue
        codes = [code]
        for one in codes:
            codes += [c for c in one.co_consts if isinstance(c, types.CodeType)]
        seen |= {*codes}
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        outer = {**function.__globals__, **{k: cell.cell_contents for k, cell in cells if cell != types.CellType()}}
        names = {name for one in codes for name in (*one.co_names, *code.co_freevars)}
        referenced = [outer[name] for name in names & outer.keys()]
        spaces = [vars(m) for m in referenced if isinstance(m, types.ModuleType)]
        classes = hosts | {v if isinstance(v, type) else type(v) for v in referenced}
        spaces += [vars(c) for cls in classes for c in cls.__mro__]
        todo += [*referenced, vars(function).get("__wrapped__")]
        todo += [space[name] for space in spaces for name in (names - {"forward"}) & space.keys()]
        constant_names = {k for k, v in outer.items() if isinstance(v, (type, types.FunctionType))}
        for line, question in itertools.chain(*(_find_identity_tests(one, constant_names) for one in codes)):
            raise Refused(
                f"{function.__qualname__} asks {question}, which may be an object that the block is given",
                source=f"{code.co_filename.rsplit('/', 1)[-1]}:{line}",
                remedy="compare tensors and numbers, and such an object with None alone; ask the rest in the submodule "
                "that gets it",
            )


def _find_identity_tests(code: types.CodeType, constant_names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines of tests of variables other than `self`, with a description.

    Args:
        constant_names: names of outer classes and functions; comparisons with these are fine.
    """
    lines = dict(dis.findlinestarts(code))
    line, question, is_fixed = 0, "", False
    for step in dis.get_instructions(code):
        line = lines.get(step.offset) or line
        if step.opname in ("PUSH_NULL", "CACHE", "EXTENDED_ARG", "RESUME", "NOP"):
            continue
        if question and step.opname.startswith("LOAD_") and step.argval != "self":
            yield line, f"for `{question}` of a variable"
        if step.opname == "IS_OP" and not is_fixed:
            yield line, "whether a variable is another one"
        is_outer = "GLOBAL" in step.opname or "DEREF" in step.opname
        is_fixed = step.opname.startswith("LOAD_CONST") or (is_outer and step.argval in constant_names)
        question = str(step.argval) if is_outer and step.argval in ("type", "id", "callable", "is_", "is_not") else ""
