"""Explain regions that a loop splits into chunks of rows. A graph holds the iterations of its own size only."""

from __future__ import annotations

import math
import operator
from collections import defaultdict

import torch
from torch import fx

from ...errors import Refused
from ...ir.node_values import get_op_name
from .graph_analysis import GraphAnalysis
from .node_queries import find_user_sources, get_size_hint, is_hinted
from .region_bounds import RegionBounds

_CHUNKING_OPS = {"split", "split_with_sizes", "chunk", "tensor_split", "unbind"}


def explain_chunks(analysis: GraphAnalysis, bounds: RegionBounds) -> Refused | None:
    """Return the refusal of a region that splits its rows into chunks, or None if it does not."""
    sizes = analysis.value[bounds.entry].shape[:-1]
    if not all(map(is_hinted, sizes)):
        return None
    tokens = math.prod(map(get_size_hint, sizes))
    chunks_by_source: dict[tuple, list[fx.Node]] = defaultdict(list)
    for n in bounds.inside:
        rows = analysis.tensor(n.args[0]) if n.args and isinstance(n.args[0], fx.Node) else None
        if rows is None or rows.dim() < 2 or not all(map(is_hinted, rows.shape)):
            continue
        if math.prod(map(get_size_hint, rows.shape[:-1])) != tokens:
            continue
        if get_op_name(n) in _CHUNKING_OPS and isinstance(parts := analysis.value[n], (tuple, list)):
            if parts[0].shape[-1] == rows.shape[-1]:
                return _refuse_chunks(analysis, n, len(parts))
        elif get_op_name(n) in ("getitem", "slice") and _is_range(n, rows, analysis.tensor(n)):
            chunks_by_source[n.args[0], find_user_sources(n, analysis.position[n])].append(n)
    for chunks in chunks_by_source.values():
        lengths = [get_size_hint(analysis.value[n].shape[0]) for n in chunks]
        if len(chunks) > 1 and sum(lengths) == tokens and len({*lengths[:-1]}) == 1:
            return _refuse_chunks(analysis, chunks[0], len(chunks))
    return None


def _is_range(n: fx.Node, rows: torch.Tensor, part: torch.Tensor | None) -> bool:
    """Return whether a node takes a contiguous range of rows."""
    index = n.args[1] if n.target is operator.getitem else None
    first = index[0] if isinstance(index, tuple) and index else index
    if part is None or part.dim() != rows.dim() or not all(map(is_hinted, part.shape)):
        return False
    (length, *width), (num_rows, *row_shape) = ([get_size_hint(s) for s in t.shape] for t in (part, rows))
    return width == row_shape and length != num_rows and (isinstance(first, slice) or get_op_name(n) == "slice")


def _refuse_chunks(analysis: GraphAnalysis, n: fx.Node, count: int) -> Refused:
    return Refused(
        f"the rows are split into {count} chunks, and the graph does not hold the chunks of other sizes",
        culprits=(get_op_name(n),),
        source=analysis.find_source_line(n),
        remedy="compute them at once; or call moefx.compile(model), which supports loops over chunks",
    )
