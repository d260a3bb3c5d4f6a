"""Binding of arguments to placeholders, and specializations that admit a call."""

import enum
import functools
import inspect

import pytest
import torch
from torch import nn

from moefx.ir.argument_binding import (
    Binding,
    Specialization,
    describe_leaf,
    flatten_arguments,
    format_path,
    make_binder,
    placeholder_name,
    specialize_call,
)


class Colour(enum.Enum):
    RED = 1


def bind(function, *args, **kwargs):
    return flatten_arguments(make_binder(inspect.signature(function))(*args, **kwargs))


def every_kind(a, /, b, c=3, *args, d, e=5, **kwargs): ...


def test_binds_like_the_function_itself():
    call = ((1, 2, 3, 4, 5), {"d": 6, "z": 7})
    expected = inspect.signature(every_kind).bind(*call[0], **call[1])
    expected.apply_defaults()
    bound = dict(make_binder(inspect.signature(every_kind))(*call[0], **call[1]))
    assert bound == dict(expected.arguments)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1,), {"b": 2}), ((1, 2), {}), ((1, 2), {"a": 1, "d": 1})])
def test_a_wrong_call_raises_the_error_of_python(args, kwargs):
    signature = inspect.signature(every_kind)
    try:
        every_kind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match=r"forward\(\)"):
            make_binder(signature)(*args, **kwargs)
    else:
        make_binder(signature)(*args, **kwargs)


def test_equal_signatures_share_one_function():
    def other(a, /, b, c=3, *args, d, e=5, **kwargs): ...

    assert make_binder(inspect.signature(every_kind)) is make_binder(inspect.signature(other))


def test_leaves_include_and_distinguish_containers():
    x, y = torch.zeros(2), torch.zeros(3)

    def forward(h, pair, *args, **kwargs): ...

    leaves = bind(forward, x, (y, {"k": 1}), x, mask=None)
    assert [p for p, _ in leaves] == [
        ("h",), ("pair", "<type>"), ("pair", 0), ("pair", 1, "<type>"), ("pair", 1, "k"), ("args", 0),
        ("kwargs", "mask"),
    ]  # fmt: skip
    as_list = bind(forward, x, [y, {"k": 1}], x, mask=None)
    assert [p for p, _ in as_list] == [p for p, _ in leaves]
    block = nn.Identity()
    assert specialize_call(block, as_list) != specialize_call(block, leaves)


def test_leaves_are_described_by_kind():
    assert describe_leaf(torch.zeros(2, 3, dtype=torch.bfloat16)) == ("tensor", torch.bfloat16, "cpu", 2)
    assert len({describe_leaf(v) for v in (1, True, 1.0, "1", None, Colour.RED, torch.float32)}) == 7
    assert describe_leaf(nn.Identity()) == describe_leaf(nn.Identity())  # for objects only the type


def make_recursive_function(rate):
    def scale(x):
        return again(x) * rate

    again = functools.partial(scale)
    return scale


def test_partials_that_hold_themselves_are_described():
    assert describe_leaf(make_recursive_function(2)) == describe_leaf(make_recursive_function(2))
    assert describe_leaf(make_recursive_function(2)) != describe_leaf(make_recursive_function(3))
    items: list = [1]
    holder = functools.partial(print, items)
    items.append(holder)
    holder.keywords["end"] = holder
    assert describe_leaf(holder)[0] == "partial"


def test_the_specialization_of_a_call():
    def forward(h, scale=2.0): ...

    block = nn.Linear(1, 1).eval()
    leaves = bind(forward, torch.zeros(2, 3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        key = specialize_call(block, leaves)
    assert key == Specialization(
        False, False, torch.bfloat16,
        ((("h",), ("tensor", torch.float32, "cpu", 2)), (("scale",), ("float", 2.0))),
    )  # fmt: skip
    assert str(key) == "eval no_grad autocast(bfloat16) (h: 2-d float32 on cpu, scale: 2.0)"
    assert specialize_call(block, bind(forward, torch.zeros(2, 3, device="meta"))).autocast is None


def test_a_specialization_admits_calls_of_its_kind_only():
    call = Specialization(True, True, None, ((("h",), describe_leaf(torch.zeros(1))),))
    assert call.admits(call)
    assert call._replace(training=None, grad=None).admits(call)
    assert not call._replace(training=False).admits(call)
    assert not call._replace(grad=False).admits(call)
    # Autocast has no wildcard: None means off.
    assert not call.admits(call._replace(autocast=torch.bfloat16))
    assert not call._replace(arguments=()).admits(call)


def test_placeholders_find_their_leaves():
    key = Specialization(None, None, None, ((("h",), ("int", 1)), (("kwargs", "mask"), ("int", 2))))
    assert Binding((("kwargs", "mask"), ("h",))).indices(key) == (1, 0)


@pytest.mark.parametrize(
    ("path", "text", "identifier"),
    [(("h",), "h", "h"), (("kwargs", "m", 0), "kwargs['m'][0]", "m_0"), (("args", 1), "args[1]", "arg_1")],
)
def test_paths_are_printed_and_become_identifiers(path, text, identifier):
    assert format_path(path) == text
    assert placeholder_name(path) == identifier
