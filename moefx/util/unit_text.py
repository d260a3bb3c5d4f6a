"""Format numbers with units."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Format bytes: 1536 -> `1.5 KiB`."""
    return amount(num_bytes, "B")


def amount(value: float, unit: str) -> str:
    """Return a number with its unit, to four digits. Bytes scale by 2^10, seconds to ms or us, other units by 1000."""
    if unit == "B":
        step, names = 1024, _BYTES
    elif unit == "s":
        return next(f"{value * by:.4g} {name}" for by, name in ((1, "s"), (1e3, "ms"), (1e6, "us"))
                    if abs(value) * by >= 1 or name == "us")  # fmt: skip
    else:
        step, names = 1000, tuple(f"{prefix}{unit}".removesuffix("1") for prefix in ("", "K", "M", "G", "T", "P", "E"))
    power = 0
    while abs(value) >= step and power < len(names) - 1:
        value, power = value / step, power + 1
    return f"{value:.4g} {names[power]}".rstrip()
