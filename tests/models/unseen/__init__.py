"""Unseen models. Importing the modules fills the registry."""

from . import (  # noqa: F401
    capacity,
    codebases,
    dispatch,
    experts,
    interfaces,
    lookalikes,
    routers,
)
from .suite import UNSEEN

__all__ = ["UNSEEN"]
