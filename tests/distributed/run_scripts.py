"""Run scripts one after another on each rank: `torchrun ... -m tests.distributed.run_scripts A.py B.py`.

Rank 0 prints a separator before each script.
"""

from __future__ import annotations

import os
import runpy
import sys

SEPARATOR = "===== next script =====\n"

if __name__ == "__main__":
    for number, file in enumerate(sys.argv[1:]):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # torch puts it in front of the keys in torchrun's store
        if os.environ["RANK"] == "0":
            print(SEPARATOR, end="", flush=True)
        runpy.run_path(file, run_name="__main__")
        sys.stdout.flush()
