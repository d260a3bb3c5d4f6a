"""`explain`: report the rewritten and refused blocks of a model, with reasons and memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..ir import op_providers
from .proof_trace import ProofTrace

if TYPE_CHECKING:
    from ..compiler.survey_result import Refusal
    from ..planner.decision import Decision

# How the GEMMs read lists of expert weights (`op_providers.weight_paths`). The last two copy in every call.
_WEIGHTS = {
    "stacked": "one stacked tensor, in place",
    "separate": "one tensor per expert, in place",
    "view": "a strided view over the experts' tensors, in place",
    "table": "a table of the experts' tensors, in place",
    "cast": "CAST to the dtype of the GEMMs",
    "stacked_copy": "COPIED into a stack",
}


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """A rewritten block, or several of one kind.

    Attributes:
        names: names of the modules in the model.
        kind: class of the module.
        num_experts, top_k: E and K.
        expert: the expression between the GEMMs of an expert. After ` | `, the expression of the last GEMM's result y
            and the routing weight w: `silu(g)*u | y*w`.
        drop: the drop rule; "" if no slot is dropped.
        holds_for: the proven specialization.
        routings: number of routings with the same canonical form.
        validation: result of the numeric check.
        seconds: time to prove and rewrite.
        saved_before, saved_after: estimated bytes per token that the experts keep for the backward; None if unknown.
        unfused: reason why the experts are not fused into one op; "" if they are.
        guards: conditions on sizes under which the rewrite holds.
        calls: calls of these blocks so far (rewritten, original, guard failures).
        also_for: specializations that later calls compiled.
        bodies: expressions of the fused experts as JSON, with the widths of their up-projections.
        trace: the probes of the proof.
    """

    names: tuple[str, ...]
    kind: str
    num_experts: int
    top_k: int
    expert: str
    drop: str
    holds_for: str
    routings: int
    validation: str
    seconds: float
    saved_before: int | None
    saved_after: int | None
    unfused: str = ""
    guards: tuple[str, ...] = ()
    calls: tuple[int, int, int] = (0, 0, 0)
    notes: tuple[str, ...] = ()
    also_for: tuple[str, ...] = ()
    bodies: tuple[tuple[str, tuple[int, ...]], ...] = ()
    trace: ProofTrace = dataclasses.field(default_factory=ProofTrace, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def no_kernels(self) -> str:
        """The reason why the fused GPU kernels do not support these experts; "" if they do."""
        reasons = [op_providers.explain_unsupported(*body) for body in self.bodies]
        return "; ".join(dict.fromkeys(reason for reason in reasons if reason))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The findings for one model. `print` it, or read `matched` and `refused`.

    Attributes:
        seconds: time to analyse the whole model.
        paths: number of calls in this process by (op, provider).
        weights: number of GEMMs by the way that they read weights (see `op_providers.weight_paths`).
        kernels: tile configurations of the GPU kernels with their reasons (see `op_providers.list_configurations`).
        planned: the planner's `planner.decision.Decision`; None without `plan="auto"`.
        gradients: over a mesh, the reduction of each group of parameters.
        trace: print the steps of each proof, too.
        verbose: print `paths`, `weights` and `kernels`, too, which count all models and checks of this process.
        is_compiled: the model was compiled; else `compile` would rewrite these blocks.
    """

    model: str
    matched: tuple[BlockReport, ...]
    refused: tuple[Refusal, ...]
    seconds: float
    paths: tuple[tuple[str, str, int], ...] = ()
    weights: tuple[tuple[str, int], ...] = dataclasses.field(
        default_factory=lambda: tuple(sorted(op_providers.weight_paths().items()))
    )
    kernels: tuple[str, ...] = dataclasses.field(default_factory=op_providers.list_configurations)
    planned: Decision | None = None
    gradients: tuple[str, ...] = ()
    trace: bool = False
    verbose: bool = False
    is_compiled: bool = True

    def to_json(self) -> str:
        return json.dumps(
            {
                "model": self.model,
                "is_compiled": self.is_compiled,
                "seconds": self.seconds,
                "matched": [{**self._to_dict(m), "no_kernels": m.no_kernels} for m in self.matched],
                "refused": [self._to_dict(r) for r in self.refused],
                "paths": [list(p) for p in self.paths],
                "kernels": list(self.kernels),
                "weights": dict(self.weights),
                "planned": self.planned and self.planned.to_dict(),
                "gradients": list(self.gradients),
            }
        )

    def _to_dict(self, report: Any) -> dict[str, Any]:
        fields = dataclasses.asdict(report)
        fields.pop("cause", None)  # the reason tells it to people
        if not self.trace:
            fields.pop("trace", None)
        return fields

    def __str__(self) -> str:
        blocks = sum(len(m.names) for m in self.matched)
        refused = sum(r.seen for r in self.refused)
        verb = "rewritten" if self.is_compiled else "would be rewritten"
        lines = [f"{self.model}: {blocks} MoE block(s) {verb}, {refused} refused, {self.seconds:.1f} s"]
        if total := sum(sum(m.calls[:2]) for m in self.matched):
            rewritten = sum(m.calls[0] for m in self.matched)
            lines.append(f"  so far {rewritten:,} of {total:,} calls of these blocks ran rewritten")
        for m in self.matched:
            lines += ["", f"  {_format_names(m.names)}   {m.kind}"]
            lines.append(f"    experts     E={m.num_experts}, top-{m.top_k}, each {_format_expert(m.expert)}")
            if m.drop:
                lines.append(f"    drops       {m.drop}")
            lines.append(f"    proof       one form under {m.routings} routings; numeric check: {m.validation}")
            lines.append(f"    holds for   {m.holds_for}")
            lines += [f"    guard       {g}" for g in m.guards]
            lines += [f"    also for    {key}" for key in m.also_for]
            if m.saved_after is not None:
                before = f"{m.saved_before:,} -> " if m.saved_before is not None else ""
                lines.append(f"    kept        {before}{m.saved_after:,} bytes a token for the backward of the experts")
            if reason := m.no_kernels:
                lines.append(f"    GPU kernels  the fused kernels do not run: {reason}")
            if m.unfused:
                lines.append(f"    not fused   {m.unfused}")
            rewritten, original, failed = m.calls
            if rewritten or original:
                guard = f", {failed} guard failures" if failed else ""
                lines.append(f"    calls       {rewritten} rewritten, {original} original{guard}")
            lines += [f"    note        {n}" for n in m.notes]
            lines += self._format_trace(m.trace)
        if self.gradients:
            lines += ["", "  gradients (reduced to the gradient of the mean loss over all ranks)"]
            lines += [f"    {line}" for line in self.gradients]
        if self.planned is not None:
            lines += ["", *(f"  {line}" for line in str(self.planned).splitlines())]
        for r in self.refused if self.trace else merge_refusals(self.refused):
            location = f"   {r.source}" if r.source else ""
            title = f"refused: {r.name or 'the model'}{location}" if r.seen else "nothing found"
            lines += ["", f"  {title}", f"    {r.reason}"]
            if r.culprits:
                lines.append(f"    culprits    {', '.join(r.culprits)}")
            if r.remedy:
                lines.append(f"    to match    {r.remedy}" if r.seen else f"    {r.remedy}")
            lines += self._format_trace(r.trace)
        if self.verbose and self.paths:
            lines += [
                "",
                "  in this process so far, all models and checks together",
                "  providers   " + ", ".join(f"{op}: {provider} x{n}" for op, provider, n in self.paths),
            ]
            lines.append(f"  weights     {self._format_weights()}")
            lines += [f"  kernel      {line}" for line in self.kernels]
        return "\n".join(lines)

    def _format_trace(self, trace: ProofTrace | None) -> list[str]:
        if not self.trace or trace is None:
            return []
        return [f"    {line}" for line in trace.format_lines()]

    def _format_weights(self) -> str:
        counts = dict(self.weights)
        texts = [f"{text} x{counts[path]}" for path, text in _WEIGHTS.items() if path in counts]
        copies = counts.get("cast", 0) + counts.get("stacked_copy", 0)
        return ", ".join([*texts, *([] if copies else ["no copies"])])


