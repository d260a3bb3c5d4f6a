"""Record the launches of a call and replay them: they depend on shapes and addresses, not on values.

The host code of a call (checks, configurations, strides, descriptors) takes longer than a small MoE layer on the GPU.
`replay_or_record` runs it once for each signature and records its allocations, launches and frees on a tape. Later
calls replay the tape with their own tensors (see `tape_playback`). Host code may create tensors only by this module's
`empty`, `launch` and `apply`; otherwise the call is not recorded and the host code runs each time.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir import op_providers
from . import launch as launching
from .tape_playback import Address, Allocate, Apply, Free, Launch, Playback, Step, offset_pointer, replace_base

_state = threading.local()  # the backward runs in autograd's threads
_tapes: dict[Hashable, Tape] = {}
_MAX_TAPES = 8192  # each number of exchanged rows has its own tapes


class Tape:
    """One recorded call.

    Each tensor has a register, numbered from the inputs over the constants to the allocations in order. A pointer is a
    register with an offset in bytes.

    Args:
        inputs: tensors that a replay replaces by others with equal shapes and strides. None for a missing one.
        constants: tensors whose addresses are part of the signature, such as parameters. The tape does not keep them
            alive.
    """

    def __init__(self, inputs: Sequence[Tensor | None], constants: Sequence[Tensor]):
        self.steps: list[Step] = []
        self.playback: Playback | None = None
        self.results: list[int] = []
        self.weight_paths: Counter[str] = Counter()  # how weights were read (see `ir.op_providers`), without `apply`
        self.free_watchers: list[Any] = []  # weak references that record the end of a tensor, until `finish`
        self.num_registers = 0
        # Storage (of an empty tensor: its id) -> registers, while it lives.
        self.registers_by_storage: dict[int, list[int]] = {}
        # Register -> address, dtype, shape and strides of its tensor.
        self.form_by_register: dict[int, tuple[Any, ...]] = {}
        # Storage of a constant -> tensor to keep alive, if any.
        self.constants_by_storage: dict[int, Tensor | None] = {}
        self.is_playable = True
        for tensor in inputs:
            if tensor is not None and tensor.numel():
                # With two views of one storage an address would be ambiguous.
                self.is_playable &= _storage(tensor) not in self.registers_by_storage
            self._add(tensor)
        for tensor in constants:
            self.is_playable &= (
                _storage(tensor) not in self.registers_by_storage or _storage(tensor) in self.constants_by_storage
            )
            self._add(tensor)
            self.constants_by_storage[_storage(tensor)] = None

    def _add(self, tensor: Tensor | None) -> int:
        register, self.num_registers = self.num_registers, self.num_registers + 1
        if tensor is not None:
            self.registers_by_storage.setdefault(_storage(tensor), []).append(register)
            self.form_by_register[register] = _describe_tensor(tensor)
        return register

    def _source(self, tensor: Tensor) -> tuple[int, Any] | None:
        """Return the register that holds a tensor or its base, and the tensor's view of that.

        The view is (shape, strides, offset in elements from the register's tensor), or None for the register's tensor
        itself. Returns None if no register holds the tensor's storage.
        """
        registers, form = self.registers_by_storage.get(_storage(tensor), ()), _describe_tensor(tensor)
        for register in registers:
            if self.form_by_register[register] == form:
                return register, None
        for register in registers:
            address, dtype, *_ = self.form_by_register[register]
            if dtype is tensor.dtype:
                distance = (tensor.data_ptr() - address) // tensor.element_size()
                return register, (tensor.shape, tensor.stride(), distance)
        return None

    def record_tensor(self, tensor: Tensor, make: Callable[[int], Step]) -> None:
        """Record a new tensor.

        Args:
            make: returns the step that creates it in a register.
        """
        register, key = self._add(tensor), _storage(tensor)
        steps, registers_by_storage = self.steps, self.registers_by_storage
        steps.append(make(register))

        def freed(_: Any) -> None:
            registers_by_storage.pop(key, None)
            steps.append(Free(register))

        self.free_watchers.append(weakref.ref(tensor, freed))

    def record_constant(self, tensor: Tensor) -> None:
        self.constants_by_storage[_storage(tensor)] = tensor

    def record_apply(self, tensor: Tensor, function: Callable[..., Tensor], sources: Sequence[Tensor]) -> None:
        registers = tuple(map(self._source, sources))
        self.is_playable &= None not in registers
        self.record_tensor(tensor, lambda register: Apply(register, function, registers))

    def record_launch(self, run: Callable[..., Any], args: Sequence[Any]) -> None:
        template, pointers, descriptors = list(args), [], []
        for i, argument in enumerate(args):
            tensor = launching.unwrap_descriptor(argument)
            if not isinstance(tensor, Tensor):
                continue
            storage = _storage(tensor)
            if storage in self.constants_by_storage:
                template[i] = (
                    offset_pointer(tensor, 0) if argument is tensor else replace_base(argument, Address.of(tensor))
                )
                continue
            if storage not in self.registers_by_storage:
                self.is_playable = False
                return
            register = self.registers_by_storage[storage][-1]
            offset = tensor.data_ptr() - self.form_by_register[register][0]
            if argument is tensor:
                template[i] = None
                pointers.append((i, register, offset))
            else:
                template[i] = None
                descriptors.append((i, register, offset, replace_base(argument, None)))
        self.steps.append(Launch(run, template, tuple(pointers), tuple(descriptors)))

    def finish(self, results: Sequence[Tensor]) -> bool:
        """Finish the recording. Returns whether the tape can be replayed."""
        for tensor in results:
            register, view = self._source(tensor) or (0, ())
            if view is not None:
                self.is_playable = False
                break
            self.results.append(register)
        self.free_watchers = []
        if self.is_playable:  # from a copy: the callbacks of later frees append to the list
            self.playback = Playback(list(self.steps), self.results, self.num_registers)
        return self.is_playable

    def play(self, inputs: Sequence[Tensor | None], constants: Sequence[Tensor]) -> list[Tensor]:
        assert self.playback is not None
        return self.playback.play(inputs, constants)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


def _describe_tensor(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, recorded on the tape."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if (tape := getattr(_state, "tape", None)) is not None:
        tape.record_tensor(tensor, lambda register: Allocate(register, shape, dtype, device))
    return tensor


def apply(function: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """`function(*sources)`, recorded on the tape.

    Args:
        function: returns a new tensor.
        sources: inputs, constants, or tensors of `empty` and `apply`.
    """
    before = op_providers.thread_weight_paths()
    tensor = function(*sources)
    if (tape := getattr(_state, "tape", None)) is not None:
        tape.record_apply(tensor, function, sources)
        tape.weight_paths.subtract(op_providers.thread_weight_paths() - before)  # a replay counts them itself
    return tensor


def mark_constant(tensor: Tensor) -> Tensor:
    """Mark a tensor that the host code would compute equally in all calls of the signature."""
    if (tape := getattr(_state, "tape", None)) is not None:
        tape.record_constant(tensor)
    return tensor


def launch(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], **options: int
) -> None:
    """`launch.launch`, recorded on the tape."""
    run = launching.launch(kernel, grid, args, constants, **options)
    if (tape := getattr(_state, "tape", None)) is not None:
        tape.record_launch(run, args)


@contextlib.contextmanager
def recording(tape: Tape | None) -> Iterator[None]:
    before, _state.tape = getattr(_state, "tape", None), tape
    try:
        yield
    finally:
        _state.tape = before


def pause_recording() -> contextlib.AbstractContextManager[None]:
    """Do not record inside of this context."""
    return recording(None)


def replay_or_record(
    key: Hashable,
    inputs: Sequence[Tensor | None],
    constants: Sequence[Tensor],
    host_code: Callable[[], list[Tensor]],
    variable_length: Collection[int] = (),
) -> list[Tensor]:
    """Replay the tape of an earlier call with the same signature, or run `host_code` and record it.

    Args:
        key: all values other than tensors that the host code depends on.
        inputs, constants: see `Tape`.
        host_code: launches the kernels and returns the results.
        variable_length: indices of inputs whose first size may vary between replays.
    """
    forms = [_input_key(t, variable_length=i in variable_length) for i, t in enumerate(inputs)]
    key = (key, *forms, tuple(map(_constant_key, constants)))
    assert inputs[0] is not None
    with launching.use_device(inputs[0].device):
        if launching.are_launches_skipped():
            return host_code()
        tape = _tapes.get(key)
        if tape is not None:
            for path, times in tape.weight_paths.items():
                op_providers.count_weight_path(path, times)
            return tape.play(inputs, constants)
        tape = Tape(inputs, constants)
        if not tape.is_playable:
            return host_code()
        before = op_providers.thread_weight_paths()
        with recording(tape):
            results = host_code()
        if tape.finish(results):
            tape.weight_paths.update(op_providers.thread_weight_paths() - before)
            if len(_tapes) >= _MAX_TAPES:
                for old_key in list(_tapes)[: _MAX_TAPES // 2]:
                    _tapes.pop(old_key, None)  # another thread may have removed it
            _tapes[key] = tape
        return results


def _input_key(tensor: Tensor | None, variable_length: bool) -> Hashable:
    if tensor is None:
        return None
    shape = tensor.shape[1:] if variable_length else tensor.shape
    return shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0


def _constant_key(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
