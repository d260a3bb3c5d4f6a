"""Copies of models: new modules with the same tensors, also in closures and shared parts."""

import functools
import types

import pytest
import torch
from torch import nn

from moefx.errors import MoefxError
from moefx.runtime.block_forward import get_rewritten_forward
from moefx.util.model_copy import copy_model
from tests.runtime.rewriting import Model, rewrite

from ..ir.graphs import D


def list_tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model()


def test_modules_are_new_and_tensors_are_shared(model):
    model.layers[0].register_buffer("counter", torch.zeros(2), persistent=False)
    duplicate, copies = copy_model(model)
    assert type(duplicate) is Model and list(duplicate.state_dict()) == list(model.state_dict())
    copied, originals = dict(duplicate.named_modules()), dict(model.named_modules())
    assert copied.keys() == originals.keys()
    assert all(copied[name] is copies[module] is not module for name, module in originals.items())
    assert len(copies) == len(originals)
    assert all(list_tensors(duplicate)[name] is tensor for name, tensor in list_tensors(model).items())
    x = torch.randn(3, D)
    torch.testing.assert_close(duplicate(x), model(x))
    duplicate.layers[0].add_module("extra", nn.Linear(1, 1))
    duplicate.eval()
    assert "extra" not in model.layers[0]._modules and model.layers[1].training


def test_shared_modules_are_shared_in_the_copy(model):
    model.layers.append(model.layers[0])
    duplicate, _ = copy_model(model)
    assert duplicate.layers[2] is duplicate.layers[0]


def test_references_to_the_model_become_references_to_the_copy(model):
    inner = model.layers[0]
    seen = []

    def closure_hook(module, args, output):
        seen.append(inner)

    def make_forward(block):
        original = block.forward

        def forward(x):
            return original(x), block

        return forward

    inner.router.register_forward_hook(closure_hook)
    inner.bound = model.forward
    inner.partial = functools.partial(isinstance, inner)
    inner.table = {"self": [inner]}
    model.layers[1].forward = make_forward(model.layers[1])
    duplicate, copies = copy_model(model)
    copied = duplicate.layers[0]
    assert copied.bound.__self__ is duplicate and copied.partial.args == (copied,) and copied.table["self"][0] is copied
    _, block = duplicate.layers[1](torch.randn(2, D))
    assert block is duplicate.layers[1] is copies[model.layers[1]]
    copied(torch.randn(2, D))
    inner(torch.randn(2, D))
    assert seen == [copied, inner]


def test_recursive_and_empty_closures():
    model = nn.Linear(2, 2)

    def build():
        def forward(x, depth=0):
            return forward(x, depth + 1) if depth < 2 else helper(model, x)

        if not model:
            unset = 1

        def hook(*_):
            return unset if False else None

        def helper(m, x):
            return m.weight @ x

        forward.note = "kept"
        return forward, hook

    model.forward, hook = build()
    model.register_forward_hook(functools.partial(hook))
    duplicate, _ = copy_model(model)
    assert duplicate.forward.note == "kept"
    duplicate._parameters["weight"] = nn.Parameter(torch.zeros(2, 2))
    assert not duplicate(torch.ones(2)).any()
    assert model(torch.ones(2)).any()


def test_plain_tensor_attributes_are_shared(model):
    # A non-leaf tensor, which deepcopy rejects.
    model.layers[0].cache = model.layers[0].router.linear.weight * 2
    duplicate, _ = copy_model(model)
    assert duplicate.layers[0].cache is model.layers[0].cache


class Peculiar(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.copied = False

    def __deepcopy__(self, memo):
        new = Peculiar()
        memo[id(self)] = new
        new.linear = memo[id(self.linear)]
        new.copied = True
        return new


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.handle = object()

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "handle"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.handle = "new"


def test_modules_with_their_own_copy_methods(model):
    holder = nn.ModuleDict(
        {"peculiar": Peculiar(), "state": WithState(), "graph": torch.fx.symbolic_trace(nn.Linear(2, 2))}
    )
    duplicate, copies = copy_model(holder)
    assert duplicate["peculiar"].copied and duplicate["peculiar"].linear.weight is holder["peculiar"].linear.weight
    assert duplicate["state"].handle == "new"
    assert copies[holder["state"].linear] is duplicate["state"].linear
    assert isinstance(duplicate["graph"], torch.fx.GraphModule)
    assert duplicate["graph"].weight is holder["graph"].weight
    top, copies = copy_model(holder["peculiar"])
    assert top.copied and copies[holder["peculiar"]] is top


def test_objects_that_cannot_be_copied_are_named(model):
    model.layers[1].stream = (i for i in range(3))
    with pytest.raises(MoefxError, match=r"layers\.1\.stream \(generator\) cannot be copied: .*remove the attribute"):
        copy_model(model)


def test_state_dict_hooks_and_methods_survive(model):
    def hook(module, state, prefix, metadata):
        state[prefix + "extra"] = torch.zeros(1)

    model._register_state_dict_hook(hook)
    model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("extra", None))
    model.helper = types.MethodType(lambda self: self, model)
    duplicate, _ = copy_model(model)
    assert "extra" in duplicate.state_dict() and duplicate.helper() is duplicate
    duplicate.load_state_dict(duplicate.state_dict())


def test_a_rewritten_model_can_be_copied(model):
    x = torch.randn(4, D)
    expected = model(x)
    rewrite(model, x)
    duplicate, _ = copy_model(model)
    torch.testing.assert_close(duplicate(x), expected)
    forward = get_rewritten_forward(duplicate.layers[0])
    assert forward.block is duplicate.layers[0] and forward.counts.rewritten == 1
    assert get_rewritten_forward(model.layers[0]).counts.rewritten == 0


def test_a_copy_shares_parameters_on_the_meta_device():
    with torch.device("meta"):
        model = Model(layers=1)
    duplicate, _ = copy_model(model)
    assert next(duplicate.parameters()) is next(model.parameters())


def test_a_method_of_a_partial_refers_to_the_copy(model):
    """Redirect the arguments of a partial: quantization libraries set `extra_repr` this way."""
    inner = model.layers[0]

    def ask(self, original, other):
        return original(), other

    inner.extra_repr = types.MethodType(functools.partial(ask, original=inner.extra_repr, other=inner), inner)
    duplicate, copies = copy_model(model)
    method = duplicate.layers[0].extra_repr
    assert method.__self__ is copies[inner] is method()[1]
    assert method.__func__.keywords["original"].__self__ is copies[inner]
