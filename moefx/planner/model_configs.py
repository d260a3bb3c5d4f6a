"""Read transformers configs and build their models. An error names the inconsistent sizes."""

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

# The names of sizes in transformers' configs, in the order of messages.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "moe_intermediate_size", *_EXPERTS, *_CHOICES, "n_group", "topk_group", "vocab_size",
)  # fmt: skip
_OWN_DEFAULT = ("num_key_value_heads", "head_dim", "n_group", "topk_group")  # optional in files


def load_config(path: str) -> Any:
    """Load a transformers config from a file, or from a directory with a `config.json`. Warns of missing sizes.

    Raises:
        UnknownArchitecture: `path` is not a transformers config, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(path)
    except ImportError as error:
        raise UnknownArchitecture(f"{path}: to read a config takes transformers, which is not installed") from error
    except Exception as error:  # transformers raises many kinds
        raise UnknownArchitecture(f"{path} is no transformers config: {error}") from error
    if missing := _find_missing(config, Path(path)):
        defaults = ", ".join(f"{name}={value}" for name, value in missing.items())
        warnings.warn(
            f"{path} does not say all sizes: {defaults} are defaults of {type(config).__name__}", stacklevel=2
        )
    return config


def describe_config(config: Any, example_inputs: Any = None) -> Architecture:
    """Describe the language model that transformers builds from a config.

    Raises:
        UnknownArchitecture: transformers builds no model, or one that does not run or has no experts. The message has
            the sizes at fault.
    """
    try:
        return describe(build_module(config), example_inputs)
    except (UnknownArchitecture, CaptureError) as error:
        sizes, seen = _read_sizes(config), str(error)
        problems = list(_find_invalid(sizes))
        if isinstance(error, CaptureError) and error.__cause__ and example_inputs is None:
            seen = (
                f"the model that transformers builds from this config does not run: {summarize_error(error.__cause__)}"
            )
            sizes_text = ", ".join(f"{name}={value}" for name, value in sizes.items())
            problems = problems or [f"some of its sizes do not go together, of {sizes_text} or others"]
        if not problems:
            raise
        raise UnknownArchitecture(f"{type(config).__name__}: {'; '.join(problems)} ({seen})") from error


def build_module(config: Any) -> nn.Module:
    """Build the language model of a transformers config on the meta device.

    Raises:
        UnknownArchitecture: transformers has no such model. The message has its reason.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # raised by the model's own code
        raise UnknownArchitecture(f"transformers makes no model of {type(config).__name__}: {error}") from error


def _read_sizes(config: Any) -> dict[str, Any]:
    """Return the sizes of a config, by the names in its file."""
    config = getattr(config, "text_config", None) or config
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return {name: fields[name] for name in _SIZES if fields.get(name) is not None}


def _find_missing(config: Any, path: Path) -> dict[str, Any]:
    """Find the sizes that are in the file under no name, with the default values that transformers uses."""
    inner = getattr(config, "text_config", None)
    fields = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    fields = {**fields, **(fields.get("text_config") or {})} if inner else fields
    aliases = getattr(inner or config, "attribute_map", {})
    named = set(fields) | {aliases.get(name) for name in fields}
    return {name: value for name, value in _read_sizes(config).items() if name not in (*named, *_OWN_DEFAULT)}


def _find_invalid(sizes: dict[str, Any]) -> Iterator[str]:
    """Describe an invalid field: its name, its value, and the expected one."""
    bad = {name: value for name, value in sizes.items() if type(value) is not int or value < 1}
    for name, value in bad.items():
        yield f"{name} is {value!r}, expected a whole number above 0"
    valid = {name: value for name, value in sizes.items() if name not in bad}

    def first(*names: str) -> tuple[str, int]:
        return next(((name, valid[name]) for name in names if name in valid), ("", 0))

    experts, heads, groups = first(*_EXPERTS), first("num_attention_heads"), first("n_group")
    for size, most in ((first(*_CHOICES), experts), (first("topk_group"), groups)):
        if 0 < most[1] < size[1]:
            yield f"{size[0]} is {size[1]}, expected at most {most[1]}, which is {most[0]}"
    dividend = ("", 0) if "head_dim" in valid else first("hidden_size")
    for part, multiple in ((heads, dividend), (first("num_key_value_heads"), heads), (groups, experts)):
        if part[1] and multiple[1] % part[1]:
            yield f"{part[0]} is {part[1]}, expected a divisor of {multiple[0]}, which is {multiple[1]}"
