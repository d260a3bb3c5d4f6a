"""Names of modules in messages."""


def quote_name(name: str) -> str:
    """Quote the name of a module for a message."""
    return repr(name) if name else "'' (the model itself)"
