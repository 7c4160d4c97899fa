"""Measures of the structure of src/weft, as a table: python tools/house.py [FOLDER]

`make lint` prints it. Code lines are lines of a function without its docstring, blank lines and comments; branches are its
if, for, while, except, comprehensions, boolean and conditional expressions.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BRANCHES = (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp, ast.BoolOp, ast.comprehension, ast.Match)
DAY_ONE = {
    "plan": "tables rules resolve",
    "parallel": "choices parallelize build operators runtime",
    "parallel/experts": "layers path",
    "parallel/tensor": "tensor_parallel",
    "parallel/sequence": "rows",
    "parallel/loss": "labels",
    "parallel/data": "data_parallel fsdp ddp distributed_optimizer",
    "memory": "recompute",
    "comm": "collectives",
    "training": "step loop session",
    "checkpoint": "snapshot manifest",
}
"""Files that one reads to know how a plan changes a model and how it trains, in this order."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, text: list[str]) -> int:
    """Lines of a function without docstring, blank lines and comments."""
    skipped: set[int] = set()
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        skipped = set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    return sum(n not in skipped and not re.fullmatch(r"\s*(#.*)?", text[n - 1]) for n in lines)


def branches(function: ast.AST) -> int:
    """Branches of a function."""
    return sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def measures(folder: Path) -> dict[str, str]:
    """Table of measures, by their names."""
    texts = {path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.splitlines() for path, text in texts.items()}
    found = [
        (code_lines(function, lines[path]), branches(function), f"{path}:{function.name}", function.name)
        for path, tree in trees.items()
        for function in functions(tree)
    ]
    line = next(each for each in found if each[2] == "parallel/parallelize.py:parallelize")
    longest, deepest = max(found), max(found, key=lambda each: each[1])
    checks = [each for each in found if re.match(r"_?(check|refuse)_", each[3])]
    everything = "\n".join(texts.values())

    def count(pattern: str) -> int:
        return len(re.findall(pattern, everything, re.M))

    def files(pattern: str) -> int:
        return sum(bool(re.search(pattern, text)) for text in texts.values())

    paths = [Path(room, f"{name}.py") for room, names in DAY_ONE.items() for name in names.split()]
    day_one = sum(len(texts[path].splitlines()) for path in paths)
    return {
        "parallelize(): code lines / branches": f"{line[0]} / {line[1]}",
        "longest function, code lines": f"{longest[0]} ({longest[2]})",
        "most branches of a function": f"{deepest[1]} ({deepest[2]})",
        "check_ and refuse_ functions, files": f"{len(checks)}, {len({each[2].partition(':')[0] for each in checks})}",
        "assignments of experts.forward": str(count(r"\bexperts\.forward = ")),
        "files that name etp": str(files(r"\betp\b")),
        "clip formula; loss scale after a step; seed of dropout": (
            f"{count(r'max_norm / [(]')}; {count(r'loss_scale[.]after[(]')}; {count(r'[*] STEPS_PER_SEED')}"
        ),
        "files directly in parallel/": str(sum(path.parent == Path("parallel") for path in texts) - 1),
        "type: ignore / Any": f"{count('type: ignore')} / {count('[^.]Any[^a-z]')}",
        "resolved in comments": str(count(r"[Rr]esolved plan|plan: resolved")),
        "lines of src/weft": f"{sum(len(text.splitlines()) for text in texts.values()):,}",
        "day-one path, lines": f"{day_one:,}",
    }


if __name__ == "__main__":
    for name, value in measures(Path(sys.argv[1] if sys.argv[1:] else "src/weft")).items():
        print(f"{name:<58} {value}")
