"""Distributed blocks on GPUs, with the Triton kernels: one GPU per rank with NCCL, or a shared one with gloo."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefx
from moefx.bench.ep_layers import Layer
from moefx.bench.shapes import Shape
from moefx.errors import InvalidInput
from moefx.ir import op_providers

from ..blocks import D
from .models import Model, compile_over_mesh
from .pipeline_training_cases import LENGTH, VOCAB, Decoder, loss_fn

SHAPE = Shape("small", T=300, d=128, h=64, E=16, K=4)

_ALIVE_AT_THE_END: list[object] = []


def make_mesh():
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("ep",))


def case_ways() -> None:
    mesh = make_mesh()
    torch.manual_seed(0)
    layer = Layer(SHAPE, shared=True)
    for dispatch in ("flat", "dedup", "rbd", "halo", "pull", *(["gather"] if dist.get_backend() == "nccl" else [])):
        plan = moefx.Plan(
            dispatch=dispatch,
            node_size=dist.get_world_size() // (1 if dispatch == "pull" else 2),
            validation="symbolic",
            chunks=1 + (dispatch == "dedup"),
        )
        example = (torch.zeros(64, SHAPE.d, device="cuda", dtype=torch.bfloat16),)
        compiled = moefx.compile(copy.deepcopy(layer), mesh=mesh, plan=plan, example_inputs=example)
        x = torch.randn(SHAPE.T + dist.get_rank(), SHAPE.d, device="cuda").bfloat16()
        op_providers.reset_counters()
        moefx.verify(compiled, layer, (x,)).raise_if_failed()
        used = {op: provider for op, provider in op_providers.counters()}
        ops = {"gather": ("split_columns",), "pull": ("read_rows", "add_rows")}
        others = ops.get(dispatch, ("pack_rows", "split_columns", "combine", "count_rows"))
        for op in ("expert_mlp", "expert_mlp_backward", *others):
            assert used[op] == "triton", op_providers.counters()


def case_auto() -> None:
    """Consider "gather" over NCCL only: gloo cannot run it on GPUs."""
    torch.manual_seed(0)
    layer, mesh = Layer(SHAPE), make_mesh()
    example = (torch.zeros(64, SHAPE.d, device="cuda", dtype=torch.bfloat16),)
    plan = moefx.Plan(node_size=dist.get_world_size(), validation="symbolic")
    compiled = moefx.compile(copy.deepcopy(layer), mesh=mesh, plan=plan, example_inputs=example)
    (note,) = moefx.explain(compiled).matched[0].notes
    if dist.get_backend() == "nccl":
        assert "dedup" in note, note
        assert "gather" in note, note
        assert "a CUDA graph needs Plan" in note, note
    else:
        assert "auto: one level, and 'dedup' sends the fewest rows" in note, note
    x = torch.randn(SHAPE.T + dist.get_rank(), SHAPE.d, device="cuda").bfloat16()
    moefx.verify(compiled, layer, (x,)).raise_if_failed()


def case_micro_batches_in_flight() -> None:
    """Give each micro-batch its own buffers and reuse memory of earlier ones: later steps allocate nothing."""
    torch.manual_seed(0)
    layer, mesh = Layer(SHAPE), make_mesh()
    plan = moefx.Plan(dispatch="halo", node_size=dist.get_world_size() // 2, validation="symbolic")
    example = (torch.zeros(64, SHAPE.d, device="cuda", dtype=torch.bfloat16),)
    compiled = moefx.compile(layer, mesh=mesh, plan=plan, example_inputs=example)
    batches = [torch.randn(SHAPE.T + i, SHAPE.d, device="cuda").bfloat16().requires_grad_() for i in range(3)]

    def gradients(at_once: int) -> list[torch.Tensor]:
        for begin in range(0, len(batches), at_once):
            outs = [compiled(x) for x in batches[begin : begin + at_once]]
            for out in outs:
                out.square().sum().backward()
        found = [x.grad for x in batches]
        for t in (*batches, *compiled.parameters()):
            t.grad = None
        return found

    one_by_one = gradients(1)
    for step in range(12):
        assert all(map(torch.equal, gradients(3), one_by_one))
        if step == 5:
            asked = torch.cuda.memory_stats()["segment.all.allocated"]
    assert torch.cuda.memory_stats()["segment.all.allocated"] == asked


def case_models_on_other_devices() -> None:
    layer = Layer(SHAPE).to("cpu")
    try:
        moefx.compile(layer, mesh=make_mesh(), example_inputs=(torch.zeros(64, SHAPE.d, dtype=torch.bfloat16),))
    except InvalidInput as found:
        assert "is on cpu, the mesh is of cuda" in str(found)
    else:
        raise AssertionError("compiled")


def case_training_equals_one_process() -> None:
    """Train three steps with `parallelize` on parts of the batches, in float32."""
    make_mesh()
    if dist.get_backend() != "nccl":
        return  # gathering a DTensor on a GPU over gloo ends in a segmentation fault of torch 2.11
    ranks, rank = dist.get_world_size(), dist.get_rank()
    batches = torch.randn(3, ranks, 50, D, generator=torch.Generator().manual_seed(0)).cuda()

    def train(model: torch.nn.Module, parts: torch.Tensor, clip: Callable[..., torch.Tensor]) -> torch.nn.Module:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)
        for x in parts:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            clip(model, 0.1)
            optimizer.step()
        return model

    for kind, sizes, options in itertools.product(
        ("joined", "gated"), ((1, ranks), (2, ranks // 2)), ({"data": "fsdp"}, {"data": "ddp"})
    ):
        mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("dp", "ep"))
        plan = moefx.Plan(expert_axis="ep", validation="symbolic")
        model = compile_over_mesh(Model(kind, layers=1).cuda(), mesh, plan)
        train(moefx.parallelize(model, mesh, **options), batches[:, rank], moefx.clip_grad_norm_)
        clip = lambda model, norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
        wanted = train(Model(kind, layers=1).cuda(), batches.flatten(1, 2), clip).state_dict()
        for name, value in moefx.full_state_dict(model).items():
            label = f"{kind} {sizes} {options} {name}"
            torch.testing.assert_close(value.cpu(), wanted[name].cpu(), rtol=0, atol=2e-3, msg=label)


def case_pipelines() -> None:
    """Train three steps with `pipeline`, one stage per GPU, in float32."""
    make_mesh()
    if dist.get_backend() != "nccl":
        return  # gloo cannot send GPU tensors between ranks
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("pp",))
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(VOCAB, (3, 8, LENGTH + 1), generator=generator).cuda()
    kinds = ("joined", "gated") * ranks
    for schedule in ("gpipe", "1f1b", "interleaved"):
        pipe = moefx.pipeline(
            Decoder(*kinds).cuda(), mesh, plan=moefx.Plan(validation="symbolic"), loss_fn=loss_fn, schedule=schedule,
            microbatches=4, example_inputs=(batches[0, :2, :-1],),
        )  # fmt: skip
        plain = Decoder(*kinds).cuda()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (pipe, plain)]
        for ids in batches:
            found = pipe.step(ids[:, :-1], target=ids[:, 1:])
            wanted = loss_fn(plain(ids[:, :-1]), ids[:, 1:])
            wanted.backward()
            torch.testing.assert_close(float(found), wanted.item(), rtol=0, atol=1e-3, msg=schedule)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = plain.state_dict()
        for name, value in moefx.full_state_dict(pipe).items():
            torch.testing.assert_close(value.cpu(), state[name].cpu(), rtol=0, atol=2e-3, msg=f"{schedule} {name}")


def case_training_in_a_captured_step() -> None:
    """Capture the whole step, and keep a graph alive until the process group ends."""
    mesh = make_mesh()
    if dist.get_backend() != "nccl":
        return  # a CUDA graph cannot contain collectives of gloo
    layer = Layer(SHAPE)
    plan = moefx.Plan(dispatch="gather", max_tokens=SHAPE.T, validation="symbolic", gradients="manual")
    example = (torch.zeros(64, SHAPE.d, device="cuda", dtype=torch.bfloat16),)
    batches = [torch.randn(SHAPE.T, SHAPE.d, device="cuda").bfloat16() for _ in range(6)]

    def build() -> Callable[[torch.Tensor], torch.Tensor]:
        model = moefx.compile(copy.deepcopy(layer), mesh=mesh, plan=plan, example_inputs=example)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, foreach=False)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            dist.all_reduce(model.router.weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    plain, captured = build(), moefx.capture_step(build())
    wanted, found = ([step(x) for x in batches] for step in (plain, captured))
    assert captured.is_captured, (found, wanted)
    assert all(map(torch.equal, found, wanted)), (found, wanted)
    _ALIVE_AT_THE_END.append(captured)


def _replay_with_other_tokens(compiled: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Capture a training step, and compare its replays with eager steps. Returns their results."""

    def step() -> list[torch.Tensor]:
        x.grad = None
        for p in compiled.parameters():
            p.grad = None
        out = compiled(x)
        out.backward(grad)
        return [out.detach(), x.grad, compiled.router.weight.grad, compiled.up.grad.to_local()]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    results = []
    for seed in range(3):
        torch.manual_seed(10 * seed + dist.get_rank())
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * (1 + 3 * seed))
        graph.replay()
        found = [t.clone() for t in captured]
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, step())), seed
        results += found
    del graph, captured  # a graph that holds a communicator keeps the process group alive
    return results


