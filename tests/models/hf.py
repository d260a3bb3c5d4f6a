"""Tiny runnable MoE architectures of `transformers` (5.x, and 4.57 if it has them)."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn as nn

from .case import Case, Inputs, Verdict, list_tensors
from .hf_table import BASE, CASES

INSTALLED = importlib.util.find_spec("transformers") is not None


def is_v4() -> bool:
    import transformers

    return transformers.__version__.startswith("4.")


def _module_of(spec: dict, kind: str) -> str:
    return f"transformers.models.{spec['dir']}.{kind}_{spec['dir']}"


def _is_available(spec: dict) -> bool:
    import transformers

    if transformers.__version__.startswith(tuple(spec.get("bad", ()))):
        return False
    try:
        return importlib.util.find_spec(_module_of(spec, "modeling")) is not None
    except ModuleNotFoundError:
        return False


def _accepted_fields(config_class: type) -> set[str]:
    accepted: set[str] = set()
    for base in config_class.__mro__:
        if dataclasses.is_dataclass(base):
            accepted |= {f.name for f in dataclasses.fields(base)}
        if "__init__" in base.__dict__:
            try:
                accepted |= set(inspect.signature(base.__init__).parameters)
            except (TypeError, ValueError):
                continue
    return accepted


def make_config(name: str) -> Any:
    """Return the tiny configuration of a case: fields of `BASE` that the class knows, then the case's own."""
    spec = CASES[name]
    config_class = getattr(importlib.import_module(_module_of(spec, "configuration")), spec["cfg"])
    accepted = _accepted_fields(config_class)
    fields = {k: v for k, v in BASE.items() if k in accepted}
    if "rope_scaling" in accepted and "rope_parameters" not in accepted:  # transformers 4
        fields.update(spec.get("v4_rope", {}))
    over = dict(spec["over"], **(spec.get("v4_over", {}) if is_v4() else {}))
    undeclared = ("global_head_dim", "num_global_key_value_heads")
    fields |= {k: v for k, v in over.items() if k in accepted or k.startswith("swa_") or k in undeclared}
    config = config_class(**fields)
    for attribute, value in spec.get("set", {}).items():
        setattr(config, attribute, value)
    _use_eager(config)
    return config


def _use_eager(config: Any) -> None:
    for attribute in ("_attn_implementation", "_experts_implementation"):
        try:
            setattr(config, attribute, "eager")
        except Exception:  # a config without this attribute needs no change
            continue


def _init(model: nn.Module, seed: int) -> None:
    """Set finite parameters, spread routers, and nonzero correction biases."""
    generator = torch.Generator().manual_seed(seed)

    def noise(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape, generator=generator)

    router = re.compile(r"(router|gate\.weight|gate\.wg|classifier|\.gate$|router\.)")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.is_floating_point():
                continue
            if router.search(name) and p.ndim == 2 and p.shape[0] <= 16:
                p.copy_(noise(p) * 0.3)
            elif p.ndim >= 2:
                p.copy_(noise(p) * (1.0 / max(p.shape[-1], 1)) ** 0.5 * 0.7)
            elif "bias" in name:
                p.copy_(noise(p) * 0.05)
            elif not torch.isfinite(p).all() or p.abs().sum() == 0:
                p.copy_(noise(p) * 0.1 + (1.0 if "norm" in name else 0.0))
        for name, b in model.named_buffers():
            if re.search(r"e_score_correction_bias|expert_bias|balancing_biases", name):
                b.add_(noise(b).to(b.dtype) * 0.02)
            if name.endswith("tid2eid"):
                for row in b:
                    row.copy_(torch.randperm(8, generator=generator)[: row.shape[0]])


