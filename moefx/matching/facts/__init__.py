"""Questions about the nodes of a capture, which the lift, probes and results ask.

op_classes.py         sets of ATen operations, by their effect on the elements of a tensor
graph_nodes.py        the op, line and axis of a node, and the inputs that an integer depends on
host_comparisons.py   the comparison whose result Python reads
integer_ranges.py     the range of an integer under any routing, by `range_arithmetic.py`
integer_paths.py      integers of a call, followed through the ops that depend on them
token_functions.py    numbers that follow from the choices of single tokens
load_statistics.py    functions of the experts' loads, such as the number of idle experts
count_limits.py       limits that counts and ranks are compared with
zero_sum_tests.py     tests whether an expert's rows or weights sum to zero
guarded_sizes.py      sizes of captures at which guards hold
"""
