"""Replace a checkpoint in a folder so that a save which fails or is killed does not lose the earlier one.

The folder may be a mount point or the current one, and may have other files. So the new files are written to a folder
inside of it, which is renamed when they are complete, and then linked into place one by one:

    folder/incomplete-save    while files are written; the earlier checkpoint is complete
    folder/complete-save      while files are put in place; holds all new files, on file systems with hard links

Every checkpoint has an entry file, without which nothing loads it, such as the index of several files. The earlier
entry file is removed first, and the new one is put in place last: no reader mixes files of two checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..errors import InvalidInput, MoefxError
from .rank_group import RankGroup

_INCOMPLETE, _COMPLETE = "incomplete-save", "complete-save"


@contextlib.contextmanager
def replace_checkpoint(
    folder: Path, ranks: RankGroup, entry_files: Sequence[str], is_earlier: Callable[[str], bool]
) -> Iterator[Path]:
    """Yield a new folder for files, and put them in the place of an earlier checkpoint after the block. Collective.

    Leaves the earlier checkpoint as it is if the block raises; it must raise on all ranks (`RankGroup.raise_together`).
    On a file system without hard links, a process that is killed while files are put in place leaves some of them in
    `complete-save` alone; the next save moves them.

    Args:
        folder: is created if it does not exist.
        entry_files: names of files without which nothing loads a checkpoint; it has one of them.
        is_earlier: whether a file of this name is removed unless the new checkpoint has it. Others are kept.

    Raises:
        InvalidInput: the folder is a file.
    """
    with ranks.raise_together():
        if ranks.is_first:
            if folder.is_file():
                raise InvalidInput(f"{folder} is a file: a checkpoint is a folder")
            _put_in_place(folder, entry_files)  # of a save that was killed
            if (folder / _INCOMPLETE).exists():
                shutil.rmtree(folder / _INCOMPLETE)
            (folder / _INCOMPLETE).mkdir(parents=True)
    try:
        yield folder / _INCOMPLETE
        with ranks.raise_together():
            if ranks.is_first:
                names = set(os.listdir(folder / _INCOMPLETE))
                if not names.intersection(entry_files):
                    raise MoefxError(f"the save wrote none of {list(entry_files)} to {folder / _INCOMPLETE}")
                os.rename(folder / _INCOMPLETE, folder / _COMPLETE)
                _put_in_place(folder, entry_files)
                for path in folder.iterdir():
                    if path.name not in names and is_earlier(path.name) and path.is_file():
                        path.unlink()
    except BaseException:
        if ranks.is_first:
            shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)
        raise


def find_checkpoint(folder: Path, entry_files: Sequence[str]) -> Path:
    """Return the folder, or `complete-save` in it if a save was killed while it put files in place."""
    candidates = (folder, folder / _COMPLETE)
    return next((path for path in candidates if any((path / name).is_file() for name in entry_files)), folder)


def _put_in_place(folder: Path, entry_files: Sequence[str]) -> None:
    """Link the files of `complete-save` into the folder, and remove it. A killed call is completed by the next one."""
    complete = folder / _COMPLETE
    if not complete.is_dir():
        return
    names = sorted(os.listdir(complete), key=lambda name: name in entry_files)
    if any(name in entry_files for name in names):  # otherwise all are in place
        for name in entry_files:
            (folder / name).unlink(missing_ok=True)
        for name in names:
            (folder / name).unlink(missing_ok=True)
            try:
                os.link(complete / name, folder / name)
            except OSError:  # a file system without hard links
                os.replace(complete / name, folder / name)
    for name in reversed(names):  # the entry file first: without it nothing loads the rest
        (complete / name).unlink(missing_ok=True)
    complete.rmdir()
