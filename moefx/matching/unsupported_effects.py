"""Refuse side effects that a rewritten block cannot repeat: lists, globals, plain tensors, generators of its own."""

from __future__ import annotations

from ..capture.state.outside_state import ARGUMENT
from ..capture.tracing.capture_result import Capture
from ..errors import Refused

NO_CACHE = (
    "pass example_inputs that create no cache (use_cache=False), pass the cache on to a submodule such as the "
    "attention, or move the MoE block into a module that takes hidden states only"
)


def refuse_effects(capture: Capture) -> None:
    """Check that a graph can repeat all side effects of a capture.

    Raises:
        Refused: the block writes to a Python object, or draws from a generator that is not torch's.
    """
    for effect in capture.effects:
        if effect.kind == "draw":
            raise Refused(
                f"the block draws from {effect.target}: every call would get the numbers of one call",
                culprits=(str(effect.target),),
                remedy="draw them with torch, as a tensor",
            )
        if effect.kind == "record":
            raise Refused(
                f"the block writes to {effect.target} when it is called"
                + (", a tensor that this line computes" if effect.source else ""),
                culprits=(str(effect.target),),
                source=effect.source,
                remedy="return it beside the output, `return out, loss`, and let the caller append it; if it is a "
                f"cache, {NO_CACHE}"
                if effect.target == ARGUMENT
                else "return it, keep it in a buffer, set the attribute anew (self.losses = [loss]), or record it with "
                "a hook; if it is a cache, call the model once before moefx.compile",
            )
