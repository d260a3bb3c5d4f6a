"""Train a small DeepSeek-style model twice, as written and compiled, and compare the losses step by step.

    python examples/train_deepseek_style.py [--steps 20]

`python -m moefx demo` is the long form of this, with a report.
"""

import argparse
import copy
import itertools
import time

import torch

import moefx
from moefx.demo.model import Config, LanguageModel
from moefx.demo.stdlib_text import batches, standard_library_text


def main(steps: int = 20) -> float:
    """Returns the largest difference of the two losses."""
    torch.manual_seed(0)
    # float64: in lower precision a rounding error can flip a routing decision, and the curves part for good.
    original = LanguageModel(Config(dim=64, num_experts=16, expert_hidden=32, top_k=4)).double()

    # The result shares its parameters with the argument; here the two are trained apart, hence the copy.
    compiled = moefx.compile(copy.deepcopy(original))
    print(moefx.explain(compiled))
    for block in moefx.blocks(compiled):
        print(f"\n{moefx.graph(compiled, block.name)}")

    stream = batches(standard_library_text(), batch=4, context=64, seed=0)
    ids, _ = next(stream)
    print(f"\n{moefx.verify(compiled, original, (ids,))}\n")

    models = {"original": original, "compiled": compiled}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=3e-3) for name, model in models.items()}
    largest = 0.0
    for step, (ids, labels) in enumerate(itertools.islice(stream, steps)):
        losses, seconds = {}, {}
        for name, model in models.items():
            started = time.perf_counter()
            loss = model(ids, labels)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name], seconds[name] = loss.item(), time.perf_counter() - started
        difference = abs(losses["original"] - losses["compiled"])
        largest = max(largest, difference)
        print(
            f"step {step:3}  loss {losses['original']:.6f}  difference {difference:.1e}  "
            f"original {1e3 * seconds['original']:5.0f} ms  compiled {1e3 * seconds['compiled']:5.0f} ms"
        )
    print(f"largest difference {largest:.1e}")
    return largest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
