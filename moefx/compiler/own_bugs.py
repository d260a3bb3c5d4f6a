"""Tell bugs of moefx from errors of the user's code in a proof, and report them as such."""

from __future__ import annotations

from torch import fx, nn

from ..capture.environment.code_locations import is_internal_error
from ..errors import Refused, refuse_own_bug
from ..passes.pass_manager import PassError
from ..util.user_code import forward_line, user_line


def find_own_bug(error: Exception, block: nn.Module) -> Refused | None:
    """Return the refusal that reports a bug of moefx, or None if the user's code raised the error of a proof.

    The code of an `fx.GraphModule` has no lines: only errors that are certainly internal count as bugs there.
    """
    line, is_certain = user_line(error), isinstance(error, PassError) or is_internal_error(error)
    if not is_certain and (line or isinstance(block, fx.GraphModule)):
        return None
    return refuse_own_bug(error, line or forward_line(block))
