"""`capture_step`: run a training step as one CUDA graph.

A step of small kernels is bound by the host. A graph holds all launches of a step, collectives included, and replays
them with one call. `torch.cuda.graph` leaves the rest to its caller: static inputs, eager steps before the capture,
which create the optimizer's state, and the end, because `destroy_process_group` waits for graphs that hold NCCL.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils import _pytree as pytree

from ..errors import InvalidInput, MoefxError

P = ParamSpec("P")
R = TypeVar("R")


def capture_step(step: Callable[P, R], *, warm_up: int = 3) -> CapturedStep[P, R]:
    """Return a function that runs a training step as one CUDA graph, from its call number `warm_up + 1` on.

    Each call trains: the first ones run `step` eagerly, the next one captures it, and all later ones replay it::

        def train(x, target):
            loss = loss_fn(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = moefx.capture_step(train)
        for x, target in batches:
            loss = step(x, target)

    A graph repeats kernels, not Python. In a captured step nothing may read a value on the host (`loss.item()`), the
    optimizer must be capturable (`AdamW(..., capturable=True)`), and numbers of Python keep the values that they had,
    apart from a learning rate that is a tensor on the GPU. Other Python code, such as a step counter, runs only in the
    eager and captured calls. Blocks over several ranks need `Plan(dispatch="gather", max_tokens=...)`.

    Args:
        step: runs forward, backward and optimizer on the current device. Its arguments and results are trees of tensors
            and other values.
        warm_up: the number of eager calls, at least 1: they create the optimizer's state. All ranks use the same.

    Returns:
        A `CapturedStep`. It frees its graph when it is deleted, by `free()`, and before a process group ends.

    Raises:
        InvalidInput: `warm_up` is less than 1, or torch finds no GPU. The captured call raises it if the step cannot be
            captured; other errors of the step propagate. Later calls raise it if their arguments differ from the
            captured ones in more than values of tensors on the GPU, or if an option of an optimizer changed.
    """
    if warm_up < 1:
        raise InvalidInput(f"warm_up is {warm_up}: at least one eager step must create the optimizer's state")
    if not torch.cuda.is_available():
        raise InvalidInput(
            "capture_step needs a GPU: a CUDA graph holds launches of kernels. On a CPU call the step itself"
        )
    return CapturedStep(step, warm_up)


class CapturedStep(Generic[P, R]):
    """A training step that runs as one CUDA graph: see `capture_step`.

    Attributes:
        calls: the number of calls so far.
        is_captured: whether a call replays a graph.
    """

    def __init__(self, step: Callable[P, R], warm_up: int):
        self._step, self._warm_up = step, warm_up
        self._stream = torch.cuda.Stream()
        self._graph: _StepGraph | None = None
        self.calls, self.is_freed = 0, False

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step.

        Returns:
            The results of the step. Tensors are copies: a later call does not overwrite them.
        """
        if self.is_freed:
            raise InvalidInput(
                "the captured step was freed, by free() or because a process group ended: capture another"
            )
        leaves, tree = pytree.tree_flatten((args, kwargs))
        if self.calls < self._warm_up:
            result = self._run_eagerly(*args, **kwargs)
        else:
            if self._graph is None:
                self._graph = _StepGraph(self._step, leaves, tree, self._stream)
                _free_before_groups_end(self)
            result = self._graph.replay(leaves, tree)
        self.calls += 1
        return result

    def _run_eagerly(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step on the stream of the capture, where its memory will be."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._step(*args, **kwargs)
        current.wait_stream(self._stream)
        return result

    def free(self) -> None:
        """Wait for the device and free the graph and its memory. The results of calls stay."""
        graph, self._graph, self.is_freed = self._graph, None, True
        _captured.discard(self)
        _restore_shutdown()
        if graph is not None:
            graph.free()


class _StepGraph:
    """The graph of a step, with its inputs, results, and the options of the optimizers that it runs."""

    def __init__(self, step: Callable[..., Any], leaves: list[Any], tree: pytree.TreeSpec, stream: torch.cuda.Stream):
        _refuse_gradients(leaves)
        self.tree = tree
        self.inputs = [leaf.clone() if _is_on_gpu(leaf) else leaf for leaf in leaves]
        self.optimizers: list[Optimizer] = []
        self.graph = torch.cuda.CUDAGraph()
        args, kwargs = pytree.tree_unflatten(self.inputs, tree)
        failed: Exception | None = None
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self.optimizers.append(optimizer))
        torch.cuda.synchronize()
        try:
            # other threads, such as data loaders, may make calls that CUDA forbids in a capture
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                try:
                    self.results = step(*args, **kwargs)
                except Exception as error:
                    failed = error
                    raise
        except Exception as error:  # the end of the capture may raise another error, which hides the step's
            if failed is not None and not _is_capture_error(failed):
                raise failed  # noqa: B904 - as the step raised it
            cause = failed or error
            raise InvalidInput(
                f"the step cannot be captured as a CUDA graph: {type(cause).__name__}: {cause}. A captured step reads "
                "no value on the host (`.item()`, `print`, `if loss > ...`), copies nothing to or from the CPU, and "
                "has optimizers with capturable=True"
            ) from cause
        finally:
            hook.remove()
        self.expected = [_copy_host_value(leaf) for leaf in self.inputs]
        self.options = dict(self._read_options())

    def replay(self, leaves: list[Any], tree: pytree.TreeSpec) -> Any:
        if tree != self.tree:
            raise InvalidInput(
                f"the step was captured with arguments of the form {self.tree}, and is called with {tree}"
            )
        _refuse_gradients(leaves)
        for number, (captured_value, argument) in enumerate(zip(self.expected, leaves, strict=True)):
            if described := _describe_difference(captured_value, argument):
                raise InvalidInput(
                    f"argument {number} of the captured step {described}: a graph has the shapes and numbers of its "
                    "capture. Pad the batch, or call the step itself for this one"
                )
        self._check_options()
        with torch.no_grad():
            for captured_value, argument in zip(self.inputs, leaves, strict=True):
                if _is_on_gpu(captured_value):
                    captured_value.copy_(argument, non_blocking=True)
        self.graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self.results)

    def _check_options(self) -> None:
        options = dict(self._read_options())
        if options.keys() != self.options.keys():
            raise InvalidInput("an optimizer has other groups of parameters than in the capture: capture again")
        for name, value in self.options.items():
            if options[name] != value:
                raise InvalidInput(
                    f"{name} changed from {value} to {options[name]} since the capture, and the graph still uses "
                    f"{value}. Make it a tensor on the GPU "
                    '(`lr=torch.tensor(1e-3, device="cuda")`) and fill that, or capture again'
                )

    def _read_options(self) -> Iterator[tuple[str, Any]]:
        """Yield the numbers among the options of each group of parameters, those in tensors on the CPU, too: the graph
        holds their values."""
        for number, optimizer in enumerate(self.optimizers):
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, Tensor) and not value.is_cuda and value.numel() == 1:
                        value = value.item()
                    if isinstance(value, (bool, int, float, tuple)):
                        yield f"`{key}` of group {i} of optimizer {number} ({type(optimizer).__name__})", value

    def free(self) -> None:
        torch.cuda.synchronize()
        self.graph.reset()
        self.inputs, self.expected, self.results = [], [], None


