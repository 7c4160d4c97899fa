"""Tested versions of libraries: one line for a version that is not tested, and the same ranges in pyproject.toml."""

import os
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import weft
from tests.lab.pool import run_ranks
from weft import versions
from weft.observe.doctor.same import judge_versions
from weft.versions import TESTED, explain_version, explain_versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("package", "found", "is_tested"),
    [
        ("transformers", "5.23.0", True),
        ("transformers", "5.24.0", False),
        ("transformers", "5.16.2", False),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.14.0", False),
        ("numpy", "9.0", True),  # without tested versions
    ],
)
def test_only_an_untested_version_has_a_line(package: str, found: str, is_tested: bool) -> None:
    line = explain_version(package, found)
    assert (line is None) is is_tested
    if line:
        assert found in line
        assert f'pip install "{package}>={TESTED[package][0]},<{TESTED[package][1]}"' in line


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A next minor release of Transformers, and a diffusers that is not installed."""
    installed = {"transformers": "5.99.0", "diffusers": None}
    monkeypatch.setattr(versions, "_installed", lambda name: installed.get(name, TESTED[name][0]))


@pytest.mark.usefixtures("newer")
def test_installed_versions_have_one_line_each() -> None:
    (line,) = explain_versions()
    assert "transformers >= 5.17, < 5.24, and this is 5.99.0" in line
    assert explain_versions(["torch", "diffusers"]) == []


def warnings_of_prepare(rank: int, world_size: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(versions, "_installed", lambda name: {"transformers": "5.99.0"}.get(name))
        weft.prepare(nn.Linear(2, 2), optimizer=torch.optim.SGD)
    return [warning.filename for warning in caught if "is tested with" in str(warning.message)]


def test_own_loop_warns_once_at_its_line() -> None:
    assert run_ranks(2, warnings_of_prepare) == [[__file__], []]


def test_doctor_reports_an_untested_version() -> None:
    host = {"host": {"index": 0, "name": "node0"}, "versions": {"python": "3.13.0", "transformers": "5.99.0"}}
    (finding,) = judge_versions([host])
    assert (finding.level, finding.check) == ("yellow", "version")
    assert "this is 5.99.0" in finding.text


def test_project_admits_tested_versions_and_tests_run_with_them() -> None:
    """A dependency admits more than the tested versions, its pin in dev exactly the newest tested ones."""
    admitted: dict[str, list[Requirement]] = {}
    extras = PROJECT["optional-dependencies"]
    for text in [*PROJECT["dependencies"], *(text for name in extras if name != "dev" for text in extras[name])]:
        admitted.setdefault(Requirement(text).name, []).append(Requirement(text))
    tests = {Requirement(text).name: str(Requirement(text).specifier) for text in extras["dev"]}
    for package, (first, end) in TESTED.items():
        for requirement in admitted.get(package, []):
            assert requirement.specifier.contains(first), requirement
        if package != "torch" and package in admitted:
            assert all(requirement.specifier.contains(end) for requirement in admitted[package])
            assert tests[package] == f"<{end}"


def find_python(version: str) -> str | None:
    """Interpreter of a version on PATH or of pyenv."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


@pytest.mark.parametrize("version", ["3.12", "3.13", "3.14"])
def test_newer_pythons_compile_every_file_without_a_warning(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    folders = [str(ROOT / name) for name in ("src", "tests", "benchmarks", "examples", "docs")]
    command = [python, "-W", "error", "-m", "compileall", "-q", "-f", *folders]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
