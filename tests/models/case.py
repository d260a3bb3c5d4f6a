"""Interface of all models of the test corpus: `Case`, its registry, and the host module of most blocks.

Verdicts: "match" must be rewritten and equal; "refuse" must be refused with a reason and keep working; "either" is
rewritten exactly or refused, never approximated.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn as nn

Verdict = Literal["match", "refuse", "either"]
Inputs = tuple[Any, ...] | dict[str, Any]

D, H, E, K = 32, 24, 8, 2  # model dim, expert hidden dim, experts, top-k of the small blocks


def list_tensors(output: Any) -> list[torch.Tensor]:
    """List all tensors of a nested output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if dataclasses.is_dataclass(output) and not isinstance(output, (dict, type)):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in list_tensors(value)]
    return []


def weighted_mean(y: torch.Tensor) -> torch.Tensor:
    """Return a scalar that changes under permutations of tokens or features."""
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return (y * weight).mean() + 0.1 * (y * y).mean()


def run_and_differentiate(module: nn.Module, call: Callable, x: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    """Return the outputs of a call of the module, and the gradients of its first input and parameters."""
    x = x.clone().requires_grad_()
    out = [t for t in list_tensors(call(x, *rest)) if t.requires_grad]
    loss = sum(weighted_mean(t) for t in out)
    leaves = [x, *module.parameters()]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*out, *(torch.zeros_like(of) if g is None else g for of, g in zip(leaves, grads, strict=True))]


@dataclasses.dataclass
class Case:
    """Model in training mode with its example inputs. Two builds share nothing."""

    name: str
    verdict: Verdict
    why: str
    idiom: str
    model: nn.Module
    dtype: torch.dtype
    block_names: list[str]
    rng: bool = False  # the forward draws random numbers
    no_candidate: bool = False  # nothing looks like a mixture: explain() may omit it
    inputs: Inputs = ()

    def call(self, model: nn.Module, inputs: Inputs) -> Any:
        return model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    def fresh(self, batch: int, seq: int, seed: int = 0) -> Inputs:
        """Return new inputs: `batch` sequences of `seq` tokens."""
        raise NotImplementedError

    def main(self, output: Any) -> torch.Tensor:
        return list_tensors(output)[0]

    def loss_of(self, output: Any) -> torch.Tensor:
        main, aux = (
            self.main(output),
            [t for t in list_tensors(output) if t.is_floating_point() and t.requires_grad],
        )
        rest = sum(((t * t).mean().to(main.dtype) for t in aux if t is not main), main.new_zeros(()))
        return weighted_mean(main) + 0.01 * rest

    def skew_(self, model: nn.Module) -> int:
        """Starve about half of the experts by changing the routers in place. Return the number of changed tensors."""
        raise NotImplementedError


class Host(nn.Module):
    """Compute `post(h + moe(h))` with `h = pre(x)`: the block's input needs a gradient and may be changed in place."""

    def __init__(self, block: nn.Module, layout: str = "bsd", dim: int = D):
        super().__init__()
        self.pre, self.moe, self.post = nn.Linear(dim, dim), block, nn.Linear(dim, dim)
        self.layout = layout

    def forward(self, x, *extra):
        h = self.pre(x)
        if self.layout == "flat":
            h = h.reshape(-1, h.shape[-1])
        elif self.layout == "sbd":
            h = h.transpose(0, 1)
        y, *aux = list_tensors(self.moe(h, *extra))
        return (self.post(h + y.reshape(h.shape)), *aux)


ROUTER = re.compile(r"gate|gating|router|switch|wg|classifier|centroid|score|assign")
NOT_A_ROUTER = re.compile(r"proj|expert|shared|norm|noise|mlp|ffn|w_gate")


def skew_router_(name: str, t: torch.Tensor, num_experts: int, live: int) -> bool:
    """Set opposite pairs of router rows for live experts, zeros for the others (selected logits are > 0)."""
    if not t.is_floating_point() or num_experts not in t.shape:
        return False
    if t.ndim == 2 and ROUTER.search(name) and not NOT_A_ROUTER.search(name):
        rows = t if t.shape[0] == num_experts else t.t()
        rows[1:live:2], rows[live:] = -rows[0:live:2], 0
        return True
    if t.ndim == 1 and "bias" in name and not NOT_A_ROUTER.search(name.replace("expert_bias", "")):
        t[:live], t[live:] = 0, -5
        return True
    return False