def _refuse_gradients(leaves: Sequence[Any]) -> None:
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        raise InvalidInput(
            "an argument of the captured step requires a gradient, which would be that of a copy: detach it, or create "
            "the leaf inside of the step"
        )


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _copy_host_value(value: Any) -> Any:
    """Copy a tensor on the CPU or a NumPy array: the caller may fill it with other values, which no graph sees."""
    if isinstance(value, Tensor):
        return value if value.is_cuda else value.clone()
    return value.copy() if _is_numpy(value) else value


def _is_numpy(value: Any) -> bool:
    """Return whether a value is an array or a number of NumPy, which may be absent."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def _is_capture_error(error: Exception) -> bool:
    """Return whether an error of the step arises because a CUDA graph is being captured: torch, CUDA and the ops of
    this package say so."""
    return isinstance(error, (RuntimeError, MoefxError)) and "captur" in str(error).lower()


def _is_equal(captured_value: Any, argument: Any) -> bool:
    """Return whether two arguments on the CPU are equal: tensors of one shape and dtype, or other values. NaN equals
    NaN."""
    if isinstance(captured_value, Tensor):
        is_nan = (captured_value != captured_value) & (argument != argument)
        return torch.equal(captured_value, argument) or bool(((captured_value == argument) | is_nan).all())
    if captured_value is argument or type(captured_value) is not type(argument):
        return captured_value is argument
    if _is_numpy(captured_value):
        forms = [(value.shape, value.dtype, value.tobytes()) for value in (captured_value, argument)]
        return forms[0] == forms[1]
    return bool(captured_value == argument) or (captured_value != captured_value and argument != argument)


def _describe_difference(captured_value: Any, argument: Any) -> str:
    """Say how an argument differs from the captured one in more than the values of a tensor on the GPU; "" if not."""
    if not isinstance(captured_value, Tensor) or not isinstance(argument, Tensor):
        return (
            ""
            if _is_equal(captured_value, argument)
            else f"changed from {captured_value!r} to {argument!r} since the capture"
        )
    if captured_value.shape != argument.shape or captured_value.dtype != argument.dtype:
        captured_text, current_text = (
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (captured_value, argument)
        )
        return f"changed from {captured_text} to {current_text} since the capture"
    if captured_value.is_cuda != argument.is_cuda:
        return f"was on {captured_value.device} in the capture, and is on {argument.device} now"
    if not captured_value.is_cuda and not _is_equal(captured_value, argument):
        return "was on the CPU in the capture, and has other values now"
    return ""


# -- the end of process groups

_captured: weakref.WeakSet[CapturedStep[Any, Any]] = weakref.WeakSet()
# functions that replace `ProcessGroup.shutdown`, with the class attribute that each one replaced. The attribute is read
# statically: for a C++ method, `ProcessGroup.shutdown` is a function that would not become a method again
_replaced: weakref.WeakKeyDictionary[Callable[..., None], Any] = weakref.WeakKeyDictionary()


def _free_before_groups_end(step: CapturedStep[Any, Any]) -> None:
    """Free the graph of a step when a process group shuts down: NCCL waits for graphs that hold its communicators.

    This replaces `ProcessGroup.shutdown`, which `destroy_process_group` calls whatever name the caller imported. torch
    has no hook there. The method is put back when no captured step is left.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    _captured.add(step)
    shutdown = dist.ProcessGroup.shutdown
    if shutdown not in _replaced:

        def free_and_shutdown(group: dist.ProcessGroup) -> None:
            for captured in list(_captured):
                captured.free()
            shutdown(group)

        _replaced[free_and_shutdown] = inspect.getattr_static(dist.ProcessGroup, "shutdown")
        dist.ProcessGroup.shutdown = free_and_shutdown  # pyright: ignore[reportAttributeAccessIssue]
    weakref.finalize(step, _restore_shutdown)


def _restore_shutdown() -> None:
    """Put the method of process groups back, unless a captured step is left or other code has replaced it since."""
    if not list(_captured) and dist.is_available() and dist.ProcessGroup.shutdown in _replaced:
        dist.ProcessGroup.shutdown = _replaced[dist.ProcessGroup.shutdown]
