"""`BlockForward`: what stands in the place of a rewritten block's `forward`.

The block keeps its class, its submodules and its state_dict; only the instance attribute `forward` is new. At
each call a `BlockForward` binds the arguments, looks for a program whose recorded specialisation and guards
admit the call (design section 3.0) and runs it on the block. A call that no program admits is specialised
lazily, or runs the original forward, counted. The same code runs in eager mode and is traced by
`torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import AbsorbedModuleChanged, InvalidInput, MoefxError, NotRewritten
from ..ir.argument_binding import Leaves, Path, Specialisation, binder, call_specialisation, leaves_of
from ..ir.guards.recomputed_choice import running
from ..util.compile_lock import compile_lock, holds_compile_lock
from .entry import Entry
from .program import Program
from .watch import AbsorbedModules

# Of one block, taken or refused. An argument that changes at every call must not lift at every call.
MAX_SPECIALISATIONS = 16
_NOT_SPECIALISED = "not specialised"
_log = logging.getLogger(__name__)

# (block, specialisation of the call, args, kwargs) -> a program for it, or None; may raise Refused. While
# Dynamo
# traces there are no arguments to run: args and kwargs are None.
Specialise = Callable[
    [nn.Module, Specialisation, "tuple[Any, ...] | None", "Mapping[str, Any] | None"], "Program | None"
]


@dataclasses.dataclass
class CallCounts:
    """Eager calls of one block since it was compiled (calls inside a `torch.compile` region are not counted).

    Attributes:
        rewritten: calls that ran a program.
        original: calls that ran the original forward, asked for or as a fallback.
        guard_failures: calls for which a program was recorded but one of its guards did not hold.
        last_failed_guard: the condition, with why and where capture relied on it.
    """

    rewritten: int = 0
    original: int = 0
    guard_failures: int = 0
    last_failed_guard: str = ""


class BlockForward:
    """The forward of one rewritten block. Picklable; a deep copy is bound to the copied block.

    Args:
        block: the module whose `forward` this becomes (see `install`).
        programs: what is known already.
        name: the block's name in the model, for messages.
        specialise: called for a specialisation that no program admits; picklable, and a value: it is given
            the block and holds no module, copies of the block share it.
    """

    def __init__(
        self,
        block: nn.Module,
        programs: Sequence[Program] = (),
        *,
        name: str = "",
        specialise: Specialise | None = None,
    ):
        self.block = block
        self.name = name
        self.specialise = specialise
        self.counts = CallCounts()
        self.refusals: dict[tuple[Specialisation, tuple[str, ...]], str] = {}  # by call, and what kept it out
        self.original = _own_forward(block)
        self._entries: list[Entry] = []
        self.objects: tuple[Path, ...] = ()  # arguments that programs pass on to submodules as they are
        self._told: set[str] = set()
        self._forced = ""
        self._specialising = False
        self.watch: Any = None  # of a block that is spread over a mesh, see `runtime.overwriting`
        self.compiled_by = ""  # what compiles the graph that this is a part of: its code runs no Python
        self._recording = False
        self._offsets: tuple[torch.Tensor, ...] = ()
        self._set_signature(_signature(block, self.original))
        for program in programs:
            self.add(program)

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forced == "original":
            if not self._specialising or holds_compile_lock():
                return self.run_original(*args, **kwargs)
            with compile_lock():  # another thread lifts it, which does not concern this call
                pass
        leaves = leaves_of(self._bind(*args, **kwargs), self.objects)
        call = call_specialisation(self.block, leaves, self.objects)
        if torch.compiler.is_compiling():
            entry = self._traced(call, leaves)
        else:
            objects = self.objects
            entry = self._found(call, leaves, args, kwargs)
            if entry is None and self.objects != objects:  # its program has them whole
                return self(*args, **kwargs)
        if entry is not None:
            if torch.compiler.is_compiling():
                return self._run(entry, leaves)
            running.block = self.name
            try:
                return self._run(entry, leaves)
            except (TypeError, RuntimeError, InvalidInput):
                entry.absorbed.inspect(self.name)  # a parameter of theirs may be gone
                if not entry.replaced():
                    raise
                entry.failed = True
            finally:
                running.block = ""
            return self(*args, **kwargs)  # that program is not for it
        if getattr(self.specialise, "spread", None) is not None:
            raise NotRewritten(
                f"{self._name} {self._why}. Its original forward cannot run: it has a part of the experts"
            )
        if not torch.compiler.is_compiling():
            self._tell_once()
        return self.run_original(*args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        """Of the user's forward: `torch.export` asks a model's forward where it is written."""
        forward = inspect.unwrap(self.original if self.original is not None else type(self.block).forward)
        return getattr(forward, "__func__", forward).__code__

    @property
    def _name(self) -> str:
        return self.name or type(self.block).__name__

    @property
    def _why(self) -> str:
        """Why the last call was not for any program."""
        refused = next(reversed([why for why in self.refusals.values() if why not in ("", _NOT_SPECIALISED)]), "")
        why = " ".join((refused or self.counts.last_failed_guard or "no program admits the call").split())
        return f"is not rewritten for such calls: {why}"

    def _tell_once(self) -> None:
        """Say that a call runs the original, for each reason once: what has another value in each call has many."""
        why = self._why
        if why not in self._told and len(self._told) < MAX_SPECIALISATIONS:
            self._told.add(why)
            _log.warning("%s %s (moefx.explain has all of them). They run the original", self._name, why)

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as it was before the rewrite."""
        if not torch.compiler.is_compiling():
            self.counts.original += 1
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    def _run(self, entry: Entry, leaves: Leaves) -> Any:
        if not torch.compiler.is_compiling() and self.watch is not None:
            self.watch.begin_call()
        if self._forced:
            return entry.run_after(self._forced, self.block, leaves)
        program, values = entry.program, [leaves[i][1] for i in entry.program.picks]
        if self._recording and program.fn_with_load is not None:
            result, self._offsets = program.fn_with_load(self.block, *values)
            return result
        return program.fn(self.block, *values)

    def _found(self, call: Specialisation, leaves: Leaves, args: Any, kwargs: Any) -> Entry | None:
        """The program for an eager call, made now if there is none."""
        if _transformed():
            self.counts.last_failed_guard = "forward-mode derivatives and torch.func transforms are the original's"
            return None
        known = len(self._entries)
        entry = self._admitted(call, leaves) or self._specialised(call, leaves, args, kwargs, known)
        if entry is not None:
            self.counts.rewritten += 1
        return entry

    def _traced(self, call: Specialisation, leaves: Leaves) -> Entry | None:
        """The program for a call that Dynamo traces; what it relies on becomes a guard of the trace."""
        if not self._prepare_trace(*call):
            return None
        for entry in self._entries:
            if entry.program.key.admits(call) and entry.failed_guard(self.block, leaves) < 0:
                return entry if entry.program.unchanged(self.block) else None
        return None

    def _admitted(self, call: Specialisation, leaves: Leaves) -> Entry | None:
        """The program that is there for an eager call. Why one is not for it is noted."""
        failed = False
        for entry in self._entries:
            if not entry.program.key.admits(call):
                continue
            entry.absorbed.check(self.name)
            if not entry.holds():
                why = entry.why_not()
            elif (index := entry.failed_guard(self.block, leaves)) >= 0:
                why = str(entry.program.guards[index])
            else:
                return entry
            self.counts.last_failed_guard = why
            failed = True
        self.counts.guard_failures += failed
        return None

    def _specialised(
        self,
        call: Specialisation,
        leaves: Leaves,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        known: int = 0,
    ) -> Entry | None:
        """Ask for a program for this call, at most once for each specialisation. `known`: programs that were there when
        none of them admitted it."""
        if self.specialise is None or (self._specialising and holds_compile_lock()):  # capture may run this very block
            return None
        if self._is_settled((call, self._kept_out(call, leaves))):
            return None
        with compile_lock():
            if args is not None and len(self._entries) > known and (entry := self._admitted(call, leaves)):
                return entry  # another thread made it meanwhile
            wanted = call, self._kept_out(call, leaves)
            if self._is_settled(wanted):
                return None
            if leaves and not wanted[1] and self._holding(call):
                self.refusals[wanted] = _NOT_SPECIALISED  # the same lift would meet the same guard again
                return None
            program = self._asked_for(call, args, kwargs)
            if isinstance(program, str):
                self.refusals[wanted] = program
                return None
            if wanted[1]:  # whatever it turns out to be for
                self.refusals[wanted] = ""
            self.add(program)
            return self._admitted(call, leaves) if args is not None else None

    def _is_settled(self, wanted: tuple[Specialisation, tuple[str, ...]]) -> bool:
        """Whether it was refused, or so much was asked for that nothing more is."""
        return wanted in self.refusals or len(self._entries) + len(self.refusals) >= MAX_SPECIALISATIONS

    def _asked_for(self, call: Specialisation, args: Any, kwargs: Any) -> Program | str:
        """A new program, or why there is none."""
        assert self.specialise is not None
        self._specialising = True
        try:
            with suspend_observers():
                program = self.specialise(self.block, call, args, kwargs)
        except AbsorbedModuleChanged:
            raise
        except Exception as error:  # the block's own as well, on abstract tensors or at other sizes
            return str(error) if isinstance(error, MoefxError) else f"{type(error).__name__}: {error}"
        finally:
            self._specialising = False
        return _NOT_SPECIALISED if program is None else program

    def _kept_out(self, call: Specialisation, leaves: Leaves) -> tuple[str, ...]:
        """The conditions that keep the programs for such a call from this one, where the block goes another way."""
        conditions = []
        for entry in self._entries if leaves else []:
            if entry.program.key.admits(call):
                index, guards = entry.failed_guard(self.block, leaves), entry.program.guards
                conditions += [guards[index].condition] if index >= 0 and guards[index].one_way else []
        return tuple(conditions)

    @torch.compiler.assume_constant_result
    def _prepare_trace(self, *fields: Any) -> bool:
        """Runs in Python while Dynamo traces: the checks of an eager call, without the values.

        Dynamo passes constants, of which a subclass of tuple is none: hence the fields.
        """
        call = Specialisation(*fields)
        if not self._holding(call):
            self._specialised(call, [], None, None)
        holding = self._holding(call)
        # the trace takes the first that admits the call
        self._entries.sort(key=lambda entry: entry not in holding)
        return bool(holding)

    def _holding(self, call: Specialisation) -> list[Entry]:
        """The programs for a call whose attributes are unchanged."""
        admitted = [e for e in self._entries if e.program.key.admits(call)]
        for entry in admitted:
            entry.absorbed.check(self.name)
        return [e for e in admitted if e.holds()]

    # -- programs ----------------------------------------------------------------------------------

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs, in the order in which they are tried."""
        return tuple(entry.program for entry in self._entries)

    def add(self, program: Program) -> None:
        """Add a program; it is tried after the ones that are there."""
        if self._recording:
            program.prepare_load()
        self.objects = tuple(dict.fromkeys((*self.objects, *program.objects)))
        self._entries.append(Entry(program, AbsorbedModules(self.block, program.absorbed)))

    @contextlib.contextmanager
    def running(self, what: str) -> Iterator[None]:
        """While the context is open, run `"original"`, or the graph after the named pass, to bisect a
        problem.

        Raises:
            NoSuchPass: at the call, when no pass of that name ran.
        """
        before, self._forced = self._forced, what
        try:
            yield
        finally:
            self._forced = before

    # -- routing statistics ------------------------------------------------------------------------

    def record_load(self, on: bool = True) -> None:
        """Switch routing statistics on or off: each call then keeps a reference to its `expert_offsets`."""
        self._recording = on
        self._offsets = ()
        for program in self.programs if on else ():
            program.prepare_load()

    def load(self) -> torch.Tensor | None:
        """Tokens per expert of the last call, int32 [E] on the device of the block (E of all routed groups
        together where a block has several, those over a mesh first); None before the first call. No host
        synchronisation. Over a mesh: of the tokens that this rank routes, to experts on all ranks.

        Raises:
            MoefxError: statistics are not switched on.
        """
        if not self._recording:
            raise MoefxError(f"routing statistics of {self.name or 'the block'} are off; call record_load() first")
        if not self._offsets:
            return None
        return torch.cat([offsets.diff() for offsets in self._offsets])

    # -- copies and pickles ------------------------------------------------------------------------

    def _set_signature(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature
        self._bind = binder(signature)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockForward:
        duplicate = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.specialise)] = self.specialise
        own = {name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()}
        duplicate.__dict__.update(own, _bind=self._bind, __signature__=self.__signature__)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_offsets": ()}  # what a call left behind belongs to this object only
        del state["_bind"], state["__signature__"]
        if self.original is not None:
            # It may not be complete yet when this object is loaded. Annotations are not always picklable.
            parameters = self.__signature__.parameters.values()
            state["signature"] = [p.replace(annotation=p.empty) for p in parameters]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters = state.pop("signature", None)
        self.__dict__.update(state)
        known = _signature(self.block, None) if parameters is None else inspect.Signature(parameters)
        self._set_signature(known)
        if self._recording:
            self.record_load()

    def __repr__(self) -> str:
        name = self.name or type(self.block).__name__
        return f"<rewritten forward of {name}, {len(self._entries)} program(s)>"


def signature_of(block: nn.Module) -> inspect.Signature:
    """Of the forward of `block`, rewritten or not, as it was written."""
    forward = vars(block).get("forward")
    if isinstance(forward, BlockForward):
        forward = forward.original
    return inspect.signature(forward if forward is not None else type(block).forward.__get__(block))


def signature_binder(block: nn.Module) -> Callable[..., Any]:
    """Binds the arguments of a call of `block` to the names of its signature."""
    return binder(signature_of(block))


def _transformed() -> bool:
    """Whether the call is differentiated in other ways than backward."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _pack(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return t, t._version


