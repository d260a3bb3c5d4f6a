"""The frontend for flat FX graphs from Dynamo, `torch.export`, `make_fx`, or written by hand.

A graph has no modules. Its counterpart of a module is a *region*: the nodes between a tensor of rows, the *entry*, and
the tensor that sums the routed results, the *exit*. A region becomes a module, which takes the same steps as a block:
capture, matcher, passes. Each file imports only files above it in this list.

    node_queries      op, arguments and source lines of a single node
    abstract_values   shapes and dtypes of nodes, if the graph does not give them
    graph_analysis    facts about each node in its graph: value, dependencies (through memory, too), grad mode, autocast
    region_bounds     from a node that selects (`topk`, `sort`, a comparison) to entry and exit, by dominance alone
    token_dims        the token dims of a region, and sizes as functions of them
    generalize        the numbers of a region as expressions over its token dims. A wrong guess about a number is
                      harmless: the proof is of the generalised program, which equals the graph at the graph's sizes.
    region_isolation  checks that a region can be taken out of its graph
    region_names      names of regions and weights: those of the user's modules, else line and role
    region_module     a region as a module with its weights as parameters, and as a module that is called with them
    chunking          loops over chunks of rows, which the graph holds unrolled
    proof_cache       one proof for equal regions, kept for the process
    normalize         graphs of tracers in the form that the search expects
    splice            the graph with a call in the place of each region
    graph_rewrite     all of these in order

`moefx.rewrite_graph` and `torch.compile(model, backend="moefx")` are in `frontends/dynamo/backend.py`.
"""
