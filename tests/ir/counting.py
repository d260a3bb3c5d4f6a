"""Count calls of operations."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Counting:
    """`expert_mlp_backward` that counts its calls by part."""

    def __init__(self, op: Any):
        self.op, self.parts = op, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.parts[kwargs.get("part", "all")] += 1
        return self.op(*args, **kwargs)
