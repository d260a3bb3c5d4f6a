"""`ProgramRequests`: request programs for new kinds of calls of a block, and remember the refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import AbsorbedModuleChanged, MoefxError
from ..ir.argument_binding import Leaves, Specialization
from ..util.compile_lock import compile_lock, holds_compile_lock
from .block_programs import BlockPrograms
from .installed_program import InstalledProgram
from .program import Program
from .surrounding_modes import suspend_observers

# Per block, accepted and refused. Bounds recompilation when an argument changes in every call.
MAX_SPECIALIZATIONS = 16

# (block, specialization of the call, args, kwargs) -> a program for the call, or None; may raise Refused. args and
# kwargs are None while Dynamo traces without values.
Specialize = Callable[
    [nn.Module, Specialization, "tuple[Any, ...] | None", "Mapping[str, Any] | None"], "Program | None"
]
_Request = tuple[Specialization, tuple[str, ...]]  # a kind of call, and the conditions that no program meets


class ProgramRequests:
    """Requests for programs of one block: at most one for each specialization and set of blocking conditions.

    Attributes:
        specialize: makes a program; None makes no requests.
        refusals: the reasons of refused requests.
        answered: requests that must not be repeated although none was refused: those for which a program was made, and
            those that would fail at a guard which no other proof avoids.
        traced_refusals: the reasons of requests that Dynamo refused without values. An eager call asks again.
        is_running: a thread is making a program.
    """

    def __init__(self, programs: BlockPrograms, specialize: Specialize | None):
        self.block_programs, self.specialize = programs, specialize
        self.refusals: dict[_Request, str] = {}
        self.answered: set[_Request] = set()
        self.traced_refusals: dict[_Request, str] = {}
        self.is_running = False

    def request(
        self,
        call: Specialization,
        leaves: Leaves,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        known: int = 0,
    ) -> InstalledProgram | str:
        """Make a program for a call that no program admits, and add it to the block's programs.

        Args:
            args, kwargs: None while Dynamo traces.
            known: number of programs when none of them admitted the call.

        Returns:
            The program that admits the call, or the reason why there is none. "" if the request adds no reason to that
            of `BlockPrograms.find`, or if Dynamo traces and a program was added.
        """
        if self.specialize is None or (self.is_running and holds_compile_lock()):  # capture may run this block
            return ""
        programs, is_traced = self.block_programs, args is None
        request = call, programs.find_blocking_conditions(call, leaves)
        if (reason := self._find_earlier_answer(request, is_traced)) is not None:
            return reason
        with compile_lock():
            if args is not None and len(programs.installed) > known:
                installed = programs.find(call, leaves)
                if isinstance(installed, InstalledProgram):  # another thread has compiled it
                    return installed
            request = call, programs.find_blocking_conditions(call, leaves)
            if (reason := self._find_earlier_answer(request, is_traced)) is not None:
                return reason
            if leaves and not request[1] and programs.find_valid(call):
                self.answered.add(request)  # another proof would fail at the same guard
                return ""
            program = self._make_program(call, args, kwargs)
            if isinstance(program, str):
                (self.traced_refusals if is_traced else self.refusals)[request] = program
                return program
            if request[1]:  # do not ask again, even if the new program does not admit the call
                self.answered.add(request)
            programs.add(program)
            return programs.find(call, leaves) if args is not None else ""

    def _find_earlier_answer(self, request: _Request, is_traced: bool) -> str | None:
        """Return the reason why a request is not made, or not made again; None if it may be made."""
        if request in self.answered:
            return ""
        if request in self.refusals:
            return self.refusals[request]
        if is_traced and request in self.traced_refusals:
            return self.traced_refusals[request]
        if len(self.block_programs.installed) + len(self.refusals) < MAX_SPECIALIZATIONS:
            return None
        return (
            f"limit of {MAX_SPECIALIZATIONS} specializations reached. Each value of a number among the arguments or "
            "attributes needs one: keep the value, pass it as a tensor, or store it in a buffer"
        )

    def _make_program(self, call: Specialization, args: Any, kwargs: Any) -> Program | str:
        """Return a new program, or the reason why there is none."""
        assert self.specialize is not None
        self.is_running = True
        try:
            with suspend_observers():
                program = self.specialize(self.block_programs.block, call, args, kwargs)
        except AbsorbedModuleChanged:
            raise
        except Exception as error:  # also an error of the user's code, on abstract tensors or at other sizes
            return str(error) if isinstance(error, MoefxError) else f"{type(error).__name__}: {error}"
        finally:
            self.is_running = False
        return "no program was made for it" if program is None else program
