"""Marks of tests, read from the files: for the generated page of effects, and for tests about tests."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mark(NamedTuple):
    """One mark of one test function."""

    test: str
    """Path::name of the test, with the class of a method, without parameters."""
    arguments: tuple[object, ...]
    case: str | None = None
    """Keyword argument `case`: id of the parameters that the mark is about."""


def read_marks(name: str, root: Path = ROOT) -> Iterator[Mark]:
    """Marks `pytest.mark.NAME(...)` of tests, by file and line: decorators of functions, methods and classes, and of a case.

    Args:
        name: name of the mark.
        root: root of the repository.
    """
    for file in sorted((root / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if f"mark.{name}" in text:
            path = file.relative_to(root).as_posix()
            for test, decorators in _functions(ast.parse(text)):
                yield from (_mark(f"{path}::{test}", call) for call in _calls(name, decorators))


def list_functions(root: Path = ROOT) -> set[str]:
    """Path::name of all test functions, with the class of a method."""
    files = (root / "tests").rglob("test_*.py")
    return {
        f"{file.relative_to(root).as_posix()}::{name}"
        for file in files
        for name, _ in _functions(ast.parse(file.read_text(encoding="utf-8")))
    }


def _functions(module: ast.Module) -> Iterator[tuple[str, list[ast.expr]]]:
    """Names and decorators of functions, and of methods as Class::name with the decorators of the class."""
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.decorator_list
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield from ((f"{node.name}::{each.name}", [*node.decorator_list, *each.decorator_list]) for each in methods)


def _calls(name: str, decorators: list[ast.expr]) -> Iterator[ast.expr]:
    """Marks of a name in decorators, also those of a case: `pytest.param(..., marks=pytest.mark.NAME(...))`."""
    for decorator in decorators:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call | ast.Attribute):
                called = node.func if isinstance(node, ast.Call) else node
                if ast.unparse(called) == f"pytest.mark.{name}" and not _is_called(node, decorator):
                    yield node


def _is_called(node: ast.expr, decorator: ast.expr) -> bool:
    """True for the attribute inside of a call, which is a mark itself."""
    return any(isinstance(call, ast.Call) and call.func is node for call in ast.walk(decorator))


def _mark(test: str, call: ast.expr) -> Mark:
    if not isinstance(call, ast.Call):
        return Mark(test, ())
    case = next((keyword.value for keyword in call.keywords if keyword.arg == "case"), None)
    arguments = tuple(ast.literal_eval(argument) for argument in call.args)
    return Mark(test, arguments, None if case is None else ast.literal_eval(case))
