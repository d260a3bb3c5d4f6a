"""What a block writes, or draws from, that no graph can: lists, globals, plain tensors, generators of its own."""

from __future__ import annotations

from ..capture.captured import Capture
from ..capture.surroundings import ARGUMENT
from ..errors import Refused

NO_CACHE = (
    "pass example_inputs with which the model makes no cache (use_cache=False), or leave it to a submodule that is "
    "given it, such as the attention, or make the mixture of experts a module of its own that takes hidden states only"
)


def refuse_effects(taken: Capture) -> None:
    """Raises:
    Refused: a call leaves something behind that a rewritten one would not, or draws what it would not draw anew.
    """
    for effect in taken.effects:
        if effect.kind == "draw":
            raise Refused(
                f"the block draws from {effect.target}: the numbers of one call would be those of all",
                culprits=(str(effect.target),),
                remedy="draw them with torch, as a tensor",
            )
        if effect.kind == "record":
            raise Refused(
                f"the block writes to {effect.target} when it is called",
                culprits=(str(effect.target),),
                remedy=f"return it; if it is a cache, {NO_CACHE}"
                if effect.target == ARGUMENT
                else "return it, keep it in a buffer, or record it with a hook; if it is a cache, call the model once "
                "before moefx.compile",
            )
