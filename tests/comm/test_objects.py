"""JSON collectives, and a check that no module of Weft creates or loads a pickle."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.lab.pool import run_ranks
from tests.test_imports import FILES, SOURCE, imports
from weft.comm.objects import all_gather_json, broadcast_json
from weft.plan import Parallel, Plan
from weft.topology.mesh import build_mesh

# By rank: very different lengths (one of several megabytes), empty values, Unicode, and numbers that must be exact.
VALUES: list[Any] = [
    None,
    {"ä 漢字 🧵": [1, 0.1 + 0.2, -(2**70)], "": {"none": None, "yes": True}},
    ["long" * 10**6, [], {}],
    [math.inf, -math.inf, 5e-324, -0.0],
]


def gather_and_broadcast(rank: int, ranks: int) -> tuple[list[Any], list[Any]]:
    """Gather all values, and broadcast from each rank; values of ranks other than the source are ignored."""
    return all_gather_json(VALUES[rank]), [broadcast_json(VALUES[rank], src) for src in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_gets_all_values(ranks: int) -> None:
    for gathered, received in run_ranks(ranks, gather_and_broadcast):
        assert gathered == VALUES[:ranks]
        assert received == VALUES[:ranks]
        assert ranks < 4 or math.copysign(1, gathered[3][3]) == -1


def send_nan_and_tuple(rank: int, ranks: int) -> list[Any]:
    return all_gather_json((math.nan, (rank, "x")))


def test_nan_stays_nan_and_tuples_become_lists() -> None:
    for gathered in run_ranks(2, send_nan_and_tuple):
        assert [row[1] for row in gathered] == [[0, "x"], [1, "x"]]
        assert all(math.isnan(row[0]) for row in gathered)


def gather_in_groups(rank: int, ranks: int) -> dict[str, tuple[list[Any], Any]]:
    """Gather and broadcast in the shared-memory groups of a mesh; the group of pp has a single rank."""
    mesh = build_mesh(Plan(parallel=Parallel(dp_shard=2, tp=2)), "cpu", ranks)
    groups = {axis: mesh.get_group(axis) for axis in ("dp_shard", "tp", "pp")}
    return {
        axis: (all_gather_json(f"from {rank}", group), broadcast_json(rank, group.size() - 1, group))
        for axis, group in groups.items()
    }


def test_subgroups_use_group_ranks() -> None:
    answers = run_ranks(4, gather_in_groups)
    for rank, answer in enumerate(answers):
        row, column = rank // 2 * 2, rank % 2
        assert answer["tp"] == ([f"from {row}", f"from {row + 1}"], row + 1)
        assert answer["dp_shard"] == ([f"from {column}", f"from {column + 2}"], column + 2)
        assert answer["pp"] == ([f"from {rank}"], rank)


def refuse(rank: int, ranks: int) -> None:
    for call in (all_gather_json, broadcast_json):
        with pytest.raises(TypeError, match="not JSON serializable"):
            call(dist)


def test_value_outside_json_is_refused_before_sending() -> None:
    run_ranks(1, refuse)


# Modules that create or load pickles, functions of torch that do, and the option of NumPy.
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
NAMES = {"torch.load", "torch.save", "torch.distributed.checkpoint"}
ENDINGS = ("_object", "_object_list")  # of torch.distributed


WRITERS = {
    "dcp_writer.py": "the format of torch's distributed checkpoints, which it writes, has pickles",
    "megatron.py": "the format of Megatron-Core, which it writes and reads without loading a pickle, has pickles",
}


def pickles(path: Path) -> Iterator[str]:
    """Lines of a file that create, send or load a pickle."""
    for line, module in imports(path):
        if module.partition(".")[0] in MODULES or module in NAMES:
            yield f"{path.relative_to(SOURCE)}:{line} imports {module}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and "allow_pickle" in [keyword.arg for keyword in node.keywords]:
            yield f"{path.relative_to(SOURCE)}:{node.lineno} sets allow_pickle"
        for name in names:
            if name in NAMES or name.endswith(ENDINGS):
                yield f"{path.relative_to(SOURCE)}:{node.lineno} uses {name}"


def test_no_module_uses_pickle() -> None:
    assert len(FILES) > 50
    assert [line for path in FILES if path.name not in WRITERS for line in pickles(path)] == []
    assert [line for path in FILES if path.name in WRITERS for line in pickles(path) if "load" in line] == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "def late():\n    import dill",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch.distributed.checkpoint as dcp",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "import torch\ntorch.distributed.broadcast_object_list([])",
        "from torch.distributed import gather_object",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_check_finds_pickles(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.comm.test_objects.SOURCE", tmp_path)
    monkeypatch.setattr("tests.test_imports.SOURCE", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(code)
    assert list(pickles(path))


def test_check_allows_json_and_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.comm.test_objects.SOURCE", tmp_path)
    monkeypatch.setattr("tests.test_imports.SOURCE", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(
        "import gc, json\nfrom safetensors.torch import load_file\nimport torch.distributed as dist\n"
        "json.load(load_file)\ngc.get_objects()\ndist.all_gather([], 1)\ntokenizer_object = 1\n"
    )
    assert list(pickles(path)) == []
