"""A room imports only from rooms above it in the house, and the plan and the job come without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "weft"
HOUSE = (
    "errors lock plan refusal job",
    "device backends launch topology anatomy comm precision compute memory checkpoint data parallel train planner observe cli",
)
ROOMS = " ".join(HOUSE).split()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and module of every import in a file, also inside functions; `from weft import data` gives weft.data."""
    package = ["weft", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            whole = module == "weft"
            yield from ((node.lineno, f"{module}.{alias.name}" if whole else module) for alias in node.names)


def room(path: Path) -> str:
    """The room of a file below src/weft: a folder or a file of the top level."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def violations(path: Path) -> list[str]:
    """What a file imports from its own level or below without being allowed to."""
    ground = ROOMS[: ROOMS.index(room(path)) + 1]
    found = []
    for line, module in imports(path):
        parts = module.split(".")
        if parts[0] == "weft" and (len(parts) == 1 or parts[1] not in ground):
            found.append(f"{path.relative_to(SOURCE)}:{line} imports {module}, which is not above {room(path)}")
    return found


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def test_there_are_files_and_every_room_has_its_place() -> None:
    holds_code = {room(path) for path in FILES if path.name != "__init__.py"}
    assert {"plan", "job"} <= holds_code
    assert holds_code <= set(ROOMS)


@pytest.mark.parametrize(
    "path", [path for path in FILES if room(path) in ROOMS], ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_come_from_above(path: Path) -> None:
    assert violations(path) == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("from weft.errors import WeftError\nfrom weft.device.device import Device\nimport os", 0),
        ("import weft.train.loop", 1),
        ("from weft.cli import main", 1),
        ("from weft import observe, errors", 1),
        ("def late():\n    from weft.parallel import parallelize", 1),
        ("from ..data import rows", 1),
        ("from .launch import connect\nfrom . import mesh\nfrom .. import plan", 0),
        ("import weft", 1),
    ],
)
def test_the_check_sees_violations(code: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "cluster").mkdir()
    path = tmp_path / "cluster" / "mesh.py"
    path.write_text(code)
    assert len(violations(path)) == count


@pytest.mark.parametrize("module", ["weft", "weft.errors", "weft.plan", "weft.job"])
def test_no_torch(module: str) -> None:
    code = f"import sys, {module}; print({{name.split('.')[0] for name in sys.modules}} & {{'torch', 'transformers'}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
