"""Detection of changes: absorbed, kept and watched submodules, and the cost of the check."""

import copy
import timeit

import pytest
from torch import nn

from moefx.errors import AbsorbedModuleChanged
from moefx.runtime.change_detection import AbsorbedModules, find_absorbed_names

from ..ir.graphs import Block, build_block_graph


def test_all_but_the_kept_submodules_are_absorbed():
    names = find_absorbed_names(Block(), build_block_graph())
    assert "experts" in names and "experts.3.act" in names
    assert not any(name.startswith("router") for name in names)


def test_parents_of_kept_submodules_are_kept():
    block = Block()
    block.experts.append(nn.Linear(1, 1))
    graph = build_block_graph().copy()
    graph.find("router")[0].target = "experts.4"
    names = find_absorbed_names(block, graph)
    assert "experts" not in names and "experts.4" not in names
    assert "experts.0" in names and "router" in names


def test_links_to_absorbed_modules_are_watched_through_kept_ones():
    block = Block()
    watch = AbsorbedModules(block, ("experts.0", "experts.0.up"))
    watch.check()
    block.experts[1] = nn.Identity()  # not absorbed
    block.experts.append(nn.Identity())
    watch.check()
    block.experts[0] = Block().experts[0]
    with pytest.raises(AbsorbedModuleChanged, match=r"^experts\.0 was replaced \(Expert by Expert\)"):
        watch.check()


def test_a_module_with_a_forward_of_its_own_may_not_get_another_one():
    block = Block()
    act = block.experts[0].act
    act.forward = lambda x: x
    watch = AbsorbedModules(block, ("experts.0", "experts.0.act"))
    watch.check()
    own, act.forward = act.forward, lambda x: 2 * x  # as many attributes as before
    with pytest.raises(AbsorbedModuleChanged, match=r"experts\.0\.act was given a forward of its own"):
        watch.check()
    act.forward = own
    copy.deepcopy(watch).check()
    watch.check()


def test_the_check_is_cheap():
    block = Block(256)
    watch = AbsorbedModules(block, find_absorbed_names(block, build_block_graph(256)))
    watch.check()
    assert len(watch.modules) == 1281
    # 35 us on an idle core, 1 % of the host time of such a layer. Compare with a visit of all modules, of which the
    # check takes a twelfth: a slow or busy machine slows both down.
    checks, looks = [], []
    for _ in range(10):
        checks.append(timeit.timeit(watch.check, number=10) / 10)
        looks.append(timeit.timeit(lambda: watch.inspect(""), number=1))
    assert min(checks) < min(looks) / 4
