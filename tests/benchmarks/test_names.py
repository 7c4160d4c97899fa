"""Scripts outside the package import names that exist."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "docs", "examples") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: ".".join(path.relative_to(ROOT).with_suffix("").parts))
def test_scripts_import_names_of_weft_that_exist(script: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "weft":
            continue
        assert node.module
        module = importlib.import_module(node.module)
        missing += [f"line {node.lineno}: {node.module}.{name.name}" for name in node.names if not _has(module, name)]
    assert not missing


def _has(module: object, name: ast.alias) -> bool:
    if hasattr(module, name.name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name.name}")  # type: ignore[attr-defined]
    except ImportError:
        return False
    return True
