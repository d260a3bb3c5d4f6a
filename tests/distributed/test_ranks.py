"""Tests that several processes run together: each item runs one case of a module on all ranks (see `launch`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator

import pytest
import torch.distributed

from .launch import ALL_CASES, RankPool, launch, list_cases

pytestmark = [
    pytest.mark.timeout(1600),  # several processes on few cores, which may be slow ones
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available() and sys.platform == "linux"),
        reason="needs gloo",
    ),
]

needs_dual_schedules = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="rewritten blocks cannot delay gradients of weights"
)

FOR_FOUR_RANKS = ("case_graphs_are_printed", "case_two_axes", "case_ambiguous_axes_raise")  # of compile_cases
RunCases = Callable[..., str]  # called with a module of this folder and names of its functions


def for_each_case(module: str, *names: str, without: Collection[str] = ()) -> pytest.MarkDecorator:
    """Parametrize a test over the cases of a module: all but some, or those of these names."""
    cases = [(module, name) for name in names or list_cases(module) if name not in without]
    return pytest.mark.parametrize("case", cases, ids=[name.removeprefix("case_") for _, name in cases])


def keep_pool(size: int) -> Iterator[RunCases]:
    """Yield a function that runs cases in a pool of ranks.

    Cases of one module share a pool. The next module gets a new one: process groups of earlier cases would keep a
    thread and sockets each, more than a thousand over all modules.
    """
    pool: RankPool | None = None
    current_module = ""

    def run_cases(module: str, *names: str) -> str:
        nonlocal pool, current_module
        if pool is not None and pool.is_alive and module != current_module:
            pool.kill()
        if pool is None or not pool.is_alive:
            pool, current_module = RankPool(size), module
        return pool.run(f"tests.distributed.{module}", *names)

    yield run_cases
    if pool is not None and pool.is_alive:
        pool.end()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RunCases]:
    yield from keep_pool(4)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RunCases]:
    yield from keep_pool(2)


@for_each_case("exchange_cases")
def test_exchanges_equal_all_experts_on_one_rank(four_ranks, case):
    four_ranks(*case)


@for_each_case("exchange_cases")
def test_exchanges_of_two_ranks_equal_all_experts_on_one_rank(two_ranks, case):
    two_ranks(*case)


@for_each_case("compile_cases", without=FOR_FOUR_RANKS)
def test_models_over_ranks_equal_the_original(two_ranks, case):
    two_ranks(*case)


@for_each_case("compile_cases", *FOR_FOUR_RANKS)
def test_models_over_two_axes_equal_the_original(four_ranks, case):
    four_ranks(*case)


@for_each_case("state_cases")
def test_states_are_saved_and_loaded_over_ranks(four_ranks, case):
    four_ranks(*case)


@for_each_case("pretrained_cases")
def test_folders_are_loaded_and_saved_over_ranks(four_ranks, case):
    pytest.importorskip("safetensors")
    four_ranks(*case)


@for_each_case("wrapper_cases")
def test_wrappers_of_models_work_over_ranks_or_are_refused(four_ranks, case):
    four_ranks(*case)


@for_each_case("parallelize_cases")
def test_parallelized_models_train_as_the_original(four_ranks, case):
    four_ranks(*case)


@pytest.mark.hf
@for_each_case(
    "integration_cases",
    "case_training_equals_one_process",
    "case_auxiliary_losses_of_ranks_add_up",
    "case_loops_with_accelerate",
    "case_saved_states_outlive_saves_that_fail",
    "case_plain_libraries_are_refused",
    "case_mistakes",
)
def test_trainer_and_accelerate_train_as_one_process_or_are_refused(four_ranks, case):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers", minversion="5.17")
    four_ranks(*case)


@pytest.mark.hf
@pytest.mark.exhaustive
@for_each_case(
    "integration_cases",
    "case_the_best_model_is_loaded",
    "case_smoothed_labels_are_shifted",
    "case_loops_with_separate_experts",
    "case_adapters",
)
def test_more_of_trainer_and_accelerate(four_ranks, case):
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    pytest.importorskip("transformers", minversion="5.17")
    four_ranks(*case)


@pytest.mark.hf
@for_each_case("trl_cases")
def test_trainers_of_trl_train_as_one_process(four_ranks, case):
    pytest.importorskip("trl")
    four_ranks(*case)


@for_each_case("hop_cases")
def test_exchanges_of_several_hops_equal_one_hop(four_ranks, case):
    four_ranks(*case)


@pytest.mark.exhaustive  # minutes where eight processes share two cores
def test_exchanges_of_several_hops_of_eight_ranks_equal_one_hop():
    names = ("topologies", "few_tokens", "auto_picks_the_fastest_dispatch", "one_node_needs_no_measurement")
    launch(8, "tests.distributed.hop_cases", *[f"case_{name}" for name in names], "case_invalid_node_sizes_raise")
    launch(8, "tests.distributed.rack_cases")


@for_each_case("gather_cases")
def test_gathered_tokens_give_the_same_sums(four_ranks, case):
    four_ranks(*case)


# The others are those of "gather", and run without sampling.
@for_each_case(
    "pull_cases",
    "case_outputs_and_gradients", "case_ranks_without_tokens", "case_shared_tokens", "case_one_graph",
    "case_other_ways_without_peer_access", "case_no_collectives", "case_buffers_that_grow",
    "case_verify_detects_wrong_rows",
)  # fmt: skip
def test_pulled_tokens_give_the_same_sums(four_ranks, case):
    four_ranks(*case)


def test_exchanges_send_the_predicted_bytes(four_ranks):
    four_ranks("volume_cases")


@pytest.mark.exhaustive
def test_exchanges_of_eight_ranks_send_the_predicted_bytes():
    launch(8, "tests.distributed.volume_cases")


@for_each_case("sequence_cases")
def test_sharded_sequences_equal_the_original(four_ranks, case):
    four_ranks(*case)


@for_each_case("auto_cases")
def test_ranks_agree_on_the_decision_of_the_planner(four_ranks, case):
    four_ranks(*case)


@for_each_case("program_cases")
def test_programs_run_over_ranks(four_ranks, case):
    four_ranks(*case)


@pytest.mark.exhaustive
def test_programs_run_through_inductor(four_ranks):
    four_ranks("program_cases", "through_inductor")


@for_each_case("pipeline_cases")
def test_pipelines_of_compiled_stages(four_ranks, case):
    four_ranks(*case)


@for_each_case("pipeline_training_cases")
def test_pipelines_train_as_one_device(four_ranks, case):
    four_ranks(*case)


def test_pipelines_of_two_ranks_train_as_one_device(two_ranks):
    two_ranks("pipeline_training_cases", "pipelines_of_two")


@needs_dual_schedules
@for_each_case("pipeline_overlap_cases")
def test_dual_schedules_overlap_exchanges(four_ranks, case):
    four_ranks(*case)


@needs_dual_schedules
def test_a_lost_rank_ends_an_overlapped_step():
    launch(4, "tests.distributed.pipeline_overlap_cases", "loses_a_rank")


@for_each_case("pipeline_mistake_cases")
def test_mistakes_with_pipelines_are_refused(four_ranks, case):
    four_ranks(*case)


@for_each_case("pipeline_module_cases")
def test_pipelines_of_models_with_shared_modules(four_ranks, case):
    four_ranks(*case)


@pytest.mark.sampled(2)
@for_each_case("build_cases")
def test_entries_of_the_planner_run(four_ranks, case):
    four_ranks(*case)


@pytest.mark.exhaustive
def test_pipelines_of_eight_ranks_train_as_one_device():
    launch(8, "tests.distributed.pipeline_training_cases", "pipelines_of_eight")


@pytest.mark.hf
@for_each_case("pipeline_transformers_cases")
def test_pipelines_of_transformers_train_as_one_device(four_ranks, case):
    pytest.importorskip("transformers")
    four_ranks(*case)


@for_each_case("corpus_cases")
def test_models_of_the_corpus_equal_the_original(two_ranks, case):
    two_ranks(*case)


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
def test_every_model_of_the_corpus_equals_the_original():
    launch(2, "tests.distributed.corpus_cases", "every_model", timeout=2300)


@for_each_case("verify_cases")
def test_verify_finds_faults_over_ranks(four_ranks, case):
    four_ranks(*case)


@pytest.mark.exhaustive
def test_every_fault_in_every_exchange(four_ranks):
    four_ranks("verify_cases", "every_fault")


@for_each_case("lost_cases")
def test_ranks_that_disagree_raise(four_ranks, case):
    four_ranks(*case)


@for_each_case("reduction_cases")
def test_unreduced_gradients_are_reported(four_ranks, case):
    four_ranks(*case)


def test_hooks_of_optimizers_are_removed():
    launch(2, "tests.distributed.reduction_cases", "hooks_of_optimizers")


@pytest.mark.hf
def test_folders_of_transformers_are_loaded_and_saved_over_ranks(four_ranks):
    pytest.importorskip("transformers")
    four_ranks("pretrained_cases", "transformers_models")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["dies", "stalls", "stalls_before_experts_are_compared", "dies_before_an_all_gather"])
def test_a_lost_rank_raises(name):
    launch(4, "tests.distributed.lost_cases", name)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    ("auto", "compile", "corpus", "gather", "hop", "lost", "pipeline", "pull")
    + ("exchange", "pipeline_overlap", "program", "reduction", "sequence", "state", "verify", "wrapper"),
)
def test_all_cases_pass_without_sampling(name):
    launch(4, f"tests.distributed.{name}_cases", environment={ALL_CASES: "1"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_gpus():
    """Run on one GPU per rank, or on one that four ranks share."""
    devices = torch.cuda.device_count()
    size, backend = (4, "gloo") if devices == 1 else (min(devices, 4), "nccl")
    environment = {"BACKEND": backend, "MOEFX_AUTOTUNE": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    launch(size, "tests.distributed.gpu_cases", environment=environment)


def test_a_rank_that_fails_is_shown():
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\], of 2 ranks(.|\n)*no attribute 'case_of_none'"):
        launch(2, "tests.distributed.exchange_cases", "case_of_none")
