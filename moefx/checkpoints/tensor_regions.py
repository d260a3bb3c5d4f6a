"""Compute a part of a converted tensor from parts of its sources.

A conversion of transformers stacks, concatenates, splits and transposes tensors. `RecordedConversion` runs it once on
meta tensors and records the operations. `fill` then goes back from a region of a result to the regions of the sources,
and writes these into views of the caller's memory. So a rank reads its own experts only, and nothing else is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Region = tuple[tuple[int, int], ...]  # the first index, and the one after the last, of each dimension
Read = Callable[[str, Region, Tensor], None]  # writes a region of the source with this name into a tensor
Parts = Iterator[tuple[Tensor, Region, Tensor]]  # an input, its region, and the view of the output that it fills

aten = torch.ops.aten


class _Step(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int  # of the result, for an operation that returns several


class RecordedConversion:
    """The operations of one conversion.

    Args:
        convert: `convert(tensors)` returns the results by name.
        sources: shape and dtype of each source, by name. `convert` gets meta tensors.

    Attributes:
        results: meta tensors by name.

    Raises:
        Exception: whatever `convert` raises on meta tensors, such as for a decision that depends on values.
        NotImplementedError: `convert` writes into a tensor in place.
    """

    def __init__(
        self,
        convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
        sources: Mapping[str, tuple[Sequence[int], torch.dtype]],
    ):
        tensors = {
            name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, (shape, dtype) in sources.items()
        }
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._steps: dict[int, _Step] = {}
        self._alive: list[Any] = list(tensors.values())  # else a new tensor could have the id of an old one
        with torch.no_grad(), _Recorder(self._steps, self._alive):
            self.results = dict(convert(dict(tensors)))
        self._alive += self.results.values()

    def fill(self, out: Tensor, name: str, region: Region, read: Read) -> None:
        """Write a region of a result into `out`, which has the region's shape.

        Memory: results of operations other than stacking, cutting and transposing are computed whole, from their whole
        inputs. If `out` is a meta tensor, `read` is called with the same regions and meta tensors.
        """
        self._fill(out, self.results[name], region, read)

    def _fill(self, out: Tensor, value: Tensor, region: Region, read: Read) -> None:
        if not math.prod(out.shape):
            return
        if (name := self._names.get(id(value))) is not None:
            read(name, region, out)
            return
        step = self._steps[id(value)]
        rule = _RULES.get(step.func)
        if rule is not None:
            for source, part, view in rule(step, region, out):
                self._fill(view, source, part, read)
            return
        args, kwargs = tree_map_only(
            Tensor, lambda t: self._compute_whole(t, out.device, read), (step.args, step.kwargs)
        )
        result = step.func(*args, **kwargs)
        result = result[step.index] if isinstance(result, (tuple, list)) else result
        out.copy_(result[tuple(slice(*bounds) for bounds in region)])

    def _compute_whole(self, value: Tensor, device: torch.device, read: Read) -> Tensor:
        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        self._fill(whole, value, whole_region(value.shape), read)
        return whole


def whole_region(shape: Sequence[int]) -> Region:
    return tuple((0, size) for size in shape)


class _Recorder(TorchDispatchMode):
    """Records which operation made each tensor."""

    def __init__(self, steps: dict[int, _Step], alive: list[Any]):
        super().__init__()
        self.steps, self.alive = steps, alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise NotImplementedError(f"{func} writes into a tensor in place")
        result = func(*args, **(kwargs or {}))
        for index, output in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(output, Tensor):
                self.steps[id(output)] = _Step(func, args, kwargs or {}, index)
        self.alive.append((result, args, kwargs))
        return result


def _get_dim(step: _Step, position: int, rank: int, default: int = 0) -> int:
    dim = step.args[position] if len(step.args) > position else step.kwargs.get("dim", default)
    return dim % rank


def _replace(region: Region, dim: int, bounds: tuple[int, int]) -> Region:
    return (*region[:dim], bounds, *region[dim + 1 :])


def _stack(step: _Step, region: Region, out: Tensor) -> Parts:
    dim = _get_dim(step, 1, out.dim())
    first, end = region[dim]
    for index in range(first, end):
        yield step.args[0][index], (*region[:dim], *region[dim + 1 :]), out.select(dim, index - first)


def _cat(step: _Step, region: Region, out: Tensor) -> Parts:
    dim, offset = _get_dim(step, 1, out.dim()), 0
    first, end = region[dim]
    for source in step.args[0]:
        if source.dim() != out.dim():  # torch ignores an empty tensor [0]
            continue
        low, high = max(first, offset), min(end, offset + source.shape[dim])
        if low < high:
            yield source, _replace(region, dim, (low - offset, high - offset)), out.narrow(dim, low - first, high - low)
        offset += source.shape[dim]


def _split(step: _Step, region: Region, out: Tensor) -> Parts:
    source, sizes, dim = step.args[0], step.args[1], _get_dim(step, 2, out.dim())
    offset = sum(sizes[: step.index]) if isinstance(sizes, (tuple, list)) else sizes * step.index
    yield source, _replace(region, dim, (region[dim][0] + offset, region[dim][1] + offset)), out


def _unbind(step: _Step, region: Region, out: Tensor) -> Parts:
    dim = _get_dim(step, 1, step.args[0].dim())
    yield step.args[0], (*region[:dim], (step.index, step.index + 1), *region[dim:]), out.unsqueeze(dim)


def _select(step: _Step, region: Region, out: Tensor) -> Parts:
    source, dim, index = step.args
    dim, index = dim % source.dim(), index % source.shape[dim]
    yield source, (*region[:dim], (index, index + 1), *region[dim:]), out.unsqueeze(dim)


def _slice(step: _Step, region: Region, out: Tensor) -> Parts:
    arguments: Any = (*step.args, *(0, None, None, 1)[len(step.args) - 1 :])
    source, dim, start, end, stride = arguments
    dim %= source.dim()
    first, _, stride = slice(start, end, stride).indices(source.shape[dim])
    low, high = region[dim]
    if stride == 1:
        yield source, _replace(region, dim, (first + low, first + high)), out
        return
    for index in range(low, high):
        at = first + index * stride
        yield source, _replace(region, dim, (at, at + 1)), out.narrow(dim, index - low, 1)


def _permute(step: _Step, region: Region, out: Tensor) -> Parts:
    source = step.args[0]
    order = list(range(source.dim()))
    if step.func is aten.permute.default:
        order = [dim % source.dim() for dim in step.args[1]]
    else:
        first, second = step.args[1:] if step.func is aten.transpose.int else (0, -1)
        if order:
            order[first], order[second] = order[second], order[first]
    inverse = [order.index(dim) for dim in range(source.dim())]
    yield source, tuple(region[dim] for dim in inverse), out.permute(inverse)


def _unsqueeze(step: _Step, region: Region, out: Tensor) -> Parts:
    dim = step.args[1] % out.dim()
    yield step.args[0], (*region[:dim], *region[dim + 1 :]), out.squeeze(dim)


def _squeeze(step: _Step, region: Region, out: Tensor) -> Parts:
    source = step.args[0]
    dims = step.args[1] if len(step.args) > 1 else range(source.dim())
    dims = [dims] if isinstance(dims, int) else dims
    for dim in sorted(dim % max(source.dim(), 1) for dim in dims):
        if source.dim() and source.shape[dim] == 1:
            region, out = (*region[:dim], (0, 1), *region[dim:]), out.unsqueeze(dim)
    yield source, region, out


def _same(step: _Step, region: Region, out: Tensor) -> Parts:
    yield step.args[0], region, out


_RULES: dict[Any, Callable[[_Step, Region, Tensor], Parts]] = {
    aten.stack.default: _stack,
    aten.cat.default: _cat,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.detach.default: _same,
    aten.alias.default: _same,
}
