"""Register all providers. moefx imports this module before the first op runs."""

from __future__ import annotations

import os

from ..ir.op_providers import prefer_providers
from . import torch as _torch_providers  # noqa: F401

from . import triton as _triton_providers  # noqa: F401  isort: skip

prefer_providers(os.environ.get("MOEFX_PROVIDERS", ""))
