"""MoE regions in flat FX graphs: of Dynamo, of `torch.export`, of `make_fx`, or written by hand.

A graph has no modules. What a module is to `moefx.compile` is here a *region*: the nodes between a tensor of rows, the
*entry*, and the tensor in which the routed results have come together, the *exit*. A region becomes a module again, and
from there on everything is the pipeline that blocks go through: the same capture, the same lifter, the same passes.

    nodes      what a single node says
    values     what nodes give, where their graph does not say
    facts      what is known of each node in its graph: its value, what it follows from, through memory too,
               grad mode and autocast
    extents    from a node that selects (`topk`, `sort`, a comparison) to entry and exit, by dominance alone
    dims       the token dims of a region, and what a number of the graph is over them
    sizes      the numbers in a region as expressions over its token dims: a program for all sizes, of which the graph
               is one. Whether each number is taken for what it was meant is no question of correctness: the proof is of
               that program, and at the sizes of the graph that is the graph.
    isolation  whether a region can be taken out; names: what it and its weights are called
    region     the program as a module, with the weights as its parameters, to be proven; and as a module that is
               called with them, which stands in the graph
    parts      rows that are cut into parts, of which a graph has a fixed number
    matching   one proof for all equal regions, kept for the process
    prepare    graphs of tracers as the search takes them
    splice     the graph with a call in the place of each region
    rewriting  all of that

`moefx.frontends.dynamo.backend` hands it to users: `moefx.rewrite_graph`, and `torch.compile(model, backend="moefx")`. Files import
those above them only.
"""
