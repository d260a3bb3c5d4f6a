"""The list of probes: names, reasons to repeat, a refused program per probe, and documentation."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest

from moefx.matching.probes import probe_list
from moefx.matching.probes.probe_list import PROBES
from moefx.matching.proof.proof_view import EvidenceView, ProofView

from ..small_proofs import new_proof

DOCS = Path(__file__).parents[3] / "docs"


def test_a_repeated_probe_has_a_reason():
    seen = set()
    for probe in PROBES:
        assert bool(probe.again) == (probe.name in seen), probe.name
        assert probe.protects_from and inspect.getdoc(probe.run), probe.name
        seen.add(probe.name)


@pytest.mark.parametrize("name", sorted({probe.run.__module__ for probe in PROBES}))
def test_each_probe_shows_a_program_that_it_protects_from(name):
    header = inspect.getdoc(sys.modules[name])
    assert header and "Protects from" in header and "::\n\n    " in header


def list_uses(tree: ast.Module) -> set[tuple[str, str]]:
    """List the attributes that a module reads of a proof and of its evidence, each with the name of its owner."""
    owners = {"proof": "proof", "evidence": "evidence"}
    return {
        (owner, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute))
        if (owner := owners.get(getattr(node.value, "attr", getattr(node.value, "id", ""))))
    }


@pytest.mark.parametrize("file", sorted(Path(probe_list.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_a_probe_does_only_what_its_view_of_the_proof_allows(file):
    allowed = {("proof", name) for name in vars(ProofView)} | {("evidence", name) for name in vars(EvidenceView)}
    assert list_uses(ast.parse(file.read_text())) <= allowed


def test_a_proof_has_all_that_probes_may_use():
    proof = new_proof()
    for owner, view in ((proof, ProofView), (proof.evidence, EvidenceView)):
        assert not [name for name in vars(view) if not name.startswith("_") and name not in dir(owner)]


def read_table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its head."""
    section = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_the_page_on_soundness_lists_the_probes_in_order():
    listed = [
        (name.strip("`"), module.strip("`"), protects_from)
        for name, module, _, protects_from, _ in read_table("concepts/soundness.md", "Probes")
    ]
    assert listed == [
        (probe.name, probe.run.__module__.rpartition(".")[2], probe.protects_from)
        for probe in PROBES
        if not probe.again
    ]


def test_the_page_on_soundness_quotes_limitations():
    limitations = [cells[0] for cells in read_table("limitations.md", "Undetected changes")]
    quotes = {cells[-1] for cells in read_table("concepts/soundness.md", "Probes")} - {"-"}
    assert limitations and not [q for q in quotes if not any(row.startswith(q) for row in limitations)]