def case_gathered_in_a_cuda_graph() -> None:
    """Replay a training step as one graph with other tokens. Refuse to capture dispatches that read row counts."""
    mesh = make_mesh()
    torch.manual_seed(0)
    layer = Layer(SHAPE, shared=True)
    example = (torch.zeros(64, SHAPE.d, device="cuda", dtype=torch.bfloat16),)
    plan = moefx.Plan(dispatch="pull", max_tokens=SHAPE.T, validation="symbolic")
    _check_captured(layer, mesh, plan, example)
    if dist.get_backend() == "nccl":  # a CUDA graph cannot contain collectives of gloo
        _check_captured(layer, mesh, plan.replace(dispatch="gather"), example)


def _check_captured(layer: torch.nn.Module, mesh: DeviceMesh, plan: moefx.Plan, example: tuple[torch.Tensor]) -> None:
    x, grad = (torch.randn(SHAPE.T, SHAPE.d, device="cuda").bfloat16() for _ in range(2))
    x.requires_grad_()
    gc.collect()  # models of earlier cases keep their stash, which may be larger
    by_factor = []
    for factor in (None, 0.5, dist.get_world_size()):  # 0.5 has no room for a balanced layer
        compiled = moefx.compile(
            copy.deepcopy(layer), mesh=mesh, plan=plan.replace(stash_factor=factor), example_inputs=example
        )
        by_factor.append(_replay_with_other_tokens(compiled, x, grad))
        assert bool(moefx.blocks(compiled)[0].stash_misses) == (factor == 0.5)
    for found in zip(*by_factor, strict=True):
        assert all(torch.equal(found[0], other) for other in found[1:])
    uneven = moefx.compile(copy.deepcopy(layer), mesh=mesh, plan=plan.replace(dispatch="dedup", max_tokens=None),
                           example_inputs=example)  # fmt: skip
    uneven(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            uneven(x)
    except Exception as error:
        assert "max_tokens" in str(error), error
    else:
        raise AssertionError("was captured")
