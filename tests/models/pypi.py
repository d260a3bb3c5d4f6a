"""MoE layers of PyPI packages, imported if they are installed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from .case import Case, Host, Suite, Verdict, list_tensors

SITE = os.environ.get("MOEFX_PYPI_SITE")  # a folder filled with `pip install --target`
if SITE and SITE not in sys.path:
    sys.path.append(SITE)

D, H, E, K = 64, 48, 8, 2


class _Stub(types.ModuleType):
    """Replace an optional dependency that the MoE code never calls."""

    __path__: list[str] = []  # type: ignore[misc]  # noqa: RUF012

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        methods = {
            "__init__": lambda self, *args, **kwargs: None,
            "__bool__": lambda self: False,
            "__class_getitem__": classmethod(lambda cls, key: cls),
        }
        return type(name, (), methods)


def _has(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def stub(*names: str) -> None:
    """Insert a stub for each missing module."""
    for name in names:
        if _has(name):
            continue
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                sys.modules[parent] = _Stub(parent)
                sys.modules[parent].__spec__ = importlib.machinery.ModuleSpec(parent, None)


def bare(*names: str) -> None:
    """Make packages importable without running their `__init__`, which imports much more."""
    for name in names:
        if name in sys.modules:
            continue
        top, *rest = name.split(".")
        spec = importlib.machinery.PathFinder.find_spec(top)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(top)
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(p, *rest) for p in spec.submodule_search_locations]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        if rest:
            setattr(sys.modules[name.rsplit(".", 1)[0]], rest[-1], module)


def one_process() -> None:
    """Create a process group of one process, for layers that call collectives."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def integer_histc() -> None:
    """Add an integer kernel on the CPU to `torch.histc`, which has one on CUDA only."""
    original = torch.histc
    if getattr(original, "_moefx_integer", False):
        return

    def histc(t, bins=100, min=0, max=0):
        if t.device.type == "cpu" and not t.is_floating_point():
            return original(t.float(), bins=bins, min=min, max=max).to(t.dtype)
        return original(t, bins=bins, min=min, max=max)

    histc._moefx_integer = True  # type: ignore[attr-defined]
    torch.histc = histc


