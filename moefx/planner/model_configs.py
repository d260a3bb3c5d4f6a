"""transformers configs as models: read, made a module of and, where that goes wrong, which sizes do not go together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, UnknownArchitecture, summarize_error
from .architecture import Architecture
from .describe import describe

# What transformers' configs call the sizes that a model is made of, in the order in which they are told.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", *_EXPERTS, *_CHOICES, "n_group", "topk_group", "vocab_size",
)  # fmt: skip
_OWN_DEFAULT = ("num_key_value_heads", "head_dim", "n_group", "topk_group")  # files need not have these


def load_config(path: str) -> Any:
    """The transformers config of a file, or of a directory with a `config.json`. Warns of sizes that are not in it.

    Raises:
        UnknownArchitecture: it is none, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
    except ImportError as error:
        raise UnknownArchitecture(f"{path}: to read a config takes transformers, which is not installed") from error
    except Exception as error:  # whatever transformers trips over in it
        raise UnknownArchitecture(f"{path} is no transformers config: {error}") from error
    if missing := _missing(config, Path(path)):
        taken = ", ".join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(f"{path} does not say all sizes: {taken} are defaults of {type(config).__name__}", stacklevel=2)
    return config


def describe_config(config: Any, example_inputs: Any = None) -> Architecture:
    """The architecture of the language model that transformers makes of a config.

    Raises:
        UnknownArchitecture: it makes none, or one that does not run or has no experts; with the sizes to blame for it.
    """
    try:
        return describe(build_module(config), example_inputs)
    except (UnknownArchitecture, CaptureError) as error:
        sizes, seen = _sizes(config), str(error)
        wrong = list(_wrong(sizes))
        if isinstance(error, CaptureError) and error.__cause__ and example_inputs is None:
            seen = f"the model that transformers makes of it does not run: {summarize_error(error.__cause__)}"
            shown = ", ".join(f"{name}={value}" for name, value in sizes.items())
            wrong = wrong or [f"some of its sizes do not go together, of {shown} or others"]
        if not wrong:
            raise
        raise UnknownArchitecture(f"{type(config).__name__}: {'; '.join(wrong)} ({seen})") from error


def build_module(config: Any) -> nn.Module:
    """The language model of a transformers config, on the meta device.

    Raises:
        UnknownArchitecture: transformers has none for it; with its own reason.
    """
    from transformers import AutoModelForCausalLM  # whose config it is

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # of that model's code
        raise UnknownArchitecture(f"transformers makes no model of {type(config).__name__}: {error}") from error


def _sizes(config: Any) -> dict[str, Any]:
    """Those that a config has, by the names that it writes."""
    config = getattr(config, "text_config", None) or config
    written = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return {name: written[name] for name in _SIZES if written.get(name) is not None}


def _missing(config: Any, path: Path) -> dict[str, Any]:
    """Sizes that a file does not have, by other names neither, and what was taken instead."""
    inner = getattr(config, "text_config", None)
    read = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    read = {**read, **(read.get("text_config") or {})} if inner else read
    aliases = getattr(inner or config, "attribute_map", {})
    named = set(read) | {aliases.get(name) for name in read}
    return {name: value for name, value in _sizes(config).items() if name not in (*named, *_OWN_DEFAULT)}


def _wrong(sizes: dict[str, Any]) -> Iterator[str]:
    """Describe an invalid field: its name, its value, and the expected one."""
    bad = {name: value for name, value in sizes.items() if type(value) is not int or value < 1}
    for name, value in bad.items():
        yield f"{name} is {value!r}, expected a whole number above 0"
    good = {name: value for name, value in sizes.items() if name not in bad}

    def first(*names: str) -> tuple[str, int]:
        return next(((name, good[name]) for name in names if name in good), ("", 0))

    experts, heads, groups = first(*_EXPERTS), first("num_attention_heads"), first("n_group")
    for what, most in ((first(*_CHOICES), experts), (first("topk_group"), groups)):
        if 0 < most[1] < what[1]:
            yield f"{what[0]} is {what[1]}, expected {most[1]} at the most, which is {most[0]}"
    whole = ("", 0) if "head_dim" in good else first("hidden_size")
    for part, of in ((heads, whole), (first("num_key_value_heads"), heads), (groups, experts)):
        if part[1] and of[1] % part[1]:
            yield f"{part[0]} is {part[1]}, expected a divisor of {of[0]}, which is {of[1]}"
