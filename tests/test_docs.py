"""Pages that are generated are up to date, links lead somewhere, and what README and docs show can be read by Weft."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest
import transformers

from weft.job import Job

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_generated_pages_are_up_to_date() -> None:
    for name, page in runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"].items():
        text = (ROOT / "docs" / name).read_text()
        if "Generated with Transformers" in text and f"Transformers {transformers.__version__}:" not in text:
            continue  # another version has other families
        assert (ROOT / "docs" / name).read_text() == page(), f"run python docs/generate.py: {name} is old"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert "://" in link or (page.parent / link).exists(), link
    for path in re.findall(r"`((?:src|docs|examples|tests|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_job_in_the_readme_is_a_job() -> None:
    block = re.search(r"    # job.toml\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    job = Job.parse(tomllib.loads(re.sub(r"^    ", "", block[1], flags=re.MULTILINE)))
    assert job.data.source == "text"


@pytest.mark.parametrize("path", [*(ROOT / "examples").glob("*.toml"), *(ROOT / "src/weft/recipes").glob("*.toml")])
def test_jobs_that_ship_are_jobs(path: Path) -> None:
    Job.load(path)
