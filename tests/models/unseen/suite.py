"""Registry of the unseen models: MoE blocks as different people would write them."""

from ..case import Suite

UNSEEN = Suite("unseen")
