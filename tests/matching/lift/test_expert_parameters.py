"""Parameters of experts: those that only some tokens use, with their siblings."""

from __future__ import annotations

import torch
from torch import nn

from moefx.matching.lift.expert_parameters import (
    add_siblings,
    find_experts_used_by_all_tokens,
    number_by_tokens,
    propose_expert_parameters,
)

from .small_blocks import EXPERTS, D, E, Small, find_uses


def test_parameters_that_only_some_tokens_use_are_the_experts():
    assert next(propose_expert_parameters(find_uses(Small())))[0] == EXPERTS


def test_a_parameter_that_all_tokens_use_is_no_experts():
    class Projected(Small):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(D, D, bias=False)

        def forward(self, x):
            return self.project(super().forward(x))

    assert next(propose_expert_parameters(find_uses(Projected())))[0] == EXPERTS


def test_unused_siblings_are_added():
    assert add_siblings(find_uses(Small()), {"experts.0.weight", "experts.2.weight"}) == EXPERTS
    assert add_siblings(find_uses(Small()), {"router.weight"}) == {"router.weight"}


class Named(Small):
    """Experts in attributes without numbers in their names."""

    def __init__(self):
        super().__init__()
        del self.experts
        self.left, self.right = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x):
        is_left = (self.router(x).argmax(-1) == 0)[:, None]
        return torch.where(is_left, self.left(x), self.right(x))


def test_experts_that_no_list_holds_are_numbered_by_their_tokens():
    used, names = find_uses(Named()), {"left.weight", "right.weight"}
    numbers = number_by_tokens(used, used.capture.out, names, {})
    assert numbers == {"left.weight": 0, "right.weight": 1}
    assert number_by_tokens(used, used.capture.out, names, {"right.weight": 0}) == {
        "right.weight": 0,
        "left.weight": 1,
    }


def test_one_set_of_tokens_gives_no_numbers():
    used = find_uses(nn.Linear(D, D))
    assert number_by_tokens(used, used.capture.out, {"weight"}, {}) is None


def test_experts_that_every_token_selects():
    assert find_experts_used_by_all_tokens(find_uses(Small(k=E))) == EXPERTS
    assert find_experts_used_by_all_tokens(find_uses(Small(k=1))) == set()
