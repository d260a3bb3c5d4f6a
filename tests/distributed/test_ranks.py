"""Cases that several processes run together; see `launch`."""

from __future__ import annotations

import sys

import pytest
import torch.distributed

from .launch import launch

pytestmark = [
    pytest.mark.timeout(600),  # several processes on few cores
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and sys.platform == "linux"),
        reason="needs gloo",
    ),
]


@pytest.mark.parametrize("world", [2, 4])
def test_exchanges(world):
    launch(world, "tests.distributed.exchange_cases")


def test_compiled_models():
    launch(4, "tests.distributed.compile_cases")


def test_states():
    launch(4, "tests.distributed.state_cases")


@pytest.mark.parametrize("world", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_hops(world):
    launch(world, "tests.distributed.hop_cases")


def test_sequences():
    launch(4, "tests.distributed.sequence_cases")


def test_programs():
    launch(4, "tests.distributed.program_cases")


def test_pipelines_and_transformers():
    launch(4, "tests.distributed.pipeline_cases")


def test_verification():
    launch(4, "tests.distributed.verify_cases")


def test_ranks_that_do_not_agree():
    launch(4, "tests.distributed.lost_cases")


@pytest.mark.parametrize("name", ["dies", "stalls"])
def test_a_rank_that_is_lost(name):
    launch(4, "tests.distributed.lost_cases", name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_gpus():
    backend = "nccl" if torch.cuda.device_count() >= 4 else "gloo"
    launch(4, "tests.distributed.gpu_cases", environment={"BACKEND": backend})


def test_a_rank_that_fails_is_shown():
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\], of 2 ranks(.|\n)*no attribute 'case_of_none'"):
        launch(2, "tests.distributed.exchange_cases", "case_of_none")
