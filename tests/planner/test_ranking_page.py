"""Pages of rankings: complete, in one file, escaped, with or without pictures."""

from __future__ import annotations

import dataclasses
import re
import sys
import xml.etree.ElementTree as ElementTree
from html import escape

import pytest

import moefx
from moefx import cli
from moefx.planner.catalogue import find_model
from moefx.planner.constants import render_assumptions, render_sources
from moefx.planner.platforms import FITTED, FREE, PLATFORMS, Network, Platform
from moefx.planner.ranking_page import INSTALL, file_name, has_plots, render
from moefx.planner.regions import build_layout_grid, explain_ssmb_saving
from moefx.planner.scaling import search_scaling
from moefx.ranking import plan, search
from moefx.util.unit_text import amount

SMALL = ["plan", "olmoe-1b-7b", "--platform", "a100-40gb", "--gpus", "4", "--batch", "16", "--tokens", "512"]


@pytest.fixture(scope="module")
def small():
    return plan("olmoe-1b-7b", "a100-40gb", 4, batch=16, tokens=512)


@pytest.fixture
def without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # makes `import matplotlib` fail


def is_well_formed(text):
    """Return whether the body is XML without HTML's shorthands: all elements closed, all text escaped."""
    body = text[text.index("<section") : text.index("</section>") + len("</section>")]
    body = body.replace("<details open>", "<details>")
    body = re.sub(r"(<img [^>]*)>", r"\1/>", re.sub(r"class=(\w+)", r'class="\1"', body))
    ElementTree.fromstring(body)
    return True


def read_cells(text):
    return re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", text)


def test_the_page_is_one_file(large):
    _, text, _ = large
    assert is_well_formed(text)
    rest = re.sub(r'src="data:image/svg\+xml;base64,[A-Za-z0-9+/=]+"', "", text)
    assert not re.search(r"<script|https?:|url\(|@import|src=|href=", rest)
    assert "prefers-color-scheme: dark" in text
    assert text.count("<img ") == (5 if has_plots() else 0)


def test_every_result_is_on_the_page(large):
    ranking, text, _ = large
    assert "deepseek-v3 on 1024 x AMD MI250X, one GCD" in text and "1024 sequences of 4096 tokens a step" in text
    assert f"{len(ranking)} layouts fit 64 GiB" in text
    for i, entry in enumerate(ranking.entries[:10], 1):
        row = "".join(f"<td[^>]*>{re.escape(cell)}</td>" for cell in [str(i), *entry.cells()])
        assert re.search(row, text)
    for part in ranking.formulas(0):
        assert escape(part.formulas) in text
    for rejected in ranking.rejected:
        assert escape(rejected.label) in text and escape(rejected.why) in text
    for source in (*ranking.platform.sources.values(), *(n.source for n in ranking.platform.networks)):
        assert escape(source) in text
    assert escape(explain_ssmb_saving(ranking.model, ranking[0].layout, ranking.platform).formulas) in text
    assert escape(ranking.model.note) in text and escape(ranking[0].plan().to_json()) in text


def test_numbers_of_pictures_are_on_the_page(small):
    cells = read_cells(render(small))
    assert amount(small[0].memory["M_optimizer"], "B") in cells
    assert amount(small[0].step["T_optimizer"], "s") in cells
    for cell in build_layout_grid(small).cells.values():
        assert (amount(cell.best.seconds, "s") if cell.best else f"+{amount(cell.lacking, 'B')}") in cells
    for point in (*search_scaling(small, False), *search_scaling(small, True)):
        if point.best:
            assert amount(point.best.seconds, "s") in cells
            assert f"{point.batch * 512 / point.best.seconds:,.0f}" in cells


def test_long_work_reports_progress(large):
    _, _, messages = large
    assert len(messages) > 10 and "strong scaling: 1024 sequences on 2048 GPUs" in messages


def test_efficiency_is_that_of_the_first_that_fits(without_matplotlib):
    ranking = plan("mixtral-8x7b", "a100-40gb", 20, batch=20)
    text = render(ranking)
    strong = search_scaling(ranking, False)
    ideal = strong[2].best.seconds / 2
    assert "100%" in read_cells(text) and f"{ideal / strong[3].best.seconds:.0%}" in read_cells(text)
    assert f"does not fit: {amount(strong[0].lacking, 'B')} too much" in text