@dataclasses.dataclass
class HfCase(Case):
    kind: str = "lm"
    top_k: int = 2

    def main(self, output: Any) -> torch.Tensor:
        if self.kind == "vit":
            return output.feature_maps[-1]
        if hasattr(output, "logits"):
            return output.logits
        return output.last_hidden_state if hasattr(output, "last_hidden_state") else list_tensors(output)[0]

    def loss_of(self, output: Any) -> torch.Tensor:
        y = self.main(output)
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        return (y * weight).mean() + 0.1 * (y * y).mean()

    def fresh(self, batch: int, seq: int, seed: int = 0) -> Inputs:
        g = torch.Generator().manual_seed(seed)
        if self.kind == "vit":
            pixels = torch.randn(batch, 3, 32, 32, generator=g).to(self.dtype)
            return {"pixel_values": pixels, "dataset_index": torch.randint(0, 4, (batch,), generator=g)}
        ids = torch.randint(3, 120, (batch, seq), generator=g)
        mask = torch.ones_like(ids)
        if self.kind == "embeds":
            x = torch.randn(batch, seq, 64, generator=g).to(self.dtype)
            return {"inputs_embeds": x, "attention_mask": mask, "use_cache": False}
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if self.kind == "encdec":
            inputs["decoder_input_ids"] = torch.randint(3, 120, (batch, max(1, seq // 2)), generator=g)
        if self.kind == "nocache":
            del inputs["use_cache"]
        return inputs

    def skew_(self, model: nn.Module) -> int:
        """Set opposite pairs of router rows for live experts, zeros and a bias of -5 for the others."""
        live = 6 if self.top_k > 2 else 4
        modules, changed = dict(model.named_modules()), 0
        with torch.no_grad():
            for block_name in self.block_names:
                block = modules[block_name]
                for name, t in [*block.named_parameters(), *block.named_buffers()]:
                    changed += _skew_entry_(name, t, live)
        return changed


def _skew_entry_(name: str, t: torch.Tensor, live: int) -> bool:
    if "expert" in re.sub(r"e_score|expert_bias|per_expert", "", name) and "shared" not in name:
        return False
    if re.search(r"(shared|gate_proj|up_proj|down_proj|norm|scale)", name):
        return False
    if name.endswith("tid2eid"):
        generator = torch.Generator().manual_seed(7)
        for row in t:
            row.copy_(torch.randperm(4, generator=generator)[: row.shape[0]])
        return True
    if not t.is_floating_point() or not 8 <= t.shape[0] <= 12:
        return False
    if t.ndim == 2 and re.search(r"(router|gate|classifier|wg)", name):
        t[1:live:2] = -t[0:live:2]
        t[live:] = 0
        return True
    if t.ndim == 1 and "bias" in name:
        t[:live], t[live:] = 0, -5
        return True
    return False


class HfSuite:
    """Interface of `Suite`; lists only cases that the installed transformers has."""

    name = "hf"

    def names(self, verdict: Verdict | None = None) -> list[str]:
        if not INSTALLED:
            return []
        return [n for n, s in CASES.items() if verdict in (None, s["verdict"]) and _is_available(s)]

    def build(self, name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
        spec = CASES[name]
        modeling = importlib.import_module(_module_of(spec, "modeling"))
        config = make_config(name)
        torch.manual_seed(seed)
        cls = getattr(modeling, spec["cls"])
        model = cls._from_config(config) if hasattr(cls, "_from_config") else cls(config)
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "to_dict"):
                _use_eager(module.config)
        _init(model, seed)
        model.to(dtype).train()
        blocks = [n for n, m in model.named_modules() if type(m).__name__ in spec["block"]]
        rng = name == "phimoe" or "jitter" in spec.get("note", "")
        why = spec.get("why", spec.get("router", ""))
        case = HfCase(name, spec["verdict"], why, spec["idiom"], model, dtype, blocks, rng,
                      kind=spec["kind"], top_k=spec.get("k", 2))  # fmt: skip
        case.inputs = case.fresh(2, 12, seed + 1)
        return case


HF = HfSuite()