def _unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Autograd itself does not look at the version where there are hooks."""
    t, version = saved
    if t._version != version:
        raise RuntimeError("a tensor that the backward needs was modified by an inplace operation")
    return t


@contextlib.contextmanager
def suspend_observers() -> Iterator[None]:
    """Without what watches the call: `export(strict=False)` would record the captures as the model's, a flop counter
    count them, a checkpoint keep what they save for a backward."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        for _ in _get_current_function_mode_stack():
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        yield


def install_forward(
    block: nn.Module, programs: Sequence[Program], *, name: str = "", specialise: Specialise | None = None
) -> BlockForward:
    """Make `block` run its programs. A block that is rewritten already keeps its true original forward."""
    forward = BlockForward(block, programs, name=name, specialise=specialise)
    block.forward = forward  # type: ignore[method-assign]
    return forward


def rewritten_forward(block: nn.Module) -> BlockForward | None:
    """The `BlockForward` of a block, None when it is not rewritten."""
    forward = block.__dict__.get("forward")
    return forward if isinstance(forward, BlockForward) else None


def rewritten_blocks(model: nn.Module) -> dict[str, BlockForward]:
    """The rewritten blocks of a model by name, in module order."""
    found = {name: rewritten_forward(module) for name, module in model.named_modules()}
    return {name: forward for name, forward in found.items() if forward is not None}


def _own_forward(block: nn.Module) -> Callable[..., Any] | None:
    """An instance-level forward of the user's (accelerate and others leave one); None when the class's own
    runs."""
    forward = block.__dict__.get("forward")
    if isinstance(forward, BlockForward):
        return forward.original
    # A plain bound method of the class pickles as `block.forward`, which would come back as the BlockForward
    # itself.
    return None if getattr(forward, "__func__", None) is type(block).forward else forward


def _signature(block: nn.Module, original: Callable[..., Any] | None) -> inspect.Signature:
    if original is not None:
        return inspect.signature(original)
    signature = inspect.signature(type(block).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
