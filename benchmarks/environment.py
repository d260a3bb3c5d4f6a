"""What stands beside every result: versions, processor, devices."""

from __future__ import annotations

import datetime
from pathlib import Path

from moefx._environment import devices, versions


def environment() -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "devices": {**devices(), "processor": processor()},
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
