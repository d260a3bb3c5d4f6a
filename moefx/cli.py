"""The command line: `python -m moefx {demo,explain,verify,plan,bench,env}`.

Exit status: 0 yes (equivalent; something is rewritten), 1 no, 2 the question could not be asked.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .model_target import TARGET_HELP, UsageError, guess_inputs, load

if TYPE_CHECKING:
    from ._plan import Plan
    from .ranking import Ranking


BENCHMARKS = {
    "moe": "expert MLPs on ten shapes beside other libraries",
    "stages": "each kernel of an expert MLP's step by itself",
    "routing": "the arrays that say which token goes to which expert",
    "layers": "training steps of four Qwen3-30B-A3B layers",
    "platform": "this machine, for the planner: GEMMs, attention, copies, experts, exchanges",
    "ep": "a MoE layer over several GPUs beside one with all experts",
    "train": "training steps over several GPUs by layout, beside the planner's predictions",
    "tune": "every configuration of every kernel",
    "report": "a table and a plot of what moe wrote",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without UTF-8 shows "?" instead of failing
            stream.reconfigure(errors="replace")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; moefx does not need NumPy
    from .errors import MoefxError

    try:
        return arguments.run(arguments)
    except UsageError as error:
        print(f"moefx {arguments.command}: {error}", file=sys.stderr)
        return 2
    except MoefxError as error:
        print(f"moefx {arguments.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `moefx explain ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m moefx", description="A compiler for mixture-of-experts training in PyTorch."
    )
    top.add_argument("--version", action="version", version=f"moefx {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="{demo,explain,verify,plan,bench,env}")

    demo = commands.add_parser("demo", help="train a small MoE model, original beside compiled; write report.html")
    demo.add_argument("--steps", type=positive, default=100, help="training steps (default: 100)")
    demo.add_argument("--repeats", type=positive, default=10, help="timed repetitions (default: 10)")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--device", default="cpu", help="cpu (default), cuda, ...")
    demo.add_argument("--out", type=Path, default=Path("report.html"), help="the report (default: report.html)")
    demo.set_defaults(run=run_demo)

    explain = commands.add_parser(
        "explain", help="list the blocks of a model that compile rewrites, those that it refuses, and why"
    )
    explain.add_argument("target", help=TARGET_HELP)
    explain.add_argument("--meta", action="store_true", help="build the model on the meta device: no memory, any size")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument(
        "--trace",
        action="store_true",
        help="print the attempts and probes of each proof, and near misses",
    )
    explain.add_argument(
        "--verbose", action="store_true", help="print the counters of the process: providers, weights, kernels"
    )
    explain.add_argument("--graphs", action="store_true", help="print the rewritten graph of every block as well")
    add_plan(explain)
    explain.set_defaults(run=run_explain)

    verify = commands.add_parser("verify", help="compile a model and compare with the original, forward and gradients")
    verify.add_argument("target", help=TARGET_HELP)
    verify.add_argument("--json", action="store_true", help="print JSON")
    add_plan(verify)
    verify.set_defaults(run=run_verify)

    _add_plan_command(commands)

    bench = commands.add_parser("bench", help="measure on this machine")
    kinds = "; ".join(f"{name}: {text}" for name, text in BENCHMARKS.items())
    bench.add_argument("benchmark", choices=BENCHMARKS, help=kinds)
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own options; --help lists them")
    bench.set_defaults(run=run_bench)

    env = commands.add_parser("env", help="print versions, devices and the provider of each op")
    env.add_argument("--json", action="store_true", help="print JSON")
    env.set_defaults(run=run_env)
    return top


def _add_plan_command(commands: Any) -> None:
    plan = commands.add_parser(
        "plan", help="rank the parallelisations of a model that fit a platform, and explain the order"
    )
    plan.add_argument(
        "model",
        help="a name such as deepseek-v3 (a wrong one lists all), a transformers config on disk, or "
        "package.module:factory, which is called on the meta device (see explain)",
    )
    plan.add_argument("--platform", default="dgx-h100", help="a name, or a platform file (default: dgx-h100)")
    plan.add_argument("--gpus", type=positive, required=True, help="number of GPUs: the world_size of moefx.plan")
    plan.add_argument("--batch", type=positive, default=1024, help="sequences per step over all ranks (default: 1024)")
    plan.add_argument("--tokens", type=positive, default=4096, help="tokens per sequence (default: 4096)")
    names = "gpipe, 1f1b, interleaved, zb-h1, zb-h2"
    plan.add_argument(
        "--schedules", default="1f1b", metavar="LIST", help=f"pipeline schedules, from {names} (default: 1f1b)"
    )
    plan.add_argument("--top", type=positive, default=10, help="lines of the table (default: 10)")
    plan.add_argument(
        "--explain",
        type=positive,
        metavar="N",
        help="print the formulas and numbers of line N of the table; writes a page only with --page",
    )
    pages = plan.add_mutually_exclusive_group()
    pages.add_argument("--page", type=Path, help="the page (default: plan-MODEL-PLATFORM-GPUS.html)")
    pages.add_argument("--no-page", action="store_true", help="write no page")
    plan.add_argument(
        "--simulate",
        type=positive,
        metavar="N",
        help="simulate a step of line N, beside the formulas; writes a page only with --page",
    )
    plan.add_argument(
        "--skew", type=float, default=0.0, help="for --simulate: the Zipf exponent of the routing (default: 0)"
    )
    plan.set_defaults(run=run_plan)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def add_plan(command: argparse.ArgumentParser) -> None:
    example = 'a moefx.Plan as JSON, e.g. \'{"checkpoint": "x"}\', or auto: the planner decides'
    command.add_argument("--plan", metavar="JSON", help=example)


def read_plan(text: str | None) -> Plan | str | None:
    from ._plan import Plan

    if text in (None, "auto"):
        return text
    try:
        return Plan.from_json(text)
    except (
        ValueError,  # InvalidPlan and JSONDecodeError
        TypeError,
        AttributeError,
    ) as error:
        raise UsageError(f"--plan {text}: {error}") from None


def run_demo(arguments: argparse.Namespace) -> int:
    import torch

    from .demo.main import run
    from .errors import summarize_error

    kind = arguments.device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {arguments.device}: torch finds no GPU")
    if kind == "meta":
        raise UsageError("--device meta: the demo trains, and a model on the meta device has no weights")
    try:
        torch.empty(0, device=arguments.device)
    except Exception as error:
        raise UsageError(f"--device {arguments.device}: {summarize_error(error)}") from None
    if not arguments.out.absolute().parent.is_dir() or arguments.out.is_dir():
        raise UsageError(f"--out {arguments.out}: expected a file in a folder that exists")
    result = run(
        steps=arguments.steps,
        repeats=arguments.repeats,
        seed=arguments.seed,
        device=arguments.device,
        out=arguments.out,
    )
    return 0 if result.ok else 1


def run_explain(arguments: argparse.Namespace) -> int:
    import moefx

    plan = read_plan(arguments.plan)
    model, inputs = load(arguments.target, "meta" if arguments.meta else None)
    shown = {"trace": arguments.trace, "verbose": arguments.verbose}
    if not arguments.graphs:
        explanation, graphs = moefx.explain(model, inputs, plan=plan, **shown), {}
    else:
        compiled = moefx.compile(model, inputs, plan=plan, strict=False)
        explanation = moefx.explain(compiled, **shown)
        graphs = {block.name: str(block.graph) for block in moefx.blocks(compiled)}
    if arguments.json:
        text = explanation.to_json()
        print(json.dumps(json.loads(text) | {"graphs": graphs}) if arguments.graphs else text)
    else:
        print("\n\n".join([str(explanation), *graphs.values()]))
    return 0 if explanation.matched else 1


def run_verify(arguments: argparse.Namespace) -> int:
    import moefx

    plan = read_plan(arguments.plan)
    model, inputs = load(arguments.target)
    if inputs is None:
        inputs = guess_inputs(model)
    compiled = moefx.compile(model, inputs, plan=plan)
    report = moefx.verify(compiled, model, inputs)
    print(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1


def run_bench(arguments: argparse.Namespace) -> int:
    if arguments.benchmark not in ("report", "platform") and not {"-h", "--help"} & set(arguments.rest):
        import torch

        if not torch.cuda.is_available():
            raise UsageError("this measures GPU kernels, and torch finds no GPU")
    importlib.import_module(f"moefx.bench.{arguments.benchmark}").main(arguments.rest)
    return 0


def run_plan(arguments: argparse.Namespace) -> int:
    from .planner.catalogue import MODELS
    from .ranking import plan

    if arguments.skew and arguments.simulate is None:
        raise UsageError("--skew needs a simulation: pass --simulate N, too")
    model: Any = arguments.model
    options: dict[str, Any] = dict(
        batch=arguments.batch, tokens=arguments.tokens, schedules=arguments.schedules.replace(" ", "").split(",")
    )
    if model.lower() not in MODELS and Path(model).exists():
        from .planner.model_configs import load_config

        model = load_config(model)
    elif ":" in model:
        model, options["example_inputs"] = load(model, "meta")
    ranking = plan(model, arguments.platform, arguments.gpus, **options)
    is_page = arguments.page is not None or not (arguments.no_page or arguments.explain or arguments.simulate)
    if not len(ranking):
        arguments.explain = arguments.simulate = None  # `Ranking.format` has the reasons instead
    if arguments.explain is not None:
        if arguments.explain > len(ranking):
            raise UsageError(f"--explain {arguments.explain}: {len(ranking)} layouts fit")
        print(f"{ranking.table(1, first=arguments.explain - 1)}\n\n{ranking.explain(arguments.explain - 1)}")
    if arguments.simulate is not None:
        if arguments.simulate > len(ranking):
            raise UsageError(f"--simulate {arguments.simulate}: {len(ranking)} layouts fit")
        before = "\n" if arguments.explain is not None else ""
        print(before + ranking.table(1, first=arguments.simulate - 1), flush=True)
        print(f"\n{ranking.simulate(arguments.simulate - 1, skew=arguments.skew)}")
    if arguments.explain is None and arguments.simulate is None:
        print(ranking.format(arguments.top), flush=True)
    if is_page:
        write_page(ranking, arguments.page)
    return 0 if len(ranking) else 1


def write_page(ranking: Ranking, path: Path | None) -> None:
    from .planner.ranking_page import INSTALL, file_name, has_plots

    path = path or Path(file_name(ranking))
    try:
        ranking.html(path, tell=lambda text: print(f"page: {text}", file=sys.stderr))
    except OSError as error:
        raise UsageError(f"the page {path} cannot be written: {error.strerror}; --page names another file") from None
    missing = "" if has_plots() else f", without pictures: they need matplotlib ({INSTALL})"
    print(f"\npage: {path}{missing}")


def run_env(arguments: argparse.Namespace) -> int:
    from ._environment import environment

    facts = environment()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for section, values in facts.items():
        print(section)
        for key, value in values.items():
            print(f"  {key:<14} {value}")
    return 0
