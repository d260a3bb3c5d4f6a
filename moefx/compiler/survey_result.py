"""The result of a survey: matched blocks, and refusals of modules that look like one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from .._plan import Plan
from ..capture.search.block_search import SurveyedCall
from ..errors import Cause
from ..inspection.proof_trace import ProofTrace
from ..ir.guards.attribute_reads import AttributeLocation
from .block_compiler import BlockRewrite, finish_block

if TYPE_CHECKING:
    from ..runtime.ranks.expert_layout import ExpertLayout


@dataclasses.dataclass
class Refusal:
    """A module that looks like an MoE block and was left unchanged.

    Attributes:
        name: the module's name in the model.
        reason: the cause, in one sentence.
        source: the user's `file.py:line`, or "".
        culprits: operations or parameters that prevent the rewrite.
        remedy: the change after which it would match, or "".
        likely: it holds expert-like parameters; otherwise it only selects something, as sparse attention does.
        seen: the reason describes the module; otherwise it says why nothing was seen.
        trace: the steps of its proof; None if there was no proof.
        cause: the kind of the refusal, for code.
    """

    name: str
    reason: str
    source: str = ""
    culprits: tuple[str, ...] = ()
    remedy: str = ""
    likely: bool = True
    seen: bool = True
    trace: ProofTrace | None = dataclasses.field(default=None, repr=False, compare=False)
    cause: Cause = dataclasses.field(default=Cause.OTHER, repr=False, compare=False)

    def __str__(self) -> str:
        location = f" ({self.source})" if self.source else ""
        culprits_text = f" [{', '.join(self.culprits)}]" if self.culprits else ""
        return f"{self.name or 'the model'}: {self.reason}{culprits_text}{location}" + (
            f"; {self.remedy}" if self.remedy else ""
        )


@dataclasses.dataclass(frozen=True)
class MatchedBlock:
    """Modules of one kind that were proven and rewritten together. Each stage returns a new one.

    Attributes:
        result: the rewrite: proven, after `survey_model`; with all passes, after `finish`.
        attributes_read: attributes that the proof depends on.
        verdict: the result of the numeric check, in words; "" before it.
        expert_layout: which rank of a mesh holds which experts; None without a mesh.
    """

    names: tuple[str, ...]
    call: SurveyedCall
    result: BlockRewrite
    seconds: float
    attributes_read: frozenset[AttributeLocation]
    verdict: str = ""
    expert_layout: ExpertLayout | None = None

    def finish(self, block: nn.Module, plan: Plan, keeps_captured: bool = True) -> MatchedBlock:
        """Run `finish_block` on the first of the modules, `block`."""
        result = finish_block(block, self.result, plan, self.expert_layout, keeps_captured)
        return dataclasses.replace(self, result=result)


@dataclasses.dataclass(frozen=True)
class Survey:
    """The blocks of a model. Each stage returns a new one.

    Attributes:
        has_attention: whether the model has attention.
        traffic: see `BlockCandidates`.
        twin: the copy of the model that was surveyed, with the model's parameters and buffers. Captures swap parameters
            while others may use the model. The model itself if it cannot be copied.
        copies: maps each module of the model to its module in the twin; empty if the model cannot be copied.
        unchecked: blocks whose numeric check could not run, with the reasons.
    """

    matched: tuple[MatchedBlock, ...]
    refused: tuple[Refusal, ...]
    seconds: float
    has_attention: bool
    twin: nn.Module
    copies: dict[nn.Module, nn.Module]
    unchecked: tuple[str, ...] = ()
    traffic: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def layout_by_name(self) -> dict[str, ExpertLayout]:
        """The layout of each block whose experts are spread over a mesh, by the block's name."""
        return {name: m.expert_layout for m in self.matched for name in m.names if m.expert_layout is not None}
