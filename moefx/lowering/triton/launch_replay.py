"""Record the launches of a call and replay them: they depend on shapes and addresses, not on values.

The host code of a call (checks, configurations, strides, descriptors) takes longer than a small MoE layer on the GPU.
`replay_or_record` runs it once for each signature and records its allocations, launches and frees on a tape. Later
calls replay the tape with their own tensors. Host code may create tensors only by this module's `empty`, `launch` and
`apply`; otherwise the call is not recorded and the host code runs each time.
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

_state = threading.local()  # the backward runs in autograd's threads
_tapes: dict[Hashable, Tape] = {}
_MAX_TAPES = 1024


class Tape:
    """One recorded call.

    Tensors have slots: the inputs, the constants, then each allocation. A pointer is a slot with an offset in bytes.

    Args:
        inputs: tensors that a replay replaces by others with equal shapes and strides. None for a missing one.
        constants: tensors whose addresses are part of the signature, such as parameters. The tape does not keep them
            alive.
    """

    def __init__(self, inputs: Sequence[Tensor | None], constants: Sequence[Tensor]):
        self.steps: list[tuple[Any, ...]] = []
        self.results: list[int] = []
        self.weight_paths: Counter[str] = Counter()  # how weights were read (see `ir.op_providers`), without `apply`
        self.watched: list[Any] = []  # weak references that record when a tensor is freed, until `finish`
        self.num_slots = 0
        self.slots_of: dict[int, list[int]] = {}  # storage (of an empty tensor: its id) -> slots, while it lives
        self.form_of: dict[int, tuple[Any, ...]] = {}  # slot -> address, dtype, shape and strides of its tensor
        self.fixed: dict[int, Tensor | None] = {}  # storage of a constant -> tensor to keep alive, if any
        self.playable = True
        for tensor in inputs:
            if tensor is not None and tensor.numel():
                # With two views of one storage an address would be ambiguous.
                self.playable &= _storage(tensor) not in self.slots_of
            self._add(tensor)
        for tensor in constants:
            self.playable &= _storage(tensor) not in self.slots_of or _storage(tensor) in self.fixed
            self._add(tensor)
            self.fixed[_storage(tensor)] = None

    def _add(self, tensor: Tensor | None) -> int:
        slot, self.num_slots = self.num_slots, self.num_slots + 1
        if tensor is not None:
            self.slots_of.setdefault(_storage(tensor), []).append(slot)
            self.form_of[slot] = _exact_form(tensor)
        return slot

    def _source(self, tensor: Tensor) -> tuple[int, Any] | None:
        """Return the slot of a tensor, and its view of the slot.

        The view is (shape, strides, offset in elements from the slot's start), or None for the slot's tensor itself.
        Returns None if the tensor belongs to no slot.
        """
        slots, form = self.slots_of.get(_storage(tensor), ()), _exact_form(tensor)
        for slot in slots:
            if self.form_of[slot] == form:
                return slot, None
        for slot in slots:
            address, dtype, *_ = self.form_of[slot]
            if dtype is tensor.dtype:
                distance = (tensor.data_ptr() - address) // tensor.element_size()
                return slot, (tensor.shape, tensor.stride(), distance)
        return None

    def record_tensor(self, tensor: Tensor, *step: Any) -> None:
        """Record a new tensor, which `step` creates. The step gets the slot as its first argument."""
        slot, key = self._add(tensor), _storage(tensor)
        steps, slots_of = self.steps, self.slots_of
        steps.append((step[0], slot, *step[1:]))

        def freed(_: Any) -> None:
            slots_of.pop(key, None)
            steps.append((_free, slot))

        self.watched.append(weakref.ref(tensor, freed))

    def record_constant(self, tensor: Tensor) -> None:
        self.fixed[_storage(tensor)] = tensor

    def record_apply(self, tensor: Tensor, function: Callable[..., Tensor], sources: Sequence[Tensor]) -> None:
        found = tuple(map(self._source, sources))
        self.playable &= None not in found
        self.record_tensor(tensor, _apply, function, found)

    def record_launch(self, run: Callable[..., Any], args: Sequence[Any]) -> None:
        template, pointers, descriptors = list(args), [], []
        for i, argument in enumerate(args):
            tensor = launching.underlying_tensor(argument)
            if not isinstance(tensor, Tensor):
                continue
            storage = _storage(tensor)
            if storage in self.fixed:
                template[i] = _pointer(tensor, 0) if argument is tensor else _rebase(argument, _Address.of(tensor))
                continue
            if storage not in self.slots_of:
                self.playable = False
                return
            slot = self.slots_of[storage][-1]
            offset = tensor.data_ptr() - self.form_of[slot][0]
            if argument is tensor:
                template[i] = None
                pointers.append((i, slot, offset))
            else:
                template[i] = None
                descriptors.append((i, slot, offset, _rebase(argument, None)))
        self.steps.append((_launch, run, template, tuple(pointers), tuple(descriptors)))

    def finish(self, results: Sequence[Tensor]) -> bool:
        """Finish the recording. Returns whether the tape can be replayed."""
        for tensor in results:
            slot, view = self._source(tensor) or (0, ())
            if view is not None:
                self.playable = False
                break
            self.results.append(slot)
        self.steps = list(self.steps)  # the callbacks of later frees append to the old list
        self.watched = []
        return self.playable

    def play(self, inputs: Sequence[Tensor | None], constants: Sequence[Tensor]) -> list[Tensor]:
        tensors: list[Any] = [*inputs, *constants]
        tensors += [None] * (self.num_slots - len(tensors))
        for step, *rest in self.steps:
            step(tensors, *rest)
        return [tensors[slot] for slot in self.results]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


def _exact_form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class _Address:
    """A tensor's address for a descriptor, without keeping the tensor alive."""

    def __init__(self, address: int):
        self.address = address

    @classmethod
    def of(cls, tensor: Tensor) -> Any:
        return tensor if launching.INTERPRETED else cls(tensor.data_ptr())

    def data_ptr(self) -> int:
        return self.address


def _rebase(like: Any, base: Any) -> Any:
    """Return a copy of a tensor descriptor with another base."""
    descriptor = object.__new__(type(like))  # skip the checks, which the recorded one passed
    descriptor.__dict__.update(like.__dict__, base=base)
    return descriptor


def _allocate(tensors: list[Any], slot: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    tensors[slot] = torch.empty(shape, dtype=dtype, device=device)


def _free(tensors: list[Any], slot: int) -> None:
    tensors[slot] = None


def _launch(
    tensors: list[Any],
    run: Callable[..., Any],
    template: list[Any],
    pointers: Sequence[Any],
    descriptors: Sequence[Any],
) -> None:
    args = template.copy()
    for i, slot, offset in pointers:
        args[i] = _pointer(tensors[slot], offset)
    for i, slot, offset, like in descriptors:
        tensor = tensors[slot]
        if offset or launching.INTERPRETED:
            start = tensor.storage_offset() + offset // tensor.element_size()
            tensor = tensor.as_strided(like.shape, like.strides, start)
        args[i] = _rebase(like, tensor)
    run(*args)


def _pointer(tensor: Tensor, offset: int) -> Any:
    """Return the address at an offset, which kernels accept as a tensor. For the interpreter, a tensor that begins
    there."""
    if launching.INTERPRETED and tensor.numel() == 0:
        return tensor
    if launching.INTERPRETED:
        return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset // tensor.element_size())
    return tensor.data_ptr() + offset


def _apply(tensors: list[Any], slot: int, function: Callable[..., Tensor], sources: Sequence[Any]) -> None:
    tensors[slot] = function(*(_apply_view(tensors[source], view) for source, view in sources))


def _apply_view(tensor: Tensor, view: Any) -> Tensor:
    if view is None:
        return tensor
    shape, strides, distance = view
    return tensor.as_strided(shape, strides, tensor.storage_offset() + distance)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty`, recorded on the tape."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if (tape := getattr(_state, "tape", None)) is not None:
        tape.record_tensor(tensor, _allocate, shape, dtype, device)
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
    """Mark a tensor of the host code as equal in all calls of the signature."""
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
    of_any_length: Collection[int] = (),
) -> list[Tensor]:
    """Replay the tape of an earlier call with the same signature, or run `host_code` and record it.

    Args:
        key: everything that the host code depends on, except for the tensors.
        inputs, constants: see `Tape`.
        host_code: launches the kernels and returns the results.
        of_any_length: indices of inputs whose first size may vary between replays.
    """
    forms = [_input_key(t, of_any_length=i in of_any_length) for i, t in enumerate(inputs)]
    key = (key, *forms, tuple(map(_constant_key, constants)))
    assert inputs[0] is not None
    with launching.use_device(inputs[0].device):
        tape = _tapes.get(key)
        if tape is not None:
            for path, times in tape.weight_paths.items():
                op_providers.count_weight_path(path, times)
            return tape.play(inputs, constants)
        tape = Tape(inputs, constants)
        if not tape.playable:
            return host_code()
        before = op_providers.thread_weight_paths()
        with recording(tape):
            results = host_code()
        if tape.finish(results):
            tape.weight_paths.update(op_providers.thread_weight_paths() - before)
            if len(_tapes) >= _MAX_TAPES:
                _tapes.clear()
            _tapes[key] = tape
        return results


def _input_key(tensor: Tensor | None, of_any_length: bool) -> Hashable:
    if tensor is None:
        return None
    shape = tensor.shape[1:] if of_any_length else tensor.shape
    return shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16 == 0


def _constant_key(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
