"""Show rewritten graphs to users of `TORCH_LOGS="+moefx"` and of tlparse (`TORCH_TRACE=directory`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from torch import fx

from ...runtime.block_forward import find_rewritten_blocks

_log = logging.getLogger(__name__)
Text = Callable[[], str]  # computed only if it is read


def log_artifacts(out: fx.GraphModule, explained: Text) -> None:
    """Log the graph with its regions, and add it to torch's trace of this compilation.

    Args:
        explained: makes the text of `explain`.
    """
    for name, text in _iterate_texts(out, explained):
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s\n%s", name, text())
        _trace(name, text)


def _iterate_texts(out: fx.GraphModule, explained: Text) -> Iterator[tuple[str, Text]]:
    yield "moefx_explain", explained
    for forward in find_rewritten_blocks(out).values():
        yield f"moefx_region_{forward.name}", lambda f=forward: str(f.compiled_program.history.graph)
    yield "moefx_graph", lambda: out.print_readable(print_output=False)


def _trace(name: str, text: Text) -> None:
    try:  # private in torch; a torch without it traces nothing
        from torch._logging._internal import trace_structured

        trace_structured(
            "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text, expect_trace_id=False
        )
    except Exception as error:
        _log.debug("%s is not in torch's trace: %s", name, error)
