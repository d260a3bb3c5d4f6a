"""`BlockForward`: the `forward` of a rewritten block.

The block keeps its class, its submodules and its `state_dict`; only the instance attribute `forward` is new. Each call
binds the arguments, finds a program whose specialization and guards admit the call, and runs it on the block. If no
program admits the call, the block is specialized lazily, or runs the original forward and counts the call. The same
code runs in eager mode and is traced by `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import AbsorbedModuleChanged, InvalidInput, MoefxError, NotRewritten
from ..ir.argument_binding import Leaves, Path, Specialization, flatten_arguments, make_binder, specialize_call
from ..ir.guards.recomputed_choice import running
from ..util.compile_lock import compile_lock, holds_compile_lock
from .change_detection import AbsorbedModules
from .installed_program import InstalledProgram
from .program import Program
from .surrounding_modes import is_transformed, suspend_observers

if TYPE_CHECKING:
    from .ranks.expert_layout import ExpertLayout
    from .ranks.overwrite_detection import OverwritingWatch

# Per block, accepted and refused. Bounds recompilation when an argument changes in every call.
MAX_SPECIALIZATIONS = 16
_NOT_SPECIALIZED = "not specialized"
_log = logging.getLogger(__name__)

# (block, specialization of the call, args, kwargs) -> a program for the call, or None; may raise Refused. args and
# kwargs are None while Dynamo traces, because there are no values to run on.
Specialize = Callable[
    [nn.Module, Specialization, "tuple[Any, ...] | None", "Mapping[str, Any] | None"], "Program | None"
]


@dataclasses.dataclass
class CallCounts:
    """Eager calls of one block since it was compiled (calls inside a `torch.compile` region are not counted).

    Attributes:
        rewritten: calls that ran a program.
        original: calls that ran the original forward, on request or as a fallback. `moefx.blocks` shows this count as
            `fallbacks`.
        guard_failures: calls whose specialization has a program, but a guard of the program failed.
        last_failed_guard: the failed condition, with the reason and the line at which capture relied on it.
    """

    rewritten: int = 0
    original: int = 0
    guard_failures: int = 0
    last_failed_guard: str = ""


class BlockForward:
    """The forward of one rewritten block. Picklable; a deep copy is bound to the copied block.

    Args:
        block: the module whose `forward` this becomes (see `install_forward`).
        programs: programs of the block, in the order to try them.
        name: the block's name in the model, for messages.
        specialize: called when no program admits a call. It must be picklable and hold no module: copies of the
            block share it.
        expert_layout: that of the experts over a mesh, None without one. The block then has its own experts only.
        watch: detects that the block's own experts are overwritten; None without a mesh.
    """

    def __init__(
        self,
        block: nn.Module,
        programs: Sequence[Program] = (),
        *,
        name: str = "",
        specialize: Specialize | None = None,
        expert_layout: ExpertLayout | None = None,
        watch: OverwritingWatch | None = None,
    ):
        self.block = block
        self.name = name
        self.specialize = specialize
        self.expert_layout, self.watch = expert_layout, watch
        self.counts = CallCounts()
        self.refusals: dict[tuple[Specialization, tuple[str, ...]], str] = {}  # by call and blocking conditions
        self.original = _find_own_forward(block)
        self._entries: list[InstalledProgram] = []
        self.objects: tuple[Path, ...] = ()  # arguments that programs pass on unchanged
        self._warned: set[str] = set()
        self._forced = ""
        self._specializing = False
        self.compiled_by = ""  # the compiler of the surrounding graph, whose code runs no Python
        self._recording = False
        self._offsets: tuple[torch.Tensor, ...] = ()
        self._set_signature(_read_signature(block, self.original))
        for program in programs:
            self.add(program)

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forced == "original":
            if not self._specializing or holds_compile_lock():
                return self.run_original(*args, **kwargs)
            with compile_lock():  # wait for another thread that is specializing the block
                pass
        leaves = flatten_arguments(self._bind(*args, **kwargs), self.objects)
        call = specialize_call(self.block, leaves, self.objects)
        if torch.compiler.is_compiling():
            entry = self._find_traced_entry(call, leaves)
        else:
            objects = self.objects
            entry = self._find_eager_entry(call, leaves, args, kwargs)
            if entry is None and self.objects != objects:  # a new program takes these arguments unflattened
                return self(*args, **kwargs)
        if entry is not None:
            if torch.compiler.is_compiling():
                return self._run(entry, leaves)
            running.block = self.name
            try:
                return self._run(entry, leaves)
            except (TypeError, RuntimeError, InvalidInput):
                entry.absorbed.inspect(self.name)  # a parameter of an absorbed module may be gone
                if not entry.find_replaced():
                    raise
                entry.failed = True
            finally:
                running.block = ""
            return self(*args, **kwargs)  # try again without the failed program
        if self.expert_layout is not None:
            raise NotRewritten(
                f"{self._shown_name} {self._refusal_text}. The original forward cannot run: this rank has only a part "
                "of the experts"
            )
        if not torch.compiler.is_compiling():
            self._warn_once()
        return self.run_original(*args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        """The code of the user's forward, for `torch.export`, which reads its file and line."""
        forward = inspect.unwrap(self.original if self.original is not None else type(self.block).forward)
        return getattr(forward, "__func__", forward).__code__

    @property
    def _shown_name(self) -> str:
        return self.name or type(self.block).__name__

    @property
    def _refusal_text(self) -> str:
        """The reason why no program took the last call."""
        refused = next(reversed([why for why in self.refusals.values() if why not in ("", _NOT_SPECIALIZED)]), "")
        why = " ".join((refused or self.counts.last_failed_guard or "no program admits the call").split())
        return f"is not rewritten for this kind of call: {why}"

    def _warn_once(self) -> None:
        """Warn that calls run the original forward: once per reason, for a bounded number of reasons."""
        why = self._refusal_text
        if why not in self._warned and len(self._warned) < MAX_SPECIALIZATIONS:
            self._warned.add(why)
            _log.warning(
                "%s %s. The call runs the original forward; moefx.explain(model) lists all reasons",
                self._shown_name, why,
            )  # fmt: skip

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as it was before the rewrite."""
        if not torch.compiler.is_compiling():
            self.counts.original += 1
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    def _run(self, entry: InstalledProgram, leaves: Leaves) -> Any:
        if not torch.compiler.is_compiling() and self.watch is not None:
            self.watch.begin_call()
        if self._forced:
            return entry.run_after(self._forced, self.block, leaves)
        program, values = entry.program, [leaves[i][1] for i in entry.program.leaf_indices]
        if self._recording and program.fn_with_load is not None:
            result, self._offsets = program.fn_with_load(self.block, *values)
            return result
        run = program.traced_fn if torch.compiler.is_compiling() else program.fn
        return run(self.block, *values)

    def _find_eager_entry(
        self, call: Specialization, leaves: Leaves, args: Any, kwargs: Any
    ) -> InstalledProgram | None:
        """Find the program for an eager call, or compile one."""
        if is_transformed():
            self.counts.last_failed_guard = "forward-mode derivatives and torch.func transforms run the original"
            return None
        known = len(self._entries)
        entry = self._find_admitting_entry(call, leaves) or self._specialize_for(call, leaves, args, kwargs, known)
        if entry is not None:
            self.counts.rewritten += 1
        return entry

    def _find_traced_entry(self, call: Specialization, leaves: Leaves) -> InstalledProgram | None:
        """Find the program for a call that Dynamo traces. Dynamo turns its checks into guards."""
        if not self._prepare_trace(*call):
            return None
        for entry in self._entries:
            if entry.program.key.admits(call) and entry.find_failed_guard(self.block, leaves) < 0:
                return entry if entry.program.unchanged(self.block) else None
        return None

    def _find_admitting_entry(self, call: Specialization, leaves: Leaves) -> InstalledProgram | None:
        """Find an existing program for an eager call. Record the last reason against one in `counts`."""
        failed = False
        for entry in self._entries:
            if not entry.program.key.admits(call):
                continue
            entry.absorbed.check(self.name)
            if not entry.holds():
                why = entry.describe_mismatch()
            elif (index := entry.find_failed_guard(self.block, leaves)) >= 0:
                why = str(entry.program.guards[index])
            else:
                return entry
            self.counts.last_failed_guard = why
            failed = True
        self.counts.guard_failures += failed
        return None

    def _specialize_for(
        self,
        call: Specialization,
        leaves: Leaves,
        args: tuple[Any, ...] | None,
        kwargs: Mapping[str, Any] | None,
        known: int = 0,
    ) -> InstalledProgram | None:
        """Compile a program for this call, at most once per specialization.

        Args:
            known: number of programs when none of them admitted the call.
        """
        if self.specialize is None or (self._specializing and holds_compile_lock()):  # capture may run this block
            return None
        if self._is_settled((call, self._find_blocking_conditions(call, leaves))):
            return None
        with compile_lock():
            if args is not None and len(self._entries) > known and (entry := self._find_admitting_entry(call, leaves)):
                return entry  # another thread compiled it meanwhile
            request = call, self._find_blocking_conditions(call, leaves)
            if self._is_settled(request):
                return None
            if leaves and not request[1] and self._find_valid_entries(call):
                self.refusals[request] = _NOT_SPECIALIZED  # another proof would fail at the same guard
                return None
            program = self._request_program(call, args, kwargs)
            if isinstance(program, str):
                self.refusals[request] = program
                return None
            if request[1]:  # do not ask again, even if the new program does not admit the call
                self.refusals[request] = ""
            self.add(program)
            return self._find_admitting_entry(call, leaves) if args is not None else None

    def _is_settled(self, request: tuple[Specialization, tuple[str, ...]]) -> bool:
        """Return whether the request was refused before, or the block has reached its limit of specializations."""
        return request in self.refusals or len(self._entries) + len(self.refusals) >= MAX_SPECIALIZATIONS

    def _request_program(self, call: Specialization, args: Any, kwargs: Any) -> Program | str:
        """Return a new program, or the reason why there is none."""
        assert self.specialize is not None
        self._specializing = True
        try:
            with suspend_observers():
                program = self.specialize(self.block, call, args, kwargs)
        except AbsorbedModuleChanged:
            raise
        except Exception as error:  # also an error of the user's code, on abstract tensors or at other sizes
            return str(error) if isinstance(error, MoefxError) else f"{type(error).__name__}: {error}"
        finally:
            self._specializing = False
        return _NOT_SPECIALIZED if program is None else program

    def _find_blocking_conditions(self, call: Specialization, leaves: Leaves) -> tuple[str, ...]:
        """Return the failed guards of programs with this specialization, if they mark another branch of the block."""
        conditions = []
        for entry in self._entries if leaves else []:
            if entry.program.key.admits(call):
                index, guards = entry.find_failed_guard(self.block, leaves), entry.program.guards
                conditions += [guards[index].condition] if index >= 0 and guards[index].one_way else []
        return tuple(conditions)

    @torch.compiler.assume_constant_result
    def _prepare_trace(self, *fields: Any) -> bool:
        """Run the checks of an eager call while Dynamo traces, without values.

        Takes the fields of a `Specialization`: Dynamo passes plain constants only, no subclasses of tuple.
        """
        call = Specialization(*fields)
        if not self._find_valid_entries(call):
            self._specialize_for(call, [], None, None)
        holding = self._find_valid_entries(call)
        # The trace takes the first entry that admits the call.
        self._entries = sorted(self._entries, key=lambda entry: entry not in holding)  # other threads may be reading
        return bool(holding)

    def _find_valid_entries(self, call: Specialization) -> list[InstalledProgram]:
        """Return the entries for this specialization whose attributes are unchanged."""
        admitted = [e for e in self._entries if e.program.key.admits(call)]
        for entry in admitted:
            entry.absorbed.check(self.name)
        return [e for e in admitted if e.holds()]

    # -- programs ----------------------------------------------------------------------------------

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs, in the order of trial."""
        return tuple(entry.program for entry in self._entries)

    def add(self, program: Program) -> None:
        """Add a program, to be tried after the existing ones."""
        if self._recording:
            program.prepare_load()
        self.objects = tuple(dict.fromkeys((*self.objects, *program.objects)))
        self._entries.append(InstalledProgram(program, AbsorbedModules(self.block, program.absorbed)))

    @contextlib.contextmanager
    def force_graph(self, name: str) -> Iterator[None]:
        """Run `"original"`, or the graph after the named pass, inside the context. Serves to bisect a problem.

        Raises:
            NoSuchPass: at the call, if no pass of that name ran.
        """
        before, self._forced = self._forced, name
        try:
            yield
        finally:
            self._forced = before

    # -- routing statistics ------------------------------------------------------------------------

    def record_load(self, on: bool = True) -> None:
        """Switch routing statistics on or off. If on, each call keeps a reference to its `expert_offsets`."""
        self._recording = on
        self._offsets = ()
        for program in self.programs if on else ():
            program.prepare_load()

    def load(self) -> torch.Tensor | None:
        """Return the tokens per expert in the last call, int32 [E] on the block's device; None before the first call.

        If the block has several routed groups, E counts the experts of all groups, groups over a mesh first. Over a
        mesh, counts the tokens that this rank routes to experts on any rank. Does not synchronise with the host.

        Raises:
            MoefxError: statistics are switched off.
        """
        if not self._recording:
            raise MoefxError(f"routing statistics of {self.name or 'the block'} are off; call record_load() first")
        if not self._offsets:
            return None
        return torch.cat([offsets.diff() for offsets in self._offsets])

    # -- copies and pickles ------------------------------------------------------------------------

    def _set_signature(self, signature: inspect.Signature) -> None:
        self.__signature__ = signature
        self._bind = make_binder(signature)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockForward:
        duplicate = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.specialize)] = self.specialize
        copied_state = {name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()}
        duplicate.__dict__.update(copied_state, _bind=self._bind, __signature__=self.__signature__)
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_offsets": ()}  # statistics of the last call are not copied
        del state["_bind"], state["__signature__"]
        if self.original is not None:
            # `original` may be incomplete when this object is loaded. Annotations are not always picklable.
            parameters = self.__signature__.parameters.values()
            state["signature"] = [p.replace(annotation=p.empty) for p in parameters]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters = state.pop("signature", None)
        self.__dict__.update(state)
        known = _read_signature(self.block, None) if parameters is None else inspect.Signature(parameters)
        self._set_signature(known)
        if self._recording:
            self.record_load()

    def __repr__(self) -> str:
        name = self.name or type(self.block).__name__
        return f"<rewritten forward of {name}, {len(self._entries)} program(s)>"