def init_(model: nn.Module, seed: int) -> None:
    """Initialize seeded weights of usual size, and nontrivial biases and norms, so that tests notice missing ones."""
    generator = torch.Generator().manual_seed(seed)

    def noise(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape, generator=generator)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim <= 1:
                around = 1.0 if re.search(r"norm|bn\.weight|ln|scale|gamma", name) and "bias" not in name else 0.0
                p.copy_(around + 0.1 * noise(p))
            else:
                size = 0.5 if re.search(r"b1|b2|bias", name) else 1.0
                p.copy_(noise(p) * size / max(p.shape[-1], 8) ** 0.5)
        for name, b in model.named_buffers():
            if "bias" in name and b.is_floating_point():
                b.copy_(noise(b) * 0.05)


ExtraInputs = Callable[[int, int, torch.Generator, torch.dtype], tuple]


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Specification of the case of one block: `make()` builds the block, the other fields describe its use."""

    name: str
    idiom: str
    verdict: Verdict
    why: str
    make: Callable[[], nn.Module]
    rng: bool = False
    no_candidate: bool = False
    bare: bool = False  # the model is the block itself, under the name ""
    blocks: tuple[str, ...] = ()  # relative to the block, if it contains several
    layout: str = "bsd"  # layout of the block's input: "bsd", "sbd" (sequence first) or "flat" (tokens, dim)
    extra: ExtraInputs | None = None  # further positional inputs of the block
    inputs: ExtraInputs | None = None  # all inputs of a bare model that does not take [batch, seq, D]
    dim: int = D
    num_experts: int = E
    live: int = 4
    skew: Callable[[nn.Module], int] | None = None
    eval_mode: bool = False

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> BlockCase:
        torch.manual_seed(seed)
        block = self.make()
        if any(p.is_meta for p in block.parameters()):
            block.to_empty(device="cpu")
        model = block if self.bare else Host(block, self.layout, self.dim)
        init_(model, seed)
        model.to(dtype).train(not self.eval_mode)
        if self.bare:
            names = [""]
        else:
            names = [f"moe.{b}" for b in self.blocks] or ["moe"]
        case = BlockCase(self.name, self.verdict, self.why, self.idiom, model, dtype, names, self.rng,
                         self.no_candidate, spec=self)  # fmt: skip
        case.inputs = case.fresh(2, 12, seed + 1)
        return case


@dataclasses.dataclass
class BlockCase(Case):
    spec: BlockSpec = None  # type: ignore[assignment]

    def fresh(self, batch: int, seq: int, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        if self.spec.inputs is not None:
            return self.spec.inputs(batch, seq, generator, self.dtype)
        x = torch.randn(batch, seq, self.spec.dim, generator=generator).to(self.dtype)
        return (x, *(self.spec.extra(batch, seq, generator, self.dtype) if self.spec.extra else ()))

    def skew_(self, model: nn.Module) -> int:
        block = model if self.spec.bare else model.moe
        with torch.no_grad():
            if self.spec.skew is not None:
                return self.spec.skew(block)
            entries = [*block.named_parameters(), *block.named_buffers()]
            return sum(skew_router_(n, t, self.spec.num_experts, self.spec.live) for n, t in entries)


class Suite:
    """Named collection of cases; `suite.case(...)` decorates a module class or a function."""

    def __init__(self, name: str):
        self.name = name
        self.specs: dict[str, Any] = {}

    def case(self, name: str, idiom: str, verdict: Verdict, why: str = "", **options: Any):
        def register(make):
            assert name not in self.specs, name
            self.specs[name] = BlockSpec(name, idiom, verdict, why, make, **options)
            return make

        return register

    def names(self, verdict: Verdict | None = None) -> list[str]:
        return [n for n, spec in self.specs.items() if verdict in (None, spec.verdict)]

    def build(self, name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Case:
        return self.specs[name].build(seed, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())
