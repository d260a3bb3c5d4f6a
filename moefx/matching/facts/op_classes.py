"""Sets of ATen operations, by their effect on the elements of a tensor. Each set is defined once.

Sets that differ have different names, and a comment says why. Members decide which nodes a proof follows, so a larger
set is not a safer one.
"""

from __future__ import annotations

from ...capture.tracing.op_sets import SHAPE_ONLY

# Comparisons of elements.
ORDERED = {"lt", "le", "gt", "ge"}
TWO_SIDED = {*ORDERED, "eq", "ne"}
COMPARISONS = {*TWO_SIDED, "greater"}  # also by an alias that stays in the graph

# Moves: the elements keep their values.
COPIES = {"_to_copy", "clone", "detach"}
RESHAPES = {"flatten", "reshape", "view"}
RESHAPED_COPIES = {*COPIES, *RESHAPES, "_unsafe_view", "contiguous"}  # the same elements in the same order
FLAT_MOVES = {*COPIES, *RESHAPES, "squeeze", "unsqueeze"}  # also with axes of 1: one mask stays one mask
VIEWS = {*FLAT_MOVES, "_unsafe_view", "alias", "expand", "permute", "select", "slice", "transpose"}  # of one tensor
# ops allowed between two conversions of a dtype
AXIS_MOVES = VIEWS - {"_unsafe_view", "alias", "flatten", "slice", "transpose"}
# also ops on several tensors
ELEMENT_MOVES = {*VIEWS, "cat", "flip", "index_select", "repeat", "stack", "t"} - {"flatten"}
# All elements are one number.
FILLS = {name for kind in ("ones", "zeros", "full") for name in (kind, f"{kind}_like", f"new_{kind}")}
# As large as another tensor, with no computed numbers.
NEW_TENSORS = {"_to_copy", "clone", "where", "zero", *(op.overloadpacket.__name__ for op in SHAPE_ONLY)}

# Lookups: elements of a tensor by integers.
LOOKUPS = {"embedding", "gather", "index", "index_select", "take"}  # `graph_nodes.find_lookups` has their axes
SEARCHES = {"bucketize", "searchsorted"}
INDEXED_WRITES = {
    "index_add", "index_copy", "index_fill", "index_put", "scatter", "scatter_add", "scatter_with_reduce",
}  # fmt: skip
PICKS = {"gather", "getitem", "index", "index_select", "sort", "topk"}  # results are elements of the tensor

# Clamps: the result is an operand, except at the bounds.
UPPER_CLAMPS = {"clamp", "clamp_max", "minimum", "remainder"}
CLAMPS = {*UPPER_CLAMPS, "clamp_min", "maximum"}
BIT_MASKS = {"bitwise_and", "__and__"}
COUNT_CLAMPS = {*UPPER_CLAMPS, *BIT_MASKS, "fmod"}  # clamps of numbers that only grow
# The result may equal an operand, also one of negative numbers or of bits.
SATURATING = {*CLAMPS, *BIT_MASKS, "abs", "bitwise_or", "fmod", "relu", "__or__"}

# Reductions.
REDUCTIONS = {"amax", "any", "count_nonzero", "sum"}
MASK_REDUCTIONS = {*REDUCTIONS, "max"}  # reductions of booleans
SIZE_REDUCTIONS = {*REDUCTIONS, "linalg_vector_norm"}  # reductions of floats: zero if all are zero
AXIS_REDUCTIONS = {"sum", "cumsum", "any", "amax"}  # their number arguments are axes

# Arithmetic.
NEGATIONS = {"bitwise_not", "logical_not"}
CONTRACTIONS_OF_ROWS = {"addmm", "bmm", "linear", "matmul", "mm"}
PRODUCTS = {"bmm", "dot", "mm", "mul", "mv"}  # zero if an operand is zero
NOT_NEGATIVE = {"_softmax", "abs", "exp", "linalg_vector_norm", "relu", "sigmoid", "softplus", "square"}
CLOSED_ON_INTEGERS = {"sub", "mul", "bitwise_and", "bitwise_or"}
MONOTONE = {
    "add", "sum", "clamp", "maximum", "minimum", "logical_and", "logical_or", "any", "cumsum", "amax", "max",
}  # fmt: skip
NOT_COUNT_PRESERVING = {  # the result for a count is no count
    "pow", "square", "sqrt", "rsqrt", "exp", "log", "reciprocal", "div", "floor_divide", "true_divide", "sign", "sgn",
    "neg", "abs", "remainder", "fmod", "tanh", "sigmoid", "rsub", "bitwise_right_shift", "__rshift__", "__lshift__",
}  # fmt: skip
INTEGER_FUNCTIONS = {"_to_copy", "all", "any", "bucketize", "floor_divide", "isin", "searchsorted"}  # not pointwise

# Other.
RANDOM_INTEGERS = {"randperm", "randint", "multinomial"}
RECURRENCES = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