def install_forward(
    block: nn.Module,
    programs: Sequence[Program],
    *,
    name: str = "",
    specialize: Specialize | None = None,
    expert_layout: ExpertLayout | None = None,
    watch: OverwritingWatch | None = None,
) -> BlockForward:
    """Make `block` run its programs. A block that is already rewritten keeps the user's original forward.

    Args:
        name, specialize, expert_layout, watch: see `BlockForward`.
    """
    forward = BlockForward(block, programs, name=name, specialize=specialize, expert_layout=expert_layout, watch=watch)
    block.forward = forward  # type: ignore[method-assign]
    return forward


def get_rewritten_forward(block: nn.Module) -> BlockForward | None:
    """Return the `BlockForward` of a block; None if the block is not rewritten."""
    forward = block.__dict__.get("forward")
    return forward if isinstance(forward, BlockForward) else None


def find_rewritten_blocks(model: nn.Module) -> dict[str, BlockForward]:
    """Return the rewritten blocks of a model by name, in module order."""
    forwards = {name: get_rewritten_forward(module) for name, module in model.named_modules()}
    return {name: forward for name, forward in forwards.items() if forward is not None}


def _find_own_forward(block: nn.Module) -> Callable[..., Any] | None:
    """Return the user's instance-level forward, as accelerate and others set one; None if the class's forward runs."""
    forward = block.__dict__.get("forward")
    if isinstance(forward, BlockForward):
        return forward.original
    # A bound method of the class pickles as `block.forward`, which loads as the BlockForward itself.
    return None if getattr(forward, "__func__", None) is type(block).forward else forward


def _read_signature(block: nn.Module, original: Callable[..., Any] | None) -> inspect.Signature:
    if original is not None:
        return inspect.signature(original)
    signature = inspect.signature(type(block).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])
