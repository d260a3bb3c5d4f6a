"""Lists of weights: layouts that are read as one view, and layouts that are copied."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from moefx.ir import op_providers
from moefx.lowering.torch.weight_lists import make_strided_view, stack_weights, unstack_weights


def make_views(num: int = 3, shape: tuple[int, ...] = (4, 5), spacing: int = 20, offset: int = 0) -> list[Tensor]:
    """Lay out parameters in one storage."""
    storage = torch.randn(offset + spacing * num)
    return [nn.Parameter(storage[offset + i * spacing :][: shape[0] * shape[1]].view(shape)) for i in range(num)]


@pytest.mark.parametrize("spacing", [20, 24, 60])
@pytest.mark.parametrize("offset", [0, 7])
def test_equally_spaced_storages_are_one_view(spacing, offset):
    w = make_views(spacing=spacing, offset=offset)
    view = make_strided_view(w)
    assert view is not None
    assert view.data_ptr() == w[0].data_ptr()
    assert not view.requires_grad
    for got, expected in zip(view, w, strict=True):
        assert torch.equal(got, expected)


def test_transposed_views_are_one_view():
    w = [p.detach().t() for p in make_views()]
    view = make_strided_view(w)
    assert view is not None
    assert torch.equal(view[2], w[2])
    assert view.stride() == (20, 1, 5)


@pytest.mark.parametrize(
    "w",
    [
        [torch.randn(4, 5) for _ in range(3)],
        list(reversed(make_views())),
        [*make_views()[:2], torch.randn(4, 5)],
        [make_views()[0]] * 3,  # one tensor for all experts
        [make_views()[0], make_views()[1].detach().t().contiguous().t()],
    ],
    ids=["separate", "descending", "one strays", "tied", "other strides"],
)
def test_other_layouts_are_no_view(w):
    assert make_strided_view(w) is None


def test_one_expert_is_a_view():
    w = [torch.randn(4, 5)]
    view = make_strided_view(w)
    assert view is not None
    assert view.shape == (1, 4, 5)
    assert view.data_ptr() == w[0].data_ptr()


def test_equal_spacing_across_storages_is_an_accident_not_a_view():
    storage = torch.randn(60)
    w = [torch.from_dlpack(storage[i * 20 : (i + 1) * 20]).view(4, 5) for i in range(3)]
    assert w[0].untyped_storage().data_ptr() != w[1].untyped_storage().data_ptr()
    view = make_strided_view(w)
    if view is not None:  # only if the first storage extends to the second
        assert w[0].untyped_storage().nbytes() >= 60 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("w", "path"),
    [
        ([torch.randn(3, 4, 5)], "stacked"),
        (make_views(), "view"),
        ([torch.randn(4, 5) for _ in range(3)], "stacked_copy"),
    ],
    ids=["stacked", "view", "stacked_copy"],
)
def test_weights_are_stacked_without_needless_copies(w, path, dtype):
    op_providers.reset_counters()
    result = stack_weights(w, dtype)
    assert result.dtype is dtype
    assert torch.equal(result, (w[0] if len(w) == 1 else torch.stack(list(w))).to(dtype))
    cast = {"cast": 1} if dtype is torch.bfloat16 and path != "stacked_copy" else {}
    assert op_providers.weight_paths() == {path: 1, **cast}
    assert (result.data_ptr() == w[0].data_ptr()) == (path != "stacked_copy" and dtype is torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.double(),
        copy.deepcopy,
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True) and m,
        lambda m: m.to_empty(device="cpu"),
    ],
    ids=["double", "deepcopy", "assign", "to_empty"],
)
def test_changes_that_break_the_view_are_noticed(change):
    module = nn.ParameterList(make_views())
    assert make_strided_view(list(module)) is not None
    changed = change(module)
    w = list(changed)
    with torch.no_grad():
        torch.testing.assert_close(stack_weights(w, w[0].dtype), torch.stack(w), equal_nan=True)


def test_matrices_never_copy():
    op_providers.reset_counters()
    w = [torch.randn(4, 5) for _ in range(3)]
    stacked = torch.randn(5, 4, 3).permute(2, 1, 0)
    assert unstack_weights(w, torch.float32) is w
    read = unstack_weights([stacked], torch.bfloat16)
    assert all(m.data_ptr() == s.data_ptr() for m, s in zip(read, stacked, strict=True))
    assert op_providers.weight_paths() == {"separate": 1, "stacked": 1, "cast": 1}