def merge_refusals(refusals: Iterable[Refusal]) -> list[Refusal]:
    """Merge refusals with equal reasons to one, with the names and source lines of all."""
    groups: dict[tuple[object, ...], list[Refusal]] = {}
    for r in refusals:
        groups.setdefault((r.reason, r.culprits, r.remedy), []).append(r)
    merged = []
    for first, *duplicates in groups.values():
        if duplicates:
            names = tuple(dict.fromkeys(r.name for r in (first, *duplicates)))
            lines = list(dict.fromkeys(r.source for r in (first, *duplicates) if r.source))
            lines = lines if len(lines) <= 2 else [f"{lines[0]} ... {lines[-1]} ({len(lines)} lines)"]
            name = names[0] if len(names) == 1 else _format_names(names)
            first = dataclasses.replace(first, name=name, source=", ".join(lines))
        merged.append(first)
    return merged


def _format_expert(expert: str) -> str:
    """Format `silu(g)*u | y*w` as `up -> silu(g)*u -> down = y -> y*w`."""
    if "(" not in expert and " | " not in expert and "*" not in expert:
        return expert
    texts = []
    for body in expert.split("; "):
        act, bar, out = body.partition(" | ")
        texts.append(f"up -> {act} -> down" + (f" = y -> {out}" if bar else ""))
    return "; ".join(texts)


def _format_names(names: tuple[str, ...]) -> str:
    """Format names: `model.layers.1.mlp ... model.layers.47.mlp (47)` for many, all names for few."""
    labels = [n or "(the model itself)" for n in names]
    return ", ".join(labels) if len(labels) <= 2 else f"{labels[0]} ... {labels[-1]} ({len(labels)} blocks)"
