"""Docs: generated pages are up to date, links are valid, and jobs and settings in README and docs work."""

import ast
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.test_imports import PACKAGES
from weft.cli.app import app
from weft.job import Job, has_trainer, keys
from weft.posttraining.job import TrainerJob

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
FRONT = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md", "docs/coming-from.md")
]
PAGES = sorted({*FRONT, *DOCS, ROOT / "SECURITY.md", ROOT / "benchmarks" / "README.md"})
TRAIN = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
OPTIONS = {option for parameter in TRAIN.params for option in parameter.opts}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


GENERATED: dict[str, Callable[[], str]] = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
ALL_FAMILIES = ("families.md", "packing.md")  # build a model of every family of Transformers


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    if "Generated with Transformers" in text and f"Transformers {transformers.__version__}:" not in text:
        pytest.skip("another version has other families")
    assert text == GENERATED[name](), f"run python docs/generate.py: {name} is old"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_tests_exist(page: Path) -> None:
    """FILE::NAME and FILE::CLASS::NAME, as pytest takes them."""
    for path, *names in (found.split("::") for found in re.findall(r"`(tests/[\w/]+\.py::[\w:]+)`", page.read_text())):
        body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
        for name in names:
            (found,) = [item for item in body if isinstance(item, ast.FunctionDef | ast.ClassDef) and item.name == name]
            body = found.body


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        target = page.parent / link if link else page
        assert "://" in link or target.exists(), link
        if anchor and "://" not in link:
            assert anchor in anchors(target), f"{link}#{anchor}"
    for path in re.findall(r"`((?:src|docs|examples|tests|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def anchors(page: Path) -> set[str]:
    """Link anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked == {page.name for page in DOCS} - {"README.md"}
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", FRONT, ids=name_of)
def test_lines_have_at_most_120_characters(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if len(line) > 120] == []


@pytest.mark.parametrize("page", [page for page in DOCS if "Generated " not in page.read_text()], ids=name_of)
def test_page_begins_with_a_sentence_and_an_example(page: Path) -> None:
    top = re.split(r"^## ", page.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    title, *blocks = top.strip().split("\n\n")
    assert title.startswith("# ")
    assert any(re.match(r"[`\w]", block) for block in blocks)
    if page.name not in ("README.md", "run.md", "faults.md"):  # an index, a synopsis, a table of faults
        assert any(block.startswith(("    ", "```")) for block in blocks)


def test_job_in_the_readme_is_valid() -> None:
    block = re.search(r"    # job.toml\n(.*?)\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block
    job = Job.parse(tomllib.loads(re.sub(r"^    ", "", block[1], flags=re.MULTILINE)))
    assert job.data.source == "text"


@pytest.mark.parametrize("path", [*(ROOT / "examples").glob("*.toml"), *(ROOT / "src/weft/recipes").glob("*.toml")])
def test_shipped_jobs_are_valid(path: Path) -> None:
    TrainerJob.load(path) if has_trainer(path) else Job.load(path)


def test_readme_names_every_command() -> None:
    named = set(re.findall(r"`weft ([a-z]+)", (ROOT / "README.md").read_text()))
    assert set(typer.main.get_command(app).commands) <= named  # type: ignore[attr-defined]


def test_contributing_lists_the_packages_in_the_order_of_imports() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)(?:/|\.py)`", " ".join(rows)) == PACKAGES


def settings() -> list[str]:
    """Weft settings in the last column of the tables of other frameworks' settings, by row."""
    text = (ROOT / "docs" / "coming-from.md").read_text()
    text += (ROOT / "README.md").read_text().partition("## Coming from another framework")[2].partition("\n## ")[0]
    rows = [line.rstrip(" |").rpartition(" | ")[2] for line in text.splitlines() if line.startswith("| ")]
    return sorted({row for row in rows if "`" in row})


def test_tables_of_other_frameworks_are_found() -> None:
    assert len(settings()) > 60


@pytest.mark.parametrize("row", settings())
def test_settings_of_other_frameworks_lead_to_a_plan(row: str) -> None:
    assignments = []
    for setting in re.findall(r"`([^`]+)`", row):
        key = setting.partition(" = ")[0]
        if "." in key or key == "out":
            assert key in keys(), setting
            assignments += [setting] if " = " in setting else []
        else:
            assert key in OPTIONS | {"auto"}, setting
    if any("1-bit" in setting or "onebit" in setting for setting in assignments):
        assignments.append("optimizer.freeze_steps = 20")
    tables = {"model": {"config": "config.json"}}
    parallel = Job.parse(tables, assignments).plan.parallel
    ranks = parallel.dp_replicate * parallel.tp * parallel.cp * parallel.pp * max(parallel.dp_shard, parallel.ep)
    Job.parse(tables, assignments).plan.resolve(ranks)


def test_readme_generates_from_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: SimpleNamespace
) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    folder = tmp_path / re.search(r'folder = "(.*)"', code[1])[1]  # type: ignore[index]
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(compile(code[1], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(re.search(r'tokenizer\("(.*?)"', code[1])[1])  # type: ignore[index]
