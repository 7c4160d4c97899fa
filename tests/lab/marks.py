"""Marks of tests, read from the files: for the generated page of effects, and for tests about tests."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mark(NamedTuple):
    """One mark of one test function."""

    test: str
    """Path::name of the test, without parameters."""
    arguments: tuple[object, ...]


def read_marks(name: str, root: Path = ROOT) -> Iterator[Mark]:
    """Marks `pytest.mark.NAME(...)` on test functions, by file and line.

    Args:
        name: name of the mark.
        root: root of the repository.
    """
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if f"mark.{name}" not in text:
            continue
        for function in ast.parse(text).body:
            if isinstance(function, ast.FunctionDef):
                for decorator in function.decorator_list:
                    call = decorator.func if isinstance(decorator, ast.Call) else decorator
                    if ast.unparse(call) == f"pytest.mark.{name}":
                        arguments = decorator.args if isinstance(decorator, ast.Call) else []
                        yield Mark(
                            f"{file.relative_to(root).as_posix()}::{function.name}",
                            tuple(ast.literal_eval(argument) for argument in arguments),
                        )