def test_labels_distinguish_layouts(large):
    """Distinguish layouts of equal sizes by dispatch, micro-batches, ..."""
    _, text, _ = large
    heads = re.findall(r"<th[^>]*>(\d+: PP[^<]*)</th>", text)
    names = [re.sub(r"^\d+: ", "", head) for head in heads]
    assert len(names) == 20 and names[:10] == names[10:] and len(set(names)) == 10, names


def test_names_are_escaped(small):
    evil = "<script>alert('x')</script> & \"y\" $\\frac$"
    platform = dataclasses.replace(
        small.platform, name=evil, device=evil, sources={"peak": evil},
        networks=(Network(evil, 8, 1e9, source=evil), Network("all", 0, 1e9)),
    )  # fmt: skip
    model = small.model.replace(name=evil, source=evil, note=evil)
    ranking = search(model, platform, 4, batch=16, tokens=512)
    text = render(ranking)
    assert "<script" not in text and text.count(escape(evil)) >= 7 and is_well_formed(text)
    assert file_name(ranking) == "plan-script-alert-x-script-y-frac-script-alert-x-script-y-frac-4.html"


def test_the_page_without_matplotlib_lacks_pictures_only(small, without_matplotlib, tmp_path):
    assert not has_plots()
    small.html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img" not in text and "No pictures" in text and INSTALL in text and is_well_formed(text)
    assert text.count("<details open>") == 5 and "M_gpu = " in text
    assert amount(small[0].memory["M_optimizer"], "B") in read_cells(text)


def test_pictures_change_nothing_else(small, monkeypatch):
    pytest.importorskip("matplotlib")
    with_them = render(small)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = render(small)
    assert with_them != without
    assert read_cells(with_them) == read_cells(without)


def test_the_page_without_a_candidate():
    """Plan a prime number of ranks, which divides neither stages, nor nodes, nor the batch."""
    text = render(plan("olmoe-1b-7b", "h200", 1009, batch=3))
    assert "0 layouts fit" in text and "does not divide the batch" in text and is_well_formed(text)


MIXED = Platform(
    name="mixed", device="half measured", memory_bytes=139 * 2**30, peak=989e12, memory_bandwidth=4.8e12,
    networks=(Network("node", 8, 312e9, 18e-6, source="measured: NCCL"), Network("cluster", 0, 50e9, source="a sheet")),
    matmul_efficiency=0.8, expert_gemm=672.4e12, expert_rows=7.773e12, expert_launch=22.9e-6, handling=1e-12,
    sources={
        "memory_bytes": "measured", "peak": "a data sheet", "memory_bandwidth": "a data sheet",
        **dict.fromkeys(("matmul_efficiency", "expert_gemm", "expert_rows", "expert_launch"), "measured: bench"),
    },
)  # fmt: skip


def test_figures_are_measured_or_printed():
    text = render_assumptions(find_model("olmoe-1b-7b"), MIXED)
    (measured,) = re.findall(r"Measured: (.*?)\.</li>", text)
    assert measured.split(", ") == [
        "memory_bytes", "matmul_efficiency", "expert_gemm", "expert_rows", "expert_launch", "links of a node"
    ]  # fmt: skip
    (printed,) = re.findall(r"peaks that programs do not reach: (.*?)\.</li>", text)
    assert printed.split(", ") == ["peak", "memory_bandwidth", "links of a cluster"]
    (unknown,) = re.findall(r"too short: (.*?)\.", text)
    assert {"attention_efficiency", "dense_rows", "expert_weights", "latency of a cluster"} <= set(unknown.split(", "))
    assert not {"expert_gemm", "handling", "overhead", "latency of a node"} & set(unknown.split(", "))
    nothing = render_assumptions(
        find_model("olmoe-1b-7b"), dataclasses.replace(MIXED, sources={}, networks=MIXED.networks[1:])
    )
    assert "Nothing was measured" in nothing and "Measured: " not in nothing


