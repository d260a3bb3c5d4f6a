"""Cases that several processes run together; see `launch`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest
import torch.distributed

from .launch import ALL, World, launch

pytestmark = [
    pytest.mark.timeout(1600),  # several processes on few cores, which may be slow ones
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and sys.platform == "linux"),
        reason="needs gloo",
    ),
]


def keep_world(size: int) -> Iterator[Callable[..., str]]:
    world: World | None = None

    def run(module: str, *names: str) -> str:
        nonlocal world
        if world is None or not world.is_alive:
            world = World(size)
        return world.run(f"tests.distributed.{module}", *names)

    yield run
    if world is not None and world.is_alive:
        world.end()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., str]]:
    """Runs cases on four ranks; the processes stay for the next ones."""
    yield from keep_world(4)


@pytest.fixture(scope="module")
def pair() -> Iterator[Callable[..., str]]:
    """Runs cases on two ranks."""
    yield from keep_world(2)


def test_exchanges_equal_all_experts_on_one_rank(ranks):
    ranks("exchange_cases")


def test_exchanges_of_two_ranks_equal_all_experts_on_one_rank(pair):
    pair("exchange_cases")


def test_models_over_ranks_equal_the_original(pair):
    pair("compile_cases")


def test_models_over_two_axes_equal_the_original(ranks):
    ranks("compile_cases", "case_the_graphs", "case_two_axes", "case_axes_that_are_not_said")


def test_states_are_saved_and_loaded_over_ranks(ranks):
    ranks("state_cases")


def test_wrappers_of_models_work_over_ranks_or_are_refused(ranks):
    ranks("wrapper_cases")


def test_parallelized_models_train_as_the_original(ranks):
    ranks("parallelize_cases")


def test_exchanges_of_several_hops_equal_one_hop(ranks):
    ranks("hop_cases")


@pytest.mark.exhaustive  # minutes where eight processes share two cores
def test_exchanges_of_several_hops_of_eight_ranks_equal_one_hop():
    launch(8, "tests.distributed.hop_cases")


def test_gathered_tokens_give_the_same_sums(ranks):
    ranks("gather_cases")


def test_exchanges_send_the_predicted_bytes(ranks):
    ranks("volume_cases")


@pytest.mark.exhaustive
def test_exchanges_of_eight_ranks_send_the_predicted_bytes():
    launch(8, "tests.distributed.volume_cases")


def test_sharded_sequences_equal_the_original(ranks):
    ranks("sequence_cases")


def test_ranks_agree_on_the_decision_of_the_planner(ranks):
    ranks("auto_cases")


def test_programs_run_over_ranks(ranks):
    ranks("program_cases")


@pytest.mark.exhaustive
def test_programs_run_through_inductor(ranks):
    ranks("program_cases", "through_inductor")


def test_pipelines_and_transformers(ranks):
    ranks("pipeline_cases")


def test_pipelines_train_as_one_device(ranks):
    ranks("pipeline_training_cases")


def test_pipelines_of_two_ranks_train_as_one_device(pair):
    pair("pipeline_training_cases", "pipelines_of_two")


def test_mistakes_with_pipelines_are_refused(ranks):
    ranks("pipeline_mistake_cases")


@pytest.mark.exhaustive
def test_pipelines_of_eight_ranks_train_as_one_device():
    launch(8, "tests.distributed.pipeline_training_cases", "pipelines_of_eight")


def test_models_of_the_corpus_equal_the_original(pair):
    pair("corpus_cases")


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_every_model_of_the_corpus_equals_the_original():
    launch(2, "tests.distributed.corpus_cases", "every_model", timeout=2300)


def test_verify_finds_faults_over_ranks(ranks):
    ranks("verify_cases")


@pytest.mark.exhaustive
def test_every_fault_in_every_exchange(ranks):
    ranks("verify_cases", "every_fault")


def test_ranks_that_disagree_raise(ranks):
    ranks("lost_cases")


def test_unreduced_gradients_are_reported(ranks):
    ranks("reduction_cases")


def test_hooks_of_optimizers_are_removed():
    launch(2, "tests.distributed.reduction_cases", "hooks_of_optimizers")


@pytest.mark.hf
def test_pipelines_of_transformers_train_as_one_device(ranks):
    pytest.importorskip("transformers")
    ranks("pipeline_transformers_cases")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dies", "stalls"])
def test_a_lost_rank_raises(name):
    launch(4, "tests.distributed.lost_cases", name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    ("auto", "compile", "corpus", "gather", "hop", "lost", "pipeline")
    + ("program", "reduction", "sequence", "state", "verify", "wrapper"),
)
def test_all_cases_pass_without_sampling(name):
    launch(4, f"tests.distributed.{name}_cases", environment={ALL: "1"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_gpus():
    """A GPU for each rank, or one that four share."""
    devices = torch.cuda.device_count()
    ranks, backend = (4, "gloo") if devices == 1 else (min(devices, 4), "nccl")
    launch(ranks, "tests.distributed.gpu_cases", environment={"BACKEND": backend, "MOEFX_AUTOTUNE": "0"})


def test_a_rank_that_fails_is_shown():
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\], of 2 ranks(.|\n)*no attribute 'case_of_none'"):
        launch(2, "tests.distributed.exchange_cases", "case_of_none")
