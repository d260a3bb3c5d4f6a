"""The graph of a block as capture sees it, before any rewriting: the first picture of the report."""

from __future__ import annotations

from torch import fx, nn

from moefx.capture.block_arguments import Arguments
from moefx.capture.concrete_routing import Routing
from moefx.ir.block_graph import BlockGraph
from moefx.matching.proof_state import ProofState


def captured_graph(block: nn.Module, name: str, args: tuple, kwargs: dict, num_experts: int) -> BlockGraph:
    """The functional ATen graph of one call under one invented routing in which every expert is chosen.

    Args:
        args, kwargs: the arguments of a call; of floats only the shapes matter.
    """
    arguments = Arguments(args, kwargs)
    taken = ProofState(block, arguments, num_experts).capture(
        Routing("diverse"), arguments.choose_sizes(max(29, num_experts // 2), 0)
    )
    graph, copies = fx.Graph(), {}
    for node in taken.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].target = node.meta.get("fqn", node.target)  # the capture's own names have no dots
    graph.output(fx.map_arg(taken.out, copies.__getitem__))
    graph.eliminate_dead_code()
    return BlockGraph(name, graph)
