"""Triton's kernels run in its interpreter where there is no GPU; it looks at this when it is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
