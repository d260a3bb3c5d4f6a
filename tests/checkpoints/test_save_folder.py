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

from moefx.checkpoints.rank_group import RankGroup
from moefx.checkpoints.save_folder import find_checkpoint, replace_checkpoint

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
    assert read(tmp_path) == "old" and list_names(tmp_path) == ["a", "c", "index"]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_killed_save_leaves_a_complete_checkpoint(has_links, kills, tmp_path):
    versions = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        save(folder, "old", ["a", "c"], "single")
        (folder / "tokenizer").write_text("other")
        with mock.patch("os.link", os.link if has_links else fail):
            kills["left"] = number
            try:
                save(folder, "new", ["a", "b"])
            except Killed:
                was_killed = True
            else:
                was_killed = False
            finally:
                kills.clear()
            if has_links:
                versions.append(read(find_checkpoint(folder, ENTRY_FILES)))
            _check_that_the_next_save_finds_it(folder, versions if not has_links else [])
        if not was_killed:
            break
    assert versions == sorted(versions, reverse=True) and set(versions) == {"old", "new"} and number > 12


def _check_that_the_next_save_finds_it(folder: Path, versions: list[str]) -> None:
    """Let two saves follow: one that raises, and one that succeeds."""
    with pytest.raises(OSError, match="no space"), replace_checkpoint(folder, RankGroup(None), ENTRY_FILES, bool):
        fail()
    versions.append(read(folder))
    assert not {"incomplete-save", "complete-save"} & set(list_names(folder))
    save(folder, "last", ["c"])
    assert read(folder) == "last" and list_names(folder) == ["c", "index", "tokenizer"]
    shutil.rmtree(folder)
