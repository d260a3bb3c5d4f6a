"""The file of results of `benchmarks/scale.py`: JSON lines, rows behind the environment that they ran in."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DONE, FAILED, TIMED_OUT = "done", "failed", "timed out"


@dataclasses.dataclass(frozen=True)
class Record:
    """A row that ran.

    Attributes:
        is_dry: whether it ran tiny on a CPU: its figures mean nothing.
        status: `DONE`, `FAILED` or `TIMED_OUT`.
        error: of a row that is not done.
        results: what the row appended, also before it failed.
        environment: versions, devices and commit.
    """

    row: str
    part: int
    gpus: int
    is_dry: bool
    status: str
    seconds: float
    error: str
    results: tuple[dict[str, Any], ...]
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)


class ResultsFile:
    """Results of earlier and of this run, in one file.

    Args:
        is_dry: whether this run is a dry run.

    Raises:
        SystemExit: the file has rows of a dry run and this is a real one, or the reverse.
    """

    def __init__(self, path: Path, is_dry: bool):
        self.path, self.is_dry = path, is_dry
        self.records = read_records(path) if path.exists() else []
        if any(record.is_dry != is_dry for record in self.records):
            raise SystemExit(f"{path} has rows of {'real runs' if is_dry else 'dry runs'}: choose another --out")
        self._environment = self.records[-1].environment if self.records else None

    def find(self, row: str) -> Record | None:
        """Return the last record of a row."""
        return next((record for record in reversed(self.records) if record.row == row), None)

    def append(self, record: Record) -> None:
        fields = dataclasses.asdict(record)
        environment = fields.pop("environment")
        with self.path.open("a") as lines:
            if environment != self._environment:
                print(json.dumps({"environment": environment}), file=lines)
            print(json.dumps(fields), file=lines)
        self._environment = environment
        self.records.append(record)


def read_records(path: Path) -> list[Record]:
    """Read the records of a file. A last line that a killed run left incomplete does not count."""
    records, environment = [], {}
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        path.write_text("".join(lines[:-1]))  # else the next record would go on in this line
        lines.pop()
    for line in map(json.loads, lines):
        if "environment" in line:
            environment = line["environment"]
        else:
            records.append(Record(**line | {"results": tuple(line["results"])}, environment=environment))
    return records


def read_environment() -> dict[str, Any]:
    """Read versions, devices and commit, in another process: this one stays without a context on a GPU."""
    script = "import json; from benchmarks.environment import environment; print(json.dumps(environment()))"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    environment: dict[str, Any] = json.loads(printed.stdout.splitlines()[-1])
    environment["commit"] = _ask("git", "-C", str(ROOT), "describe", "--always", "--dirty")
    environment["driver"] = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    environment["links"] = _ask("nvidia-smi", "topo", "-m")
    return environment


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
