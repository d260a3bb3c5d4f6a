"""`Ranking.build` passes on each field of an entry, or raises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moefx
from moefx.errors import InvalidInput, InvalidPlan, NothingFits
from moefx.pipelines.entry_builder import EntryArguments, check_model, read_entry
from moefx.planner.catalogue import find_model
from moefx.planner.entries import Entry
from moefx.planner.layout import CHECKPOINT_POLICIES, Layout
from moefx.planner.platforms import PLATFORMS
from moefx.planner.search import estimate_entry

from ..distributed.pipeline_training_cases import EXAMPLE, Decoder, loss_fn

# The parts of `EntryArguments` that each field of an entry sets.
FIELD_TARGETS: dict[str, tuple[str, ...]] = {
    # of `Entry`
    "layout": (),  # below, field by field
    "experts_first": ("axes", "plan.placement"),
    "units": ("plan.topology_levels",),
    "memory": (),  # predictions
    "step": (),
    # of `Layout`
    "pp": ("axes",),
    "tp": ("axes",),
    "dp": ("axes",),
    "ep": ("axes", "plan.expert_axis"),
    "ssmb": ("plan.sequence_axis", "plan.expert_axis"),
    "zero": ("options.zero",),
    "dispatch": ("plan.dispatch",),
    "kept": ("plan.checkpoint",),
    "recompute": ("options.recompute",),
    "sequences": ("batch", "plan.tokens"),
    "tokens": ("batch", "plan.tokens"),
    "microbatches": ("options.microbatches", "batch"),
    "schedule": ("options.schedule",),
    "chunks": ("options.chunks",),
}

MODEL = find_model("olmoe-1b-7b")
BASE = Layout(pp=2, dp=8, ep=4, sequences=2, tokens=128, microbatches=8, schedule="interleaved", chunks=2)
SHARED = dataclasses.replace(BASE, dp=4, tp=2, ssmb=True)  # as many ranks, two of them with the same tokens
LAYOUTS: dict[str, tuple[Layout, Layout]] = {
    field: (BASE, dataclasses.replace(BASE, **{field: value}))
    for field, value in dict(
        pp=4, dp=16, ep=8, zero=3, dispatch="flat", kept="x", recompute=True, sequences=4, tokens=64, microbatches=4,
        schedule="zb-h1", chunks=4,
    ).items()
} | {"ssmb": (dataclasses.replace(BASE, tp=2), SHARED), "tp": (SHARED, dataclasses.replace(SHARED, tp=4))}  # fmt: skip


def entry_of(layout: Layout, experts_first: bool = True) -> Entry:
    return estimate_entry(MODEL, layout, PLATFORMS["dgx-h100"], experts_first)


def find_target(arguments: EntryArguments, target: str) -> object:
    name, _, field = target.partition(".")
    found = getattr(arguments, name)
    return found[field] if name == "options" else getattr(found, field) if field else found


def read(entry: Entry) -> EntryArguments | str:
    try:
        return read_entry(entry, replicate_dense=entry.layout.ssmb)
    except InvalidPlan as error:
        return str(error)


def test_each_field_of_an_entry_has_a_target():
    """A new field of `Entry` or `Layout` needs a place to go."""
    assert {field.name for owner in (Entry, Layout) for field in dataclasses.fields(owner)} == {*FIELD_TARGETS}
    assert {field.name for field in dataclasses.fields(Layout)} == {*LAYOUTS}


@pytest.mark.parametrize("field", LAYOUTS)
def test_a_field_changes_its_targets(field):
    """If a value is not built, it is refused."""
    before, after = (read(entry_of(layout)) for layout in LAYOUTS[field])
    if isinstance(before, str) or isinstance(after, str):
        assert isinstance(before, str) != isinstance(after, str), (before, after)
        return
    changed = {target for target in FIELD_TARGETS[field] if find_target(before, target) != find_target(after, target)}
    assert changed and changed >= {*FIELD_TARGETS[field]} - {"plan.expert_axis"}, field


def test_placement_and_units_go_into_mesh_and_plan():
    near, far = (read_entry(entry_of(BASE, experts_first)) for experts_first in (True, False))
    assert list(near.axes) == ["pp", "dp", "ep"] and list(far.axes) == ["pp", "ep", "dp"]
    assert (near.plan.placement, far.plan.placement) == ("ep_first", "dp_first")
    units = dataclasses.replace(entry_of(BASE), units=(32,))
    assert read_entry(units).plan.topology_levels == (32,)


def test_one_stage_has_a_pipeline_axis():
    one = read_entry(entry_of(Layout(dp=4, ep=2, microbatches=2, sequences=3, tokens=5)))
    assert one.axes == {"pp": 1, "dp": 2, "ep": 2} and one.batch == (6, 5)
    assert one.options["data"] == "fsdp" and one.options["zero"] == 1
    alone = read_entry(entry_of(Layout()))
    assert alone.axes == {"pp": 1, "dp": 1} and alone.options["zero"] is None
    assert read_entry(entry_of(Layout(dp=2, zero=0))).options["data"] == "ddp"


def test_policies_of_other_programs_are_refused():
    for kept in CHECKPOINT_POLICIES:
        found = read(entry_of(dataclasses.replace(BASE, kept=kept)))
        assert isinstance(found, str) == (kept not in ("h", "x", "all")), kept


def test_tensor_parallelism_is_refused():
    with pytest.raises(InvalidPlan, match=r"over TP = 2 ranks, which moefx does not do: build an entry with TP = 1"):
        read_entry(entry_of(dataclasses.replace(BASE, tp=2)))
    with pytest.raises(InvalidPlan, match=r"build\(\.\.\., replicate_dense=True\)"):
        read_entry(entry_of(SHARED))
    shared = read_entry(entry_of(SHARED), replicate_dense=True)
    assert shared.plan.sequence_axis == "tp" and "tp" not in dict(shared.plan.layout or ())
    with pytest.raises(InvalidPlan, match="replicate_dense=True"):
        read_entry(entry_of(BASE), replicate_dense=True)


def test_another_model_is_named():
    model = find_model("deepseek-v3")
    check_model(model, dataclasses.replace(model, name="another", norms=0), "Model")
    other = model.replace(num_layers=7, num_moe_layers=5, attention=dataclasses.replace(model.attention, num_heads=2))
    with pytest.raises(InvalidInput) as caught:
        check_model(model, other.replace(note=""), "Model")
    for text in ("Model is not the model of the ranking, deepseek-v3", "num_layers 7 instead of 61", "num_heads 2"):
        assert text in str(caught.value)


def test_without_ranks():
    with torch.device("meta"):
        ranking = moefx.plan(Decoder("gated", "gated"), "h200", 2, batch=8, tokens=3, example_inputs=EXAMPLE)
    with pytest.raises(InvalidPlan, match=r"for 2 ranks, and torch\.distributed is not initialized"):
        ranking.build(0, Decoder("gated", "gated"), loss_fn)
    nothing = dataclasses.replace(ranking, result=dataclasses.replace(ranking.result, entries=()))
    with pytest.raises(NothingFits):
        nothing.build(0, Decoder("gated", "gated"), loss_fn)