class SwiGLU(nn.Module):
    """Expert for layers that get their experts as arguments."""

    def __init__(self, d=D, h=H):
        super().__init__()
        self.w1, self.w2 = nn.Linear(d, h, bias=False), nn.Linear(h, d, bias=False)
        self.w3 = nn.Linear(d, h, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class AuxHost(Host):
    """Host that also returns the auxiliary loss from an attribute of the block."""

    def forward(self, x, *extra):
        outputs = super().forward(x, *extra)
        return (*outputs, *list_tensors(getattr(self.moe, "l_aux", None)))


class PypiSuite(Suite):
    """Suite that lists only cases of installed packages."""

    package: dict[str, str]

    def __init__(self):
        super().__init__("pypi")
        self.package = {}

    def case_of(self, package: str, name: str, *args, **options):
        self.package[name] = package
        return self.case(name, *args, dim=D, **options)

    def names(self, verdict: Verdict | None = None) -> list[str]:
        return [n for n in super().names(verdict) if _has(self.package[n])]

    def missing(self) -> list[str]:
        return [f"{n}: package {p} is not installed" for n, p in self.package.items() if not _has(p)]

    def build(self, name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
        integer_histc()
        case = super().build(name, seed, dtype)
        if self.package[name] == "deepspeed":
            case.model.__class__ = AuxHost
        return case


PYPI = PypiSuite()


@PYPI.case_of("mistral_inference", "mistral_inference_moe", "I1b", "match", "rows by comparison", layout="flat")
def _mistral():
    bare("mistral_inference")
    stub("simple_parsing", "simple_parsing.helpers")
    moe = importlib.import_module("mistral_inference.moe")
    arguments = SimpleNamespace(num_experts=E, num_experts_per_tok=K)
    return moe.MoeLayer([SwiGLU() for _ in range(E)], nn.Linear(D, E, bias=False), arguments)


def _labml(drop: bool) -> nn.Module:
    bare("labml_nn", "labml_nn.transformers")
    switch = importlib.import_module("labml_nn.transformers.switch")
    ffn = importlib.import_module("labml_nn.transformers.feed_forward").FeedForward(D, H, dropout=0.0)
    return switch.SwitchFeedForward(capacity_factor=1.0, drop_tokens=drop, is_scale_prob=True, n_experts=E,
                                    expert=ffn, d_model=D)  # fmt: skip


@PYPI.case_of("labml_nn", "labml_switch", "I1d", "match", "top-1, rows assigned, probability at the end")
def _labml_keep():
    return _labml(False)


@PYPI.case_of("labml_nn", "labml_switch_drop", "I11", "either", "random drops that pass through", rng=True)
def _labml_drop():
    return _labml(True)


def _mixtures(cls: str) -> nn.Module:
    package, utils = (importlib.import_module(f"pytorch_mixtures{m}") for m in ("", ".utils"))
    expert = sorted(utils.EXPERT_REGISTRY)[0]
    config = package.MoEConfig(
        hidden_dim=D, intermediate_dim=H, num_experts=E, expert_fn=expert, expert_act="gelu", router_fn=None,
        capacity_factor=1.0, topk=K, dtype=torch.float32,
    )  # fmt: skip
    return getattr(package, cls)(config)


@PYPI.case_of("pytorch_mixtures", "pytorch_mixtures_topk", "I1b", "match", "router is a bare [d, E] parameter")
def _mixtures_topk():
    return _mixtures("TopkMoE")


@PYPI.case_of("pytorch_mixtures", "pytorch_mixtures_ec", "I10", "refuse", "expert choice")
def _mixtures_expert_choice():
    return _mixtures("ExpertChoiceMoE")


@PYPI.case_of("st_moe_pytorch", "st_moe", "I4", "either", "capacity, random threshold, straight-through", rng=True)
def _st_moe():
    bare("st_moe_pytorch", "colt5_attention")
    sys.modules["colt5_attention"].topk = importlib.import_module("colt5_attention.topk").topk  # type: ignore
    moe = importlib.import_module("st_moe_pytorch.st_moe_pytorch").MoE
    return moe(D, num_experts=E, expert_hidden_mult=1, gating_top_n=2)


def _deepspeed(k: int) -> nn.Module:
    stub("psutil", "hjson", "msgpack", "cpuinfo", "ninja", "py_cpuinfo")
    logging.disable(logging.WARNING)
    one_process()
    importlib.import_module("deepspeed")
    sharded = importlib.import_module("deepspeed.moe.sharded_moe")
    experts = importlib.import_module("deepspeed.moe.experts").Experts
    gate = sharded.TopKGate(D, E, k=k, capacity_factor=1.25, min_capacity=2, use_rts=False,
                            top2_2nd_expert_sampling=False)  # fmt: skip
    expert = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))
    return sharded.MOELayer(gate, experts(expert, E), "ep", 1, E)


def _no_used_token(batch, seq, generator, dtype):
    return (None,)


@PYPI.case_of("deepspeed", "deepspeed_top1", "I4", "either", "capacity dispatch, top-1", extra=_no_used_token)
def _deepspeed_top1():
    return _deepspeed(1)


@PYPI.case_of("deepspeed", "deepspeed_top2", "I4", "either", "capacity dispatch, top-2", extra=_no_used_token)
def _deepspeed_top2():
    return _deepspeed(2)


@PYPI.case_of("soft_moe_pytorch", "soft_moe", "I10", "refuse", "soft slots: every token goes to every slot")
def _soft_moe():
    return importlib.import_module("soft_moe_pytorch").SoftMoE(D, num_slots=4, num_experts=E)


@PYPI.case_of("soft_moe_pytorch", "soft_moe_dynamic", "I10", "refuse", "as many soft slots as the sequence needs")
def _soft_moe_dynamic():
    return importlib.import_module("soft_moe_pytorch").DynamicSlotsSoftMoE(D, num_experts=E)
