"""Triton's kernels run in its interpreter where there is no GPU; it looks at this when it is first imported.

Where there is one, a test that does not ask for it tunes no kernel.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("MOEFX_AUTOTUNE", "0")
