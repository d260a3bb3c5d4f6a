"""The registry of the plain cases: our own minimal module for every idiom, and look-alikes."""

from .case import Suite

PLAIN = Suite("plain")
