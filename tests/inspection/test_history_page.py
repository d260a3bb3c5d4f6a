"""Page of a history: self-contained, with the changes of each pass marked."""

import dataclasses
import io
import re
import xml.etree.ElementTree as ElementTree

import torch

import moefx
from moefx.inspection import history_page, repro_script

from .histories import Gated, make_history
from .loops import build_loop


def test_a_page_is_self_contained(tmp_path):
    path = tmp_path / "block.html"
    captured = dataclasses.replace(make_history(), captured=build_loop(64))
    captured.html(path, bytes_per_policy={"original": 5e6, '"h"': 1_234_567.0, '"x"': 0})
    text = path.read_text()
    assert not re.search(r"<script|https?:|url\(|@import|src=|href=", text)
    assert text.count("<svg") == 3 and "prefers-color-scheme: dark" in text
    assert "captured" in text and "after fuse" in text and "× 64" in text
    assert "4.768 MiB" in text and "1.177 MiB" in text and "0 B" in text
    body = text[text.index("<section") : text.index("</section>") + len("</section>")]
    # Without HTML's shorthands the page is XML: every element is closed, every text is escaped.
    body = body.replace("<details open>", "<details>")
    ElementTree.fromstring(re.sub(r"(class|colspan)=(\w+)", r'\1="\2"', body))


def test_pages_are_utf_8_in_every_locale(tmp_path, monkeypatch):
    history = dataclasses.replace(make_history(), captured=build_loop(64))
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")  # the locale's, if none is named
    history.html(tmp_path / "block.html")
    assert "× 64" in (tmp_path / "block.html").read_text(encoding="utf-8")
    monkeypatch.setattr(repro_script, "build_script", lambda *_: "größe = 1")
    history.repro(tmp_path / "repro.py")
    assert (tmp_path / "repro.py").read_text(encoding="utf-8") == "größe = 1"


def test_changes_of_each_pass_are_marked():
    text = history_page.build_fragment(make_history())
    assert text.count('class="removed"') == 7 and text.count('class="added"') == 1
    assert text.count("<details open>") == 2
    assert "<em>  # f32[B,D]" in text
    assert "captured" not in text and "Bytes kept" not in text


def test_a_pass_that_changed_nothing_is_closed():
    h = make_history()
    again = type(h)("", (*h.snapshots, h.snapshots[-1]))
    text = history_page.build_fragment(again)
    assert text.count("<details>") == 1 and "Nothing to change" in text and "<h2>model</h2>" in text


def list_titles(figure: str) -> list[str]:
    return re.findall(r'class="title"[^>]*>([^<]+)<', figure)


def test_the_first_graph_has_the_users_own_operations(tmp_path):
    compiled = moefx.compile(Gated(dict), example_inputs=(torch.randn(9, 8),))
    path = tmp_path / "history.html"
    moefx.history(compiled, "").html(path)
    before, after = re.findall(r"<figure>(.*?)</figure>", path.read_text(), re.DOTALL)
    assert "captured" in before and {"x", "topk", "nonzero", "linear", "index_add"} <= {
        title.partition(" ×")[0] for title in list_titles(before)
    }
    assert "after checkpoint" in after and "build_pft" in after and "nonzero" not in after
    assert 'class="box dialect' not in before and "histories.py" in str(moefx.history(compiled, "").captured)
