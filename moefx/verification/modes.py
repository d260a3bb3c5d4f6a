"""More modes for `verify` to compare in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from ..comparison.sandbox import RunOptions
from ..errors import InvalidInput, nearest

MODE_NAMES = ("train", "eval", "no_grad", "inference_mode")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode of a comparison.

    Attributes:
        training: train or eval mode for all modules; None keeps the models' modes.
        grads: "no_grad" or "inference_mode"; None follows the argument `grads` of `verify`.
    """

    training: bool | None = None
    grads: str | None = None

    def __str__(self) -> str:
        training = {None: "", True: "train", False: "eval"}[self.training]
        return "+".join(filter(None, [training, self.grads]))

    def apply_to(self, options: RunOptions) -> RunOptions:
        """Return options for runs in this mode."""
        if self.grads is not None:
            options = dataclasses.replace(
                options, grads=False, has_second_backward=False, inference=self.grads == "inference_mode"
            )
        return dataclasses.replace(options, training=self.training)


def parse_modes(names: Iterable[str]) -> list[Mode]:
    """Parse names such as "eval", "no_grad" and "eval+inference_mode".

    Raises:
        InvalidInput: a name is not a mode.
    """
    if isinstance(names, str):
        names = (names,)
    modes = []
    for name in names:
        parts = str(name).split("+")
        training, grads = ([p for p in parts if p in group] for group in (MODE_NAMES[:2], MODE_NAMES[2:]))
        if len(training) > 1 or len(grads) > 1 or len(training) + len(grads) < len(parts):
            raise InvalidInput(
                f"verify: modes={name!r}: expected {', '.join(MODE_NAMES)}, or a combination of train or eval with "
                f'no_grad or inference_mode, as in "eval+no_grad"{nearest(str(name), MODE_NAMES)}'
            )
        modes.append(Mode(training[0] == "train" if training else None, grads[0] if grads else None))
    return list(dict.fromkeys(modes))


__all__ = ["Mode", "parse_modes"]
