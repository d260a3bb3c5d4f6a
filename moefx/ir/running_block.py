"""The rewritten block that a thread runs."""

from __future__ import annotations

import threading


class _Running(threading.local):
    """The block that this thread runs.

    Attributes:
        block: the block's name, "" outside of blocks and in compiled graphs.
        counter: number of its `activation_stash.MissCounter`, 0 for none.
    """

    block = ""
    counter = 0


running = _Running()
