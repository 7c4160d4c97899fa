"""Import layering: a package imports only from packages before it in LAYERS; plan and job do not import torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft

SOURCE = Path(__file__).parent.parent / "src" / "weft"
LAYERS = (
    "errors lock files plan object_store names refusal job inputs own_code versions group_progress compat",
    "device backends launch topology anatomy comm precision compute memory optimizers data",
    "parallel checkpoint adapters evaluation training planner observe integrations compress posttraining cli __main__",
)
PACKAGES = " ".join(LAYERS).split()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import in a file, including imports in functions; `from weft import data` gives weft.data."""
    package = ["weft", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            is_top_level = module == "weft"
            yield from ((node.lineno, f"{module}.{alias.name}" if is_top_level else module) for alias in node.names)


def package_of(path: Path) -> str:
    """Package of a file below src/weft: a folder or a module of the top level."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def violations(path: Path) -> list[str]:
    """Imports of a file from packages after its own package."""
    allowed = PACKAGES[: PACKAGES.index(package_of(path)) + 1]
    found = []
    for line, module in imports(path):
        parts = module.split(".")
        if parts[0] == "weft" and (len(parts) == 1 or parts[1] not in allowed):
            found.append(f"{path.relative_to(SOURCE)}:{line} imports {module}, which is not before {package_of(path)}")
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def test_every_package_is_in_layers() -> None:
    packages = {package_of(path) for path in FILES if path.name != "__init__.py"}
    assert {"plan", "job"} <= packages
    assert packages <= set(PACKAGES)


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if package_of(path) in PACKAGES],
    ids=lambda p: ".".join(p.relative_to(SOURCE).with_suffix("").parts),
)
def test_imports_follow_the_layers(path: Path) -> None:
    assert violations(path) == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("from weft.errors import WeftError\nfrom weft.device.device import Device\nimport os", 0),
        ("import weft.training.loop", 1),
        ("from weft.cli import main", 1),
        ("from weft import observe, errors", 1),
        ("def late():\n    from weft.parallel import parallelize", 1),
        ("from ..data import rows", 1),
        ("from .launch import connect\nfrom . import mesh\nfrom .. import plan", 0),
        ("import weft", 1),
    ],
)
def test_violations_are_detected(code: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "topology").mkdir()
    path = tmp_path / "topology" / "mesh.py"
    path.write_text(code)
    assert len(violations(path)) == count


@pytest.mark.parametrize("module", ["weft", "weft.errors", "weft.plan", "weft.job"])
def test_no_torch(module: str) -> None:
    code = f"import sys, {module}; print({{name.split('.')[0] for name in sys.modules}} & {{'torch', 'transformers'}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


LONG_FILES = {
    "job.py": "all keys of a job but those of its plan, and their TOML",
    "backends/shared_memory.py": "one process group, with a method for each collective",
    "planner/costmodel/step_time.py": "the terms of one sum, which are read beside each other",
    "launch/tunnel.py": "both ends of one protocol",
    "comm/overlap.py": "four matmuls, each forward and backward, in one table",
}
"""Files of more than 400 lines, each with its reason."""


def test_long_files_have_a_reason() -> None:
    long = {str(path.relative_to(SOURCE)) for path in FILES if len(path.read_text().splitlines()) > 400}
    assert long == set(LONG_FILES)


def test_public_names_are_not_shadowed_by_modules() -> None:
    """No function has the name of a module: importing weft.x sets the attribute x of weft."""
    modules = {package_of(path) for path in FILES}
    assert set(weft.__all__) & modules == {"errors"}  # a module itself
    weft.train, weft.prepare, weft.export  # noqa: B018 - imports their modules
    assert all(callable(getattr(weft, name)) for name in set(weft.__all__) - {"errors", "__version__"})


def test_public_names_are_sorted_and_complete() -> None:
    assert weft.__all__ == sorted([*weft.MODULES, "__version__", "errors"])
    with pytest.raises(AttributeError, match="module weft has no tain; it has"):
        weft.tain  # noqa: B018
