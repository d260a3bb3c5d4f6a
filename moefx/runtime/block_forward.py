"""`BlockForward`: the `forward` of a rewritten block.

The block keeps its class, its submodules and its `state_dict`; only the instance attribute `forward` is new. Each call
binds the arguments, finds a program whose specialization and guards admit the call (`block_programs`), and runs it on
the block. If no program admits the call, the block is specialized lazily (`program_requests`), or runs the original
forward and counts the call. The same code runs in eager mode and is traced by `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import AbsorbedModuleChanged, InvalidInput, MoefxError, NotRewritten, summarize_error
from ..ir.activation_stash import MissCounter
from ..ir.argument_binding import Leaves, Path, Specialization, flatten_arguments, make_binder, specialize_call
from ..ir.running_block import running
from ..util.compile_lock import compile_lock, holds_compile_lock
from .block_programs import BlockPrograms, CallCounts
from .installed_program import InstalledProgram
from .program import Program
from .program_requests import MAX_SPECIALIZATIONS, ProgramRequests, Specialize
from .surrounding_modes import is_transformed

if TYPE_CHECKING:
    from .ranks.expert_layout import ExpertLayout
    from .ranks.overwrite_detection import OverwritingWatch

_log = logging.getLogger(__name__)
_NO_PROGRAM = "no program admits the call"


class BlockForward:
    """The forward of one rewritten block. Picklable; a deep copy is bound to the copied block.

    Args:
        block: the module whose `forward` this becomes (see `install_forward`).
        programs: programs of the block, in the order to try them.
        name: the block's name in the model, for messages.
        specialize: called when no program admits a call. It must be picklable and hold no module: copies of the
            block share it.
        expert_layout: of the experts over a mesh, on which the block has its local experts only; None without a mesh.
        watch: detects that the local experts are overwritten; None without a mesh.
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
        self.expert_layout, self.watch = expert_layout, watch
        self.counts = CallCounts()
        has_stash = expert_layout is not None and bool(expert_layout.routes.stash_layers)
        self.miss_counter = MissCounter() if has_stash else None
        self.block_programs = BlockPrograms(block, name, self.counts)
        self.requests = ProgramRequests(self.block_programs, specialize)
        self.original = _find_own_forward(block)
        self._compiled_program: Program | None = None
        self.fallback_reasons: dict[str, None] = {}  # reasons of eager calls, in order, a bounded number
        self._forced = ""
        self.compiled_by = ""  # the compiler of the surrounding graph, whose code runs no Python
        self._offsets: tuple[torch.Tensor, ...] = ()
        self._set_signature(_read_signature(block, self.original))
        for program in programs:
            self.add(program)

    # -- calls -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._forced == "original":
            if not self.requests.is_running or holds_compile_lock():
                return self.run_original(*args, **kwargs)
            with compile_lock():  # wait for another thread that is specializing the block
                pass
        objects = self.block_programs.objects
        leaves = flatten_arguments(self._bind(*args, **kwargs), objects)
        call = specialize_call(self.block, leaves, objects)
        if torch.compiler.is_compiling():
            installed, reason = self._find_traced_program(call, leaves)
            if installed is not None:
                return self._run(installed, leaves, installed.program.traced_fn)
        else:
            installed, reason = self._find_eager_program(call, leaves, args, kwargs)
            if installed is not None:
                return self._run_eagerly(installed, leaves, args, kwargs)
            if self.block_programs.objects != objects:  # a new program may take these arguments unflattened
                return self(*args, **kwargs)
        return self._run_without_program(reason, args, kwargs)

    def _run_eagerly(self, installed: InstalledProgram, leaves: Leaves, args: Any, kwargs: Any) -> Any:
        """Run a program and count the call. Repeat the call without the program if a changed block made it fail."""
        outer, has_failed = (running.block, running.counter), False
        running.block, running.counter = self.name, 0 if self.miss_counter is None else self.miss_counter.number
        try:
            if self.watch is not None:
                self.watch.begin_call()
            return self._run(installed, leaves, installed.program.fn)
        except (TypeError, RuntimeError, InvalidInput) as error:
            has_failed = True
            if not self._reject_changed(installed, error):
                raise
        finally:
            running.block, running.counter = outer
            self.counts.rewritten += not has_failed  # a checkpoint may stop its second run early: no failure
        return self(*args, **kwargs)

    def _run(self, installed: InstalledProgram, leaves: Leaves, run: Callable[..., Any]) -> Any:
        if self._forced:
            return installed.run_after(self._forced, self.block, leaves)
        program, values = installed.program, [leaves[i][1] for i in installed.program.leaf_indices]
        if self.block_programs.records_load and program.fn_with_load is not None:
            result, self._offsets = program.fn_with_load(self.block, *values)
            return result
        return run(self.block, *values)

    def _reject_changed(self, installed: InstalledProgram, error: Exception) -> bool:
        """Return whether a program failed because the block has changed. Further calls then do not run it.

        Raises:
            AbsorbedModuleChanged: the block has changed, and the call cannot be repeated.
        """
        installed.absorbed.inspect(self.name)  # a parameter of an absorbed module may be gone
        if not (replaced := installed.find_replaced()):
            return False
        installed.failed = True
        if not installed.can_repeat():
            raise AbsorbedModuleChanged(
                f"{self._shown_name} failed ({summarize_error(error)}), because {replaced} was removed, or has "
                "another shape, dtype or class than when it was compiled. The call may have drawn random numbers, "
                "changed state or run hooks before, so moefx does not run it a second time: call again"
            ) from error
        return True

    def _run_without_program(self, reason: str, args: Any, kwargs: Any) -> Any:
        """Run the original forward, and warn.

        Raises:
            NotRewritten: this rank has only a part of the experts.
        """
        if self.expert_layout is not None:
            raise NotRewritten(
                f"{self._shown_name} {_format_refusal(reason)}. The original forward cannot run: this rank has only a "
                "part of the experts"
            )
        if not torch.compiler.is_compiling():
            self._warn_once(reason)
        return self.run_original(*args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        """The code of the user's forward, for `torch.export`, which reads its file and line."""
        forward = inspect.unwrap(self.original if self.original is not None else type(self.block).forward)
        return getattr(forward, "__func__", forward).__code__

    @property
    def _shown_name(self) -> str:
        return self.name or type(self.block).__name__

    def _warn_once(self, reason: str) -> None:
        """Warn that calls run the original forward: once per reason, for a bounded number of reasons."""
        if reason not in self.fallback_reasons and len(self.fallback_reasons) < MAX_SPECIALIZATIONS:
            self.fallback_reasons[reason] = None
            _log.warning(
                "%s %s. The call runs the original forward; moefx.explain(model) lists all reasons",
                self._shown_name, _format_refusal(reason),
            )  # fmt: skip

    def run_original(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as it was before the rewrite."""
        if not torch.compiler.is_compiling():
            self.counts.original += 1
        if self.block_programs.records_load:
            self._offsets = ()  # those of an earlier call
        if self.original is not None:
            return self.original(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    def _find_eager_program(
        self, call: Specialization, leaves: Leaves, args: Any, kwargs: Any
    ) -> tuple[InstalledProgram | None, str]:
        """Find the program for an eager call, or request one.

        Returns:
            The program or None, and the reason if there is none.
        """
        if is_transformed():
            return None, "forward-mode derivatives and torch.func transforms run the original"
        known = len(self.block_programs.installed)
        found = self.block_programs.find(call, leaves)
        if isinstance(found, str):
            found = self.requests.request(call, leaves, args, kwargs, known) or found
        if isinstance(found, str):
            return None, found or _NO_PROGRAM
        if shared := found.find_shared_memory(leaves):
            return None, shared
        return found, ""

    def _find_traced_program(self, call: Specialization, leaves: Leaves) -> tuple[InstalledProgram | None, str]:
        """Find the program for a call that Dynamo traces. Returns as `_find_eager_program` does."""
        if reason := self._prepare_trace(*call):
            return None, reason
        installed = self.block_programs.find_traced(call, leaves)
        if installed is None:
            return None, "a guard of its programs failed"
        num_tensors = len(installed.program.leaf_indices) - len(installed.program.objects)
        if installed.program.written_inputs and num_tensors > 1:
            return None, "it writes to an argument, and a compiler does not show whether another one shares its memory"
        return installed, ""

    @torch.compiler.assume_constant_result
    def _prepare_trace(self, *fields: Any) -> str:
        """Run the checks of an eager call while Dynamo traces, without values.

        Takes the fields of a `Specialization`: Dynamo passes plain constants only, no subclasses of tuple.

        Returns:
            The reason why no program is left, or "".
        """
        call, found = Specialization(*fields), ""
        if not self.block_programs.find_valid(call):
            found = self.requests.request(call, [], None, None)
        valid = self.block_programs.find_valid(call)
        self.block_programs.move_to_front(valid)  # the trace takes the first program that admits the call
        return "" if valid else str(found) or _NO_PROGRAM

    # -- programs ----------------------------------------------------------------------------------

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs, in the order of trial."""
        return tuple(installed.program for installed in self.block_programs.installed)

    @property
    def compiled_program(self) -> Program:
        """The program that was added first. `programs` may begin with another one, because Dynamo's traces reorder."""
        assert self._compiled_program is not None
        return self._compiled_program

    @property
    def objects(self) -> tuple[Path, ...]:
        """Arguments that programs pass on unchanged."""
        return self.block_programs.objects

    @property
    def refusals(self) -> dict[tuple[Specialization, tuple[str, ...]], str]:
        """The reasons of refused requests, by kind of call and blocking conditions."""
        return {**self.requests.traced_refusals, **self.requests.refusals}

    def add(self, program: Program) -> None:
        """Add a program, to be tried after the existing ones."""
        if self._compiled_program is None:
            self._compiled_program = program
        self.block_programs.add(program)

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
        self._offsets = ()
        self.block_programs.record_load(on)

    def load(self) -> torch.Tensor | None:
        """Return the tokens per expert in the last call, int32 [E] on the block's device. Return None before the first
        call, and if the last one ran the original forward.

        If the block has several routed groups, E counts the experts of all groups, groups over a mesh first. Over a
        mesh, counts the tokens that this rank routes to experts on any rank. Does not synchronise with the host.

        Raises:
            MoefxError: statistics are switched off.
        """
        if not self.block_programs.records_load:
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
        memo[id(self.requests.specialize)] = self.requests.specialize
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
        if self.block_programs.records_load:
            self.record_load()

    def __repr__(self) -> str:
        name = self.name or type(self.block).__name__
        return f"<rewritten forward of {name}, {len(self.programs)} program(s)>"


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


def _format_refusal(reason: str) -> str:
    return f"is not rewritten for this kind of call: {' '.join(reason.split())}"


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