def test_fitted_rates_are_not_called_measured():
    """Mark fitted rates: two of the H200's exceed its memory bandwidth four times."""
    text = render_assumptions(find_model("olmoe-1b-7b"), PLATFORMS["h200"])
    (measured,), (fitted,) = (
        re.findall(rf"{what}: (.*?)\.</li>", text) for what in ("Measured", "fitted to measured times")
    )
    assert set(fitted.split(", ")) == set(FITTED) and not set(FITTED) & set(measured.split(", "))
    assert "can be above memory_bandwidth" in text
    shown = read_cells(render_sources(PLATFORMS["h200"]))
    assert shown[shown.index("expert_weights") + 2].startswith("fitted to measured times: ")
    nothing_adds = dataclasses.replace(PLATFORMS["h200"], expert_rows=FREE)
    assert "adds no time" in read_cells(render_sources(nothing_adds))


def test_every_figure_has_its_unit_and_source():
    shown = read_cells(render_sources(MIXED))
    for cell in ("139 GiB", "989 TFLOP/s", "4.8 TB/s", "7.773 TB/s", "22.9 us", "312 GB/s", "18 us", "1e-12 s/B"):
        assert cell in shown
    for figure, (value, source) in {
        "peak": ("989 TFLOP/s", "a data sheet"), "matmul_efficiency": ("0.8", "measured: bench"),
        "expert_weights": ("memory_bandwidth", "not measured"), "handling": ("1e-12 s/B", "no source"),
        "fast_domain": ("no limit", ""),
    }.items():  # fmt: skip
        at = shown.index(figure)
        assert shown[at + 1 : at + 3] == [value, source]


@pytest.mark.parametrize("name", sorted(PLATFORMS))
def test_units_of_shipped_figures(name):
    """Show each number of a platform with its unit."""
    shown = read_cells(render_sources(PLATFORMS[name]))
    plain = {"matmul_efficiency", "attention_efficiency", "fast_domain"}
    for field in dataclasses.fields(PLATFORMS[name]):
        if isinstance(getattr(PLATFORMS[name], field.name), (int, float)) and field.name not in plain:
            assert not re.fullmatch(r"[0-9.e+-]+( [KMGTPE])?", shown[shown.index(field.name) + 1]), field.name


def test_the_command_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(SMALL) == 0
    printed = capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["plan-olmoe-1b-7b-a100-40gb-4.html"]
    assert printed.out.splitlines()[-1].startswith("page: plan-olmoe-1b-7b-a100-40gb-4.html")
    assert "layouts fit" in printed.out and "page: strong scaling" in printed.err
    assert INSTALL not in printed.out or not has_plots()


@pytest.mark.parametrize(
    ("options", "files"),
    [
        (["--no-page"], []),
        (["--page", "here.html"], ["here.html"]),
        (["--explain", "1"], []),
        (["--explain", "1", "--page", "here.html"], ["here.html"]),
    ],
)
def test_the_command_s_options(options, files, tmp_path, monkeypatch, capsys, without_matplotlib):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*SMALL, *options]) == 0
    assert [path.name for path in tmp_path.iterdir()] == files
    assert ("page: " in capsys.readouterr().out) == bool(files)


def test_the_command_without_matplotlib(tmp_path, monkeypatch, capsys, without_matplotlib):
    monkeypatch.chdir(tmp_path)
    assert cli.main(SMALL) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"page: plan-olmoe-1b-7b-a100-40gb-4.html, without pictures: they need matplotlib ({INSTALL})"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_page_that_cannot_be_written(tmp_path, capsys, without_matplotlib):
    assert cli.main([*SMALL, "--page", str(tmp_path / "missing" / "page.html")]) == 2
    printed = capsys.readouterr()
    assert "layouts fit" in printed.out  # the output has the table
    assert "cannot be written: No such file or directory; --page names another file" in printed.err


def test_the_page_without_a_fitting_layout(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["plan", "deepseek-v3", "--platform", "a100-40gb", "--gpus", "8"]) == 1
    text = (tmp_path / "plan-deepseek-v3-a100-40gb-8.html").read_text(encoding="utf-8")
    assert "0 layouts fit 40 GiB" in text and "The one that comes nearest, PP=" in text and is_well_formed(text)
    assert "M_gpu = " not in text


def test_page_of_a_users_ranking(tmp_path):
    moefx.plan("olmoe-1b-7b", "mi300x", 1, batch=1, tokens=128).html(str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").stat().st_size > 10_000
