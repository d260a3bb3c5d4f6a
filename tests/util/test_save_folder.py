"""A checkpoint is replaced at once: a save that raises, or is killed at any moment, leaves one complete checkpoint."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moefx.errors import MoefxError
from moefx.util.rank_group import RankGroup
from moefx.util.save_folder import find_checkpoint, replace_checkpoint

ENTRY_FILES = ("index", "single")
_KILLS: dict[str, int] = {}  # how many more changes of files the process makes


class Killed(BaseException):
    pass


def _kill(event: str, arguments: Any) -> None:
    if "left" in _KILLS and event in ("os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "open"):
        _KILLS["left"] -= 1
        if _KILLS["left"] < 0:
            raise Killed


@pytest.fixture(scope="module")
def kills() -> dict[str, int]:
    sys.addaudithook(_kill)  # stays, and does nothing without `_KILLS`
    return _KILLS


def save(folder: Path, version: str, names: Sequence[str], entry: str = "index") -> None:
    """Write files that say their version. The entry file lists them."""
    is_earlier = ("index", "single", "a", "b", "c").__contains__
    with replace_checkpoint(folder, RankGroup(None), ENTRY_FILES, is_earlier) as path:
        for name in names:
            (path / name).write_text(version)
        (path / entry).write_text(" ".join([version, *names]))


def read(folder: Path) -> str:
    """Return the version of a complete checkpoint."""
    (entry,) = (folder / name for name in ENTRY_FILES if (folder / name).exists())
    version, *names = entry.read_text().split()
    assert [(folder / name).read_text() for name in names] == [version] * len(names)
    return version


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail(*args: Any, **options: Any) -> None:
    raise OSError("no space left on device")


def test_files_of_an_earlier_checkpoint_are_replaced_and_others_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer").write_text("other")
    save(Path(), "old", ["a", "c"], "single")  # the current folder cannot be renamed
    save(Path(), "new", ["a", "b"])
    assert read(tmp_path) == "new" and list_names(tmp_path) == ["a", "b", "index", "tokenizer"]


def test_a_save_that_raises_keeps_the_earlier_checkpoint(tmp_path):
    save(tmp_path, "old", ["a", "c"])
    with (
        pytest.raises(OSError, match="no space"),
        replace_checkpoint(tmp_path, RankGroup(None), ENTRY_FILES, bool) as new,
    ):
        (new / "a").write_text("new")
        fail()
    with (
        pytest.raises(MoefxError, match="wrote none of"),
        replace_checkpoint(tmp_path, RankGroup(None), ENTRY_FILES, bool),
    ):
        pass
    assert read(tmp_path) == "old" and list_names(tmp_path) == ["a", "c", "index"]


def save_until_killed(folder: Path, version: str, changes: int) -> bool:
    """Save, but kill the process after a number of changes of files. Returns whether the save was completed."""
    _KILLS["left"] = changes
    try:
        save(folder, version, ["a", "b"])
    except Killed:
        return False
    finally:
        _KILLS.clear()
    return True


@pytest.mark.parametrize("has_links", [True, False])
def test_two_killed_saves_leave_a_complete_checkpoint(has_links, kills, tmp_path):
    """Kill a save at each moment, and the next one, which completes it, too."""
    seen, most = set(), 24
    for number, moments in enumerate(itertools.product(range(most), range(most))):
        folder = tmp_path / str(number)
        save(folder, "old", ["a", "c"], "single")
        (folder / "tokenizer").write_text("other")
        with mock.patch("os.link", os.link if has_links else fail):
            completed = [save_until_killed(folder, *each) for each in zip(("new", "newer"), moments, strict=True)]
            if has_links:
                read(find_checkpoint(folder, ENTRY_FILES))
            with (
                pytest.raises(OSError, match="no space"),
                replace_checkpoint(folder, RankGroup(None), ENTRY_FILES, bool),
            ):
                fail()
            version = read(folder)
            assert not {"incomplete-save", "complete-save"} & set(list_names(folder))
            seen.add((*completed, version))
            save(folder, "last", ["c"])
        assert read(folder) == "last" and list_names(folder) == ["c", "index", "tokenizer"]
        shutil.rmtree(folder)
    killed = {(False, False, version) for version in ("old", "new", "newer")}
    assert seen == killed | {
        (True, False, "new"),
        (True, False, "newer"),
        (False, True, "newer"),
        (True, True, "newer"),
    }
