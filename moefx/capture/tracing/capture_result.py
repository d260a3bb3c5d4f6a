"""The result of a capture: the graph of one run of a block, with all that the run read, called and changed.

`capture_block` returns a `Capture`. The proof reads guards, forced outcomes and refusals from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import Refused
from ..environment.code_locations import Source
from ..sizes.size_guards import SizeLog

if TYPE_CHECKING:
    from ..emptiness.idle_tests import EmptinessTests
    from .concrete_routing import Routing
    from .host_reads import Interventions

# Force mixed outcomes, element by element: both outcomes of a comparison, an integer or one more. Choices select among
# arbitrary numbers.
FORCE_MIXED = "mixed"
# Force a value to vary that was constant although it follows from integers: a number becomes itself, one more, or zero;
# a choice selects among other numbers; a boolean has both values.
FORCE_VARIED = "varied"
LAYOUT = "layout"  # among `modes_read`: the program asks whether a tensor is contiguous, or for its strides


@dataclasses.dataclass
class SubmoduleCall:
    """One call of a submodule of the block: its arguments and results as nodes, and the range of nodes inside it."""

    fqn: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    start: int
    stop: int
    depth: int
    autocast: torch.dtype | None = None


@dataclasses.dataclass
class Effect:
    """A change that the block makes besides returning a value.

    Attributes:
        kind: "buffer", "input", "attribute" (set to a tensor, or to a container of tensors), "state" (set to anything
            else), "record" (in an object that the block does not own) or "draw" (from a random generator of Python's).
        node: the new value; for an attribute that is a container, the container with nodes for its tensors.
        source: for a record, the line that computes a new tensor in it; "" if it has none.
    """

    kind: str
    target: Any
    node: Any
    source: str = ""


@dataclasses.dataclass(frozen=True)
class HostRead:
    """A boolean or a float that Python read from a tensor. A branch may depend on it, and the capture took one side.

    Attributes:
        call_stack: the user's code that reads, the innermost location first.
        node: the value; None for the number of rows of a tensor.
        comparison: the operator and the other operand, if `node` is a number that Python compares.
        origins: the nodes that a number was computed from, if it is not `node` itself.
    """

    call_stack: tuple[Source, ...]
    value: bool | float | str
    node: fx.Node | None
    comparison: tuple[str, Any] | None = None
    origins: frozenset[fx.Node] = frozenset()

    @property
    def source(self) -> Source:
        return self.call_stack[0] if self.call_stack else Source("?", 0, 0)


@dataclasses.dataclass(frozen=True)
class LimitedOutcome:
    """Force a boolean that Python reads a limited number of times. A loop such as `while places < n: places *= 2` would
    otherwise never end.

    Attributes:
        value: the forced outcome.
        num_reads: number of reads to force.
        compared_with: force only comparisons with these numbers; empty: all comparisons.
    """

    value: bool
    num_reads: int
    compared_with: frozenset[int | float] = frozenset()


@dataclasses.dataclass
class Capture:
    """A captured block.

    Attributes:
        routing, interventions: how the block was captured, as `capture_block` takes them.
        graph: functional. The `meta` of its nodes is a `CaptureMeta`.
        nodes: those of the graph, in order.
        out: the result, with nodes for tensors.
        calls: the calls of submodules, in the order of their ends.
        effects: the changes that the block made.
        reads: booleans and floats that Python read from tensors, in order.
        plain_reads: integers that Python read from tensors, by the user's call stack.
        emptiness_tests: tests for experts without tokens.
        sizes: the comparisons of sizes.
        constants: tensors of the program that are neither inputs nor parameters, by name.
        refusals: reasons to refuse the block, in the order of their discovery.
        modes_read: modes that the block read, such as `training`.
        fake_mode: the mode of the abstract tensors.
        compute_value: computes the value of a node under the routing.
        computed: results of `compute_once`, by name.
    """

    routing: Routing
    interventions: Interventions
    graph: fx.Graph
    nodes: list[fx.Node]
    out: Any
    calls: list[SubmoduleCall]
    effects: list[Effect]
    reads: list[HostRead]
    plain_reads: dict[tuple[Source, ...], list[Any]]
    emptiness_tests: EmptinessTests
    sizes: SizeLog
    constants: dict[str, torch.Tensor]
    refusals: list[Refused]
    modes_read: set[str]
    fake_mode: FakeTensorMode
    compute_value: Callable[[fx.Node], torch.Tensor]
    computed: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def concrete_value(self, node: fx.Node) -> torch.Tensor:
        """Return the value of a node under the routing of this capture."""
        return self.compute_value(node)

    def compute_once(self, name: Any, compute: Callable[[], Any]) -> Any:
        """Return the result of `compute`, cached under a name."""
        if name not in self.computed:
            self.computed[name] = compute()
        return self.computed[name]
