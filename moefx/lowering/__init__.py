"""Providers of the dialect's ops, and the choice between them."""
