"""Registry of the plain cases: a minimal module for every idiom, and look-alikes."""

from .case import Suite

PLAIN = Suite("plain")
