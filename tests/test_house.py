"""The structure stays as it is: measures of tools/house.py do not grow again."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "tools").is_dir(), reason="the sdist has no tools")


def tools() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools/house.py"))


def number(text: str, index: int = 0) -> int:
    return int(text.replace(",", "").split(" / ")[index].split()[0])


def test_measures() -> None:
    house = tools()
    found = house["measures"](ROOT / "src" / "weft")
    assert number(found["parallelize(): code lines / branches"]) <= 25
    assert number(found["parallelize(): code lines / branches"], 1) <= 3
    assert number(found["longest function, code lines"]) <= 70
    assert number(found["most branches of a function"]) <= 20
    assert number(found["check_ and refuse_ functions, files"]) <= 157
    assert number(found["files directly in parallel/"]) <= 8
    assert found["clip formula; loss scale after a step; seed of dropout"] == "1; 1; 1"
    assert number(found["day-one path, lines"]) <= 6500


def test_the_page_of_the_architecture_lists_the_day_one_path() -> None:
    house = tools()
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for folder, names in house["DAY_ONE"].items():
        for name in names.split():
            assert f"`{folder}/{name}.py`" in page
