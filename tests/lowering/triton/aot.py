"""Compile the kernels for GPUs that this machine lacks, and print a JSON line for each.

    python -m tests.lowering.triton.aot --targets sm90,gfx942 --dtypes bfloat16 [--cases halves | --everything]

The providers run on small CPU tensors while a fake driver of Triton reports the target, and each launch stops after
compiling. So it compiles the kernels that a GPU would get, specialized by sizes and alignment. It needs its own process
without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moefx.ir.expressions.expert_body import ExpertBody, Gemm
from moefx.ir.ops.dialect import DROP_RULES
from moefx.lowering.triton import autotune, build_pft, exchange_ops, expert_mlp_steps, peer_ops, tile_configs, tuning
from moefx.lowering.triton import expert_mlp_call as run_module
from moefx.lowering.triton.tile_configs import GemmConfig

from ...ir.routings import Layer, interleaved_clamped, swiglu_list, weight_before

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# tf32: float32 if torch may use it (`torch.backends.cuda.matmul.fp32_precision`).
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}
SIZE = (64, 2, 8)  # tokens, slots, experts


def swiglu_halves(num_experts: int, d: int, h: int, dtype: torch.dtype) -> Layer:
    """SwiGLU, stacked [E, 2F, D] with concatenated gate and up. The routing weight multiplies the output."""

    def expert(*_: Any) -> Tensor:
        raise NotImplementedError

    body = ExpertBody(
        up=(Gemm(1, True),),
        parts=((0, None, h, 1), (0, h, None, 1)),
        act=("mul.Tensor", ("silu", "a0"), "a1"),
        down=Gemm(1, True),
        out=("mul.Tensor", "y", "w"),
    )
    up, down = torch.empty(num_experts, 2 * h, d, dtype=dtype), torch.empty(num_experts, d, h, dtype=dtype)
    return Layer(body, [up], [], [down], [], expert)


@dataclasses.dataclass(frozen=True)
class Case:
    """Layer and the options of its call.

    `needs`: the argument of `expert_mlp_backward`. `weights`: the dtype of routing weights, None for the layer's dtype.
    """

    make: Callable[..., Layer]
    keep: str
    reduce: bool
    d: int = 256
    h: int = 512
    needs: Sequence[bool] = (True,) * 6
    weights: torch.dtype | None = None
    stash_rows: float | None = None


CASES = {
    "halves": Case(swiglu_halves, "h", True),
    "halves_recomputed": Case(swiglu_halves, "x", True),
    "stashed": Case(swiglu_halves, "all", True, stash_rows=8.0),
    "frozen": Case(swiglu_halves, "h", True, needs=(True, True, False, False, False, False)),
    "separate": Case(swiglu_list, "h", True),
    "separate_recomputed": Case(swiglu_list, "x", False, weights=torch.float32),
    # Like the 2880 of gpt-oss: a multiple of 64, but of no larger tile.
    "interleaved": Case(interleaved_clamped, "h", True, 320, 320),
    "interleaved_rows": Case(interleaved_clamped, "x", False, weights=torch.float32),
    "before": Case(weight_before, "h", True),
    "before_float32": Case(weight_before, "x", True, weights=torch.float32),
}


class Compiler:
    """Replace Triton's driver and `JITFunction.run`: compile for `target`, and print each compiled kernel once."""

    def __init__(self) -> None:
        self.target = self.dtype = self.case = self.choice = ""
        self.seen: set[Any] = set()
        self.stock_run = JITFunction.run

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target]

    def get_current_device(self) -> int:
        return list(TARGETS).index(self.target)  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def run(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiler:
        launch = {name: value for name, value in options.items() if isinstance(value, (int, str))}
        line = dict(kernel=function.__name__, target=self.target, dtype=self.dtype, launch=launch)
        line |= dict(case=self.case, choice=self.choice)
        begin = time.perf_counter()
        try:
            kernel = self.stock_run(function, *args, grid=grid, warmup=True, **options)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # each function of a kernel adds the line of its caller
                cause = cause.__cause__
            line["error"] = f"{type(cause).__name__}: {cause}"[-1500:]
            key = (function, self.target, str(launch))
        else:
            line["seconds"] = round(time.perf_counter() - begin, 2)
            key = (function, self.target, kernel.hash)
        if key not in self.seen:
            self.seen.add(key)
            print(json.dumps(line if "error" in line else line | count_resources(kernel)), flush=True)
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Replace a compiled kernel's launcher."""
        return lambda *args: None


def install() -> Compiler:
    """Make launches only compile, and make the host code see the target instead of its tensors' device."""
    compiler = Compiler()
    triton.runtime.driver.set_active(compiler)
    JITFunction.run = lambda function, *args, **options: compiler.run(function, *args, **options)
    tile_configs.get_target = run_module.get_target = lambda device: compiler.target
    autotune.can_tune = lambda *_: False
    stock_precision, gpu = run_module.choose_matmul_precision, torch.device("cuda")
    run_module.choose_matmul_precision = lambda x: stock_precision(types.SimpleNamespace(dtype=x.dtype, device=gpu))
    # Recorded launches (see `launch_replay`) belong to another target or configuration.
    expert_mlp_steps.replay_or_record = build_pft.replay_or_record = lambda key, inputs, constants, host_code, *_: (
        host_code()
    )
    return compiler


def count_resources(kernel: Any) -> dict[str, Any]:
    """Return registers and spills per thread, bytes of shared memory, and the number of matrix instructions."""
    asm = kernel.asm
    found = dict(shared=kernel.metadata.shared, tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0)
    if "amdgcn" in asm:
        names = dict(
            registers="vgpr_count",
            vgpr_spills="vgpr_spill_count",
            sgpr_spills="sgpr_spill_count",
            stack="private_segment_fixed_size",
        )
        for name, field in names.items():
            match = re.search(rf"\.{field}:\s+(\d+)", asm["amdgcn"])
            assert match, field
            found[name] = int(match[1])
        return found | dict(mfma=asm["amdgcn"].count("v_mfma"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    # The kernels have no arrays or calls: the stack holds spilled registers.
    found |= dict(registers=used["REG"], stack=used["STACK"] + used["LOCAL"])
    names = dict(wgmma="wgmma.mma_async", mma="mma.sync", tcgen05="tcgen05.mma")
    return found | {name: asm["ptx"].count(instruction) for name, instruction in names.items()}


def run_build_pft(
    size: tuple[int, int, int], dtype: torch.dtype, drop: str, has_keep: bool = False
) -> tuple[Tensor, ...]:
    """Run `build_pft` for (tokens, slots, experts) and its backward."""
    *shape, num_experts = size
    ids, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=dtype)
    keep = torch.empty(shape, dtype=torch.bool) if has_keep else None
    capacity = None if drop == "none" else 16
    pft = build_pft.build_pft(ids, weights, keep, num_experts=num_experts, capacity=capacity, drop=drop)
    build_pft.build_pft_backward(pft[-1], pft[-2])
    return pft


def compile_routings(dtype: torch.dtype) -> None:
    # The second size uses larger blocks.
    for size, drop, has_keep in itertools.product([SIZE, (2**17, 8, 256)], DROP_RULES, [False, True]):
        run_build_pft(size, dtype, drop, has_keep)
    num_tokens, num_slots, num_experts = SIZE
    build_pft.build_pft(torch.empty((num_tokens, num_slots), dtype=torch.int32), None, None, num_experts=num_experts)


def run_forward_and_backward(case: Case, dtype: torch.dtype) -> None:
    num_tokens, _, num_experts = SIZE
    layer = case.make(num_experts, case.d, case.h, dtype)
    x = torch.empty(num_tokens, case.d, dtype=dtype)
    # This rule needs every kernel of the routing.
    token_ids, _, offsets, inverse, weights = run_build_pft(SIZE, case.weights or dtype, "weight")
    args = (x, token_ids, offsets, inverse, weights, layer.up, layer.up_bias, layer.down, layer.down_bias)
    options = dict(body=layer.text, keep=case.keep, reduce=case.reduce, stash_rows=case.stash_rows)
    out, *kept = expert_mlp_steps.expert_mlp(*args, **options)
    expert_mlp_steps.expert_mlp_backward(torch.empty_like(out), *args, kept, **options, needs=case.needs)
    run_module.KernelCall(args, layer.text, case.keep, None).gather(x)  # some configurations do not gather rows


def compile_exchanges(dtype: torch.dtype) -> None:
    """Find, pack, unpack and sum rows, over two nodes of four ranks."""
    num_tokens, num_slots, num_experts = SIZE
    ids, weights = torch.empty((num_tokens, num_slots), dtype=torch.int64), torch.empty(num_tokens, num_slots)
    keep, x = torch.empty(ids.shape, dtype=torch.bool), torch.empty(num_tokens, 128, dtype=dtype)
    for places, kept in ((range(num_experts), None), (range(num_experts)[::-1], keep)):
        place = exchange_ops.place_choices(ids, kept, places=list(places))
    for dedup, near in itertools.product((True, False), ([], [0, 4])):
        exchange_ops.count_rows(place, levels=[2, 4], num_slots=1, dedup=dedup, near=near)
        token_ids, slot_ids, offsets, inverse = exchange_ops.plan_dispatch(place, num_ranks=2, num_slots=4, dedup=dedup)
        options = dict(num_rows=num_tokens, num_slots=4, dedup=dedup)
        packed = exchange_ops.pack_rows([x, x[:, :127]], [weights], place, token_ids, slot_ids, offsets, **options)
    columns = dict(dtypes=[str(dtype).removeprefix("torch."), "int8"], widths=[128, 2])
    rows, places = exchange_ops.split_columns([packed], **columns, places=True)
    exchange_ops.join_columns([rows, places])
    exchange_ops.combine(rows, None, token_ids, offsets, inverse)
    exchange_ops.combine(rows, weights.flatten(), token_ids, offsets, inverse)
    for peers in ([x, x], [x[:, 1:], x[:, 1:]]):  # aligned or not
        peer_ops.read_rows(peers, torch.cat([place, place]), experts_per_rank=4)
        peer_ops.add_rows(peers, place, experts_per_rank=4, first_row=0)


def list_roles(kernel: str, device: torch.device, dtype: torch.dtype) -> list[GemmConfig]:
    return [tiles for tiles in tile_configs.list_candidates(kernel, device, dtype) if tiles.roles]


def list_configurations(dtype: torch.dtype, everything: bool) -> Iterator[tuple[str, dict[str, GemmConfig]]]:
    """Yield the origin of a configuration, and tiles for `tile_configs.KERNELS` in place of `tuning.choose_config`'s.

    Origins are "default", "separate" (kernels for the pointwise part), "roles" (warp specialization) and, with
    `everything`, all configurations of "tuning".
    """
    yield "default", {}
    device, sizes, by_shape = torch.device("cpu"), [512, 768, 1024, 1536, 2048, 2880, 4096, 7168], {}
    for kernel in tile_configs.KERNELS:
        shapes = itertools.product(sizes, sizes, [1, 16, 64, 256, 1024, 4096])
        by_shape[kernel] = list(
            dict.fromkeys(tuning.find_nearest_config(kernel, device, dtype, shape)[0] for shape in shapes)
        )
    yield "separate", {k: dataclasses.replace(by_shape[k][0], fused=False) for k in ("up", "act_backward")}
    for i in range(2):
        yield "roles", {k: configs[i] for k in tile_configs.KERNELS if len(configs := list_roles(k, device, dtype)) > i}
    if everything:
        yield from (("default", {kernel: tiles}) for kernel, configs in by_shape.items() for tiles in configs)
        for kernel in tile_configs.KERNELS:
            yield from (("tuning", {kernel: tiles}) for tiles in tile_configs.list_candidates(kernel, device, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--cases", default="halves")
    parser.add_argument("--everything", action="store_true", help="all cases, configurations and rules to drop by")
    options = parser.parse_args()
    compiler = install()
    stock_config = run_module.choose_config
    cases = list(CASES) if options.everything else options.cases.split(",")
    for target, name in itertools.product(options.targets.split(","), options.dtypes.split(",")):
        compiler.target, compiler.dtype, compiler.case, compiler.choice = target, name, "routing", "default"
        torch.backends.cuda.matmul.fp32_precision = "tf32" if name == "tf32" else "ieee"
        dtype = DTYPES[name]
        if options.everything and name == "float32":  # float32 routings only move weights
            compile_routings(dtype)
        compiler.case = "travelling"
        compile_exchanges(dtype)
        for (choice, forced), case in itertools.product(list_configurations(dtype, options.everything), cases):
            compiler.choice, compiler.case = choice, case
            run_module.choose_config = lambda kernel, *args, forced=forced: (
                forced.get(kernel) or stock_config(kernel, *args)
            )
            run_forward_and_backward(CASES[case], dtype)


if __name__ == "__main__":
    main()
