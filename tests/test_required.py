"""What `make test` holds whatever its budget: a required test of each fault, command, file format and technique."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from tests.lab.lanes import COLLECTED
from tests.lab.marks import Mark, read_marks
from weft.cli.app import app

FAULTS = Path(__file__).parents[1] / "docs" / "faults.md"
FORMATS = {
    "adapter folder of PEFT",
    "chat template",
    "chats, jsonl, parquet and datasets",
    "checkpoint in the memory of hosts",
    "checkpoint, manifest.json and shards",
    "cluster, cluster.toml",
    "compressed-tensors, 2:4",
    "compressed-tensors, fp8",
    "compressed-tensors, int4",
    "compressed-tensors, int8",
    "DCP folder, read",
    "DCP folder, written",
    "hostfile",
    "folder of bitsandbytes in 4 bits",
    "Hugging Face folder, read",
    "Hugging Face folder, written",
    "images",
    "job, job.toml",
    "manifests of Kubernetes",
    "Megatron-Core folder, read",
    "Megatron-Core folder, written",
    "metrics.jsonl",
    "pipeline schedule, file.csv",
    "plan for another framework",
    "plan, plan.toml",
    "profile, trace.json.gz",
    "records of tasks",
    "report.html",
    "results of evaluation, eval.json",
    "script of Slurm, slurm.sh",
    "sounds",
    "tasks of evaluation, jsonl and YAML",
    "text, a function",
    "text, datasets",
    "text, files",
    "text, jsonl",
    "text, parquet",
    "text, python",
    "token cache",
    "token file and key file",
    "tokens, file.npy",
    "topology, topology.toml",
}
"""Files that Weft reads or writes for others than itself."""
TECHNIQUES = {
    "1-bit Adam",
    "Adafactor",
    "attention of packed rows",
    "automatic plan of a script",
    "auxiliary loss of routers",
    "biases of routers",
    "capacity of experts",
    "compressed gradients",
    "compressed messages of experts",
    "distillation",
    "dropout",
    "FP8",
    "FP8 of experts",
    "frozen weights in 4 bits",
    "hierarchical collectives",
    "jobs of other tasks",
    "jobs with a trainer of TRL",
    "joint lanes",
    "LoRA and DoRA",
    "loss without logits",
    "messages of experts in two levels",
    "models of other kinds",
    "Muon",
    "overlap of tp in chunks",
    "own loop",
    "pipeline schedules",
    "pruned models",
    "quantization-aware training",
    "ranks of an NPU",
    "recurrent mixers",
    "relocation of experts",
    "replicas of hot experts",
    "ring and Ulysses together",
    "rows_per_rank",
    "script of accelerate",
    "script of Diffusers",
    "script of Lightning",
    "script of Trainer",
    "script of TRL",
    "tensor parallelism of experts",
    "z-loss of routers",
}
"""Techniques that the covering array (`test_cover.py`) does not have."""


@cache
def marks() -> list[Mark]:
    """Marks `must` of all files."""
    return list(read_marks("must"))


def required(kind: str) -> dict[str, list[Mark]]:
    """Tests with the mark must("KIND: NAME"), by name."""
    found: dict[str, list[Mark]] = {}
    for mark in marks():
        begin, _, name = str(mark.arguments[0]).partition(": ")
        if begin == kind:
            found.setdefault(name, []).append(mark)
    return found


def faults() -> dict[str, str]:
    """Rows of the tables of faults.md: cell with the tests by the fault."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (`[^|]+`) \|$", FAULTS.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(rows)


def commands() -> Iterator[str]:
    """Commands of `weft`, with those of groups as "launch k8s"."""
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        yield from (f"{name} {inner}" for inner in command.commands) if hasattr(command, "commands") else (name,)


def test_each_fault_has_a_required_test() -> None:
    assert len(faults()) > 25
    assert set(required("fault")) == set(faults())


def test_required_tests_of_a_fault_are_in_its_row() -> None:
    """Of the tests that a row of faults.md names, one is required at least; and all of them exist."""
    tests = required("fault")
    for fault, cell in faults().items():
        files = re.findall(r"`([^`]+)`", cell)
        assert all((Path(__file__).parent / file).is_file() for file in files), fault
        assert {mark.test.partition("::")[0].removeprefix("tests/") for mark in tests[fault]} & set(files), fault


def test_each_command_has_a_required_test() -> None:
    assert set(required("command")) == set(commands())


def test_each_format_has_a_required_test() -> None:
    assert set(required("format")) == FORMATS


def test_each_technique_has_a_required_test() -> None:
    """A comparison with the untouched model. Where there are a refusal and a composition of two techniques, one of each too."""
    assert set(required("parity")) == TECHNIQUES
    assert set(required("refusal")) | set(required("composition")) <= TECHNIQUES


def test_marks_of_cases_name_existing_cases(request: pytest.FixtureRequest) -> None:
    """Checked for the functions of which all cases are collected."""
    collected = request.config.stash[COLLECTED]
    functions = {name.partition("[")[0] for name in collected}
    found = [mark for mark in marks() if mark.case is not None and mark.test in functions]
    assert [mark for mark in found if f"{mark.test}[{mark.case}]" not in collected] == []


def test_marks_of_functions_methods_and_cases_are_read(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "import pytest\n"
        '@pytest.mark.must("one", case="x-1")\n'
        "def test_one(x): ...\n"
        '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.must("two")), 2])\n'
        "def test_two(x): ...\n"
        '@pytest.mark.must("three")\n'
        "class TestThree:\n"
        '    @pytest.mark.must("four")\n'
        "    def test_four(self): ...\n"
        "@pytest.mark.must\n"
        "def test_five(x): ...\n"
    )
    assert list(read_marks("must", tmp_path)) == [
        Mark("tests/test_a.py::test_one", ("one",), "x-1"),
        Mark("tests/test_a.py::test_two", ("two",)),
        Mark("tests/test_a.py::TestThree::test_four", ("three",)),
        Mark("tests/test_a.py::TestThree::test_four", ("four",)),
        Mark("tests/test_a.py::test_five", ()),
    ]
