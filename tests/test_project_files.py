"""Workflows, issue forms and other files of the project: valid YAML, known actions, and all slices of the sweep."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="the sdist has no .github")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"))


def read(path: str | Path) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_project_has_workflows_and_forms() -> None:
    assert [path.stem for path in WORKFLOWS] == ["nightly", "release", "tests"]
    assert [path.stem for path in FORMS] == ["bug_report", "feature_request"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_complete(path: Path) -> None:
    """Jobs need jobs that exist and have a time limit, actions have a major version, and `make` has its targets."""
    workflow, targets = read(path), re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert workflow[True]  # the key `on` is a boolean of YAML 1.1
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= workflow["jobs"].keys()
        assert job["runs-on"] == "ubuntu-latest"
        assert job["timeout-minutes"]
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"]) if "uses" in step else step["run"]
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in targets


def test_nightly_sweep_runs_every_slice() -> None:
    job = read(".github/workflows/nightly.yml")["jobs"]["sweep"]
    numbers = job["strategy"]["matrix"]["slice"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "SLICE=${{ matrix.slice }}/${{ strategy.job-total }}" in job["steps"][-1]["run"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_form_is_complete(path: Path) -> None:
    form = read(path)
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    if path.stem == "bug_report":
        required = {field["id"] for field in fields if field.get("validations", {}).get("required")}
        assert {"job", "doctor", "versions"} <= required


def test_hooks_run_what_make_lint_runs() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    hooks = [hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in repository["hooks"]]
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    assert hooks == ["ruff check", "ruff format", "mypy"]
    assert all(f"$(BIN)/{hook}" in recipe for hook in hooks)


def test_citation_has_the_version_and_license_of_the_package() -> None:
    project, citation = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"], read("CITATION.cff")
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["authors"] == [{"name": "The Weft authors"}]


def test_make_alone_lists_all_targets() -> None:
    result = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = re.findall(r"^make ([a-z-]+) {2,}\S", result.stdout, re.M)
    assert listed == re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
