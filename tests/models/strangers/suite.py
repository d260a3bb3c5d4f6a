"""The registry of the strangers: MoE blocks as different people would write them."""

from ..case import Suite

STRANGERS = Suite("strangers")
