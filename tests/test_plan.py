"""`Plan` and its documentation."""

import dataclasses
import inspect
import re
from pathlib import Path

from moefx import Plan

API_PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MAX_GROUPS = 8


def read_groups() -> dict[str, dict[str, str]]:
    """Return the groups of the docstring, each a map from fields to texts."""
    groups: dict[str, dict[str, str]] = {}
    fields: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(Plan.__doc__).splitlines():
        if title := re.fullmatch(r"Attributes: (.+)", line):
            assert title[1] not in groups
            fields = groups[title[1]] = {}
        elif field := re.match(r"    (\w+): (.*)", line):
            name = field[1]
            assert name not in fields
            fields[name] = field[2]
        elif line.startswith("        "):
            fields[name] += " " + line.strip()
    return groups


def test_each_field_is_documented_in_exactly_one_group():
    groups = read_groups()
    assert 1 < len(groups) <= MAX_GROUPS
    documented = [name for fields in groups.values() for name in fields]
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(Plan))
    assert all(text.endswith(".") for fields in groups.values() for text in fields.values())


def test_the_api_page_shows_the_groups():
    rows = re.findall(r"^\| ([^|]+) \| ((?:`\w+`(?:, )?)+) \|$", API_PAGE.read_text(encoding="utf-8"), re.M)
    shown = {title: re.findall(r"\w+", fields) for title, fields in rows}
    assert shown == {title: list(fields) for title, fields in read_groups().items()}


def test_a_set_of_passes_has_the_same_order_in_every_process():
    names = [f"pass{i:02}" for i in range(40)]
    assert Plan(disable={*names}).disable == Plan(disable=frozenset(names)).disable == tuple(names)
    assert Plan(disable=[*reversed(names)]).disable == tuple(reversed(names))
