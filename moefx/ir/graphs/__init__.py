"""The graph of a block, and its execution.

The files, in reading order:

    block_graph.py     `BlockGraph`: a graph, and how a call binds to it
    graph_levels.py    the operations that are legal after each pass
    graph_codegen.py   the Python function that runs a graph on the user's block
    op_joining.py      replaces consecutive dialect ops by one call of a `JoinedOps`
    joined_ops.py      `JoinedOps`: runs these ops as one autograd node
    graph_printer.py   prints a graph, one line per node, by the names of display_names.py
"""
