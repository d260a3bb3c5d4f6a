"""`moefx.pipeline` of models whose modules have several names, or are in several stages of a rank."""

from __future__ import annotations

import torch
from torch import nn

import moefx

from .pipeline_training_cases import V_SHAPED, Decoder, build, draw_batch, find_data_rank, loss_fn, make_mesh


class Scale(nn.Module):
    """Module without parameters, with a buffer in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(3.0))

    def forward(self, x):
        return x * self.factor


class ScaledDecoder(Decoder):
    """Decoder that scales a tensor which every layer gets: each stage computes it."""

    def __init__(self) -> None:
        super().__init__("gated", "joined", "gated", "gated")
        self.scale = Scale()

    def forward(self, ids, shift=None):
        x = self.tokens(ids)
        mask = self.scale((ids != 0)[..., None].to(x.dtype))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class AliasedDecoder(Decoder):
    """Decoder with second names for modules of both ends, and for a layer without experts."""

    def __init__(self) -> None:
        super().__init__("gated", "joined", "gated", None)
        self.embed, self.output, self.top = self.tokens, self.head, self.layers[-1]
        self.wrapped = nn.ModuleDict({"norm": self.norm})


def check_loaded_from_meta(make: type[Decoder], schedule: str) -> None:
    """Compare a pipeline that loads the original's state dict after `to_empty` with the original."""
    mesh, model = make_mesh(pp=2, ep=2), make().double()
    with torch.device("meta"):
        pipe = build(make().double(), mesh, schedule=schedule)
    pipe.to_empty(device="cpu")
    for stage in pipe.stages.values():  # memory that nothing has written yet
        for tensor in (*stage.parameters(), *stage.buffers()):
            tensor.data.fill_(torch.nan)
    pipe.load_state_dict(model.state_dict())
    number, ranks = find_data_rank(mesh)
    ids, target = draw_batch(0, ranks, 8)
    wanted = loss_fn(model(ids.flatten(0, 1)), target.flatten(0, 1))
    torch.testing.assert_close(pipe.step(ids[number], target=target[number]), wanted)
    state = moefx.full_state_dict(pipe, cpu=True)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def case_buffers_that_all_stages_have() -> None:
    for schedule in ("interleaved", V_SHAPED):
        check_loaded_from_meta(ScaledDecoder, schedule)


def case_modules_with_several_names() -> None:
    for schedule in ("1f1b", "interleaved"):
        check_loaded_from_meta(AliasedDecoder, schedule)
