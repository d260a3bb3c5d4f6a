import re
import xml.etree.ElementTree as ElementTree

from moefx.inspection import history_page

from .test_draw import looped
from .test_history import history


def test_a_page_is_self_contained(tmp_path):
    path = tmp_path / "block.html"
    history().html(path, before=looped(64), bytes_per_policy={"original": 5e6, '"h"': 1_234_567.0, '"x"': 0})
    text = path.read_text()
    assert not re.search(r"<script|https?:|url\(|@import|src=|href=", text)
    assert text.count("<svg") == 3 and "prefers-color-scheme: dark" in text
    assert "captured" in text and "after fuse" in text and "× 64" in text
    assert "4.768 MiB" in text and "1.177 MiB" in text and "0 B" in text
    body = text[text.index("<section") : text.index("</section>") + len("</section>")]
    # HTML's shorthands aside it is XML: every element is closed, every text is escaped.
    body = body.replace("<details open>", "<details>")
    ElementTree.fromstring(re.sub(r"(class|colspan)=(\w+)", r'\1="\2"', body))


def test_what_each_pass_changed_is_marked():
    text = history_page.build_fragment(history())
    assert text.count('class="removed"') == 7 and text.count('class="added"') == 1
    assert text.count("<details open>") == 2
    assert "<em>  # f32[B,D]" in text
    assert "captured" not in text and "Bytes kept" not in text


def test_a_pass_that_changed_nothing_is_closed():
    h = history()
    again = type(h)("", (*h.snapshots, h.snapshots[-1]))
    text = history_page.build_fragment(again)
    assert text.count("<details>") == 1 and "Nothing to change" in text and "<h2>model</h2>" in text
