"""Contents of wheel and sdist, and a run from an installed wheel without the repository."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[1]
OUTPUTS = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "models", "build", "dist")
SMALL = (  # the recipe of `weft train` with little text and a small model
    "train.steps=3",
    "train.evaluate_every=0",
    "data.source=text",
    "data.path=text.txt",
    "data.seq_len=32",
    "data.cache=cache",
    "data.held_out=0.2",
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=64",
    "plan.precision.param_dtype=fp32",
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with sdist and wheel, built by `python -m build` from a copy of the sources."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "source", ignore=OUTPUTS)
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder / "source")]
    result = subprocess.run(argv, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def test_wheel_holds_every_module_recipe_style_sheet_and_the_license(wheel: Path) -> None:
    package = ROOT / "src" / "weft"
    files = [path for kind in ("*.py", "*.toml", "*.css", "py.typed") for path in package.rglob(kind)]
    expected = {str(path.relative_to(package.parent)) for path in files}
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.endswith("/")]
        metadata = file.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        license = file.read(next(name for name in names if name.endswith("/LICENSE"))).decode()
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "License-Expression: Apache-2.0" in metadata
    assert license == (ROOT / "LICENSE").read_text()


def test_sdist_holds_files_linked_from_the_readme(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").iterdir() if path.is_file()}
    examples = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").iterdir() if path.is_file()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "tests/lab/pool.py"}
    assert pages | examples | wanted <= names


@pytest.mark.slow("makes an environment, installs the wheel and trains")
def test_installed_wheel_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, work = tmp_path / "environment", tmp_path / "work"
    install(wheel, environment)
    work.mkdir()
    lines = [f"Line {number} counts {number % 7} and {number % 5}." for number in range(2000)]
    (work / "text.txt").write_text("\n".join(lines))
    where = run(environment, work, "python", "-c", "import weft; print(weft.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(environment)

    run(environment, work, "weft", "train", *(word for setting in SMALL for word in ("--set", setting)))
    metrics = [json.loads(line) for line in (work / "runs/first/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert (work / "runs/first/report.html").stat().st_size > 0
    model = AutoModelForCausalLM.from_pretrained(work / "runs/first/export")
    assert model.config.hidden_size == 64


def install(wheel: Path, environment: Path) -> None:
    """Install a wheel into a new environment that shares the dependencies of this one, but not Weft.

    Their folders come last on the path. `.pth` files in them, such as that of an editable install, are not read.
    """
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel)]
    result = subprocess.run(pip, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    dependencies = [path for path in sys.path if path.endswith("-packages")]
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")


def run(environment: Path, folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment in a folder, without the Python paths of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    argv = [str(environment / "bin" / program), *arguments]
    result = subprocess.run(argv, cwd=folder, env=clean, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result
