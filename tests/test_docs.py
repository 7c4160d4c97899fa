"""Docs: generated pages are up to date, links are valid, and jobs and settings in README and docs work."""

import ast
import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig

import weft
from tests.lab.plans import resolved
from tests.lab.techniques import TECHNIQUES
from tests.test_imports import PACKAGES
from weft.anatomy.build import build_on_meta
from weft.anatomy.documents import check_packing
from weft.anatomy.transformers import read_anatomy
from weft.cli.app import app
from weft.errors import ModelError, WeftError
from weft.job import Job, has_trainer, keys
from weft.parallel.choices import choose
from weft.parallel.pipeline.plan_schedule import runs_jointly
from weft.plan import Plan, ResolvedPlan
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


@pytest.mark.timeout(900)  # two pages build a model of every family of Transformers
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


MEMORY: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "memory_options.py"))


def memory_rows(name: str) -> dict[str, list[str]]:
    """Cells of the table of a model in docs/memory-options.md, by memory option."""
    section = MEMORY["PAGE"].read_text().partition(f"## {name}: ")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {option: cells for option, *cells in rows[1:]}


@pytest.mark.parametrize("name", MEMORY["JOBS"])
def test_memory_options_are_complete_and_savings_those_of_their_peaks(name: str) -> None:
    rows = memory_rows(name)
    assert list(rows) == list(MEMORY["OPTIONS"])
    base = float(rows["base plan"][0].replace(",", ""))
    for cells in rows.values():
        if not cells[0].startswith("refused"):
            assert float(cells[1].rstrip("%")) == pytest.approx(
                100 * (1 - float(cells[0].replace(",", "")) / base), abs=0.06
            )


def test_memory_page_quotes_the_options_of_the_table() -> None:
    rows = memory_rows("llama-8b")
    cheap, block = rows["recompute activation, norm"], rows["recompute block"]
    quoted = (
        f'{float(cheap[1].rstrip("%")):.0f} % less memory with `["activation", "norm"]`, '
        f'{float(block[1].rstrip("%")):.0f} % less with `["block"]` for {float(block[-1].rstrip("%")):.0f} % more FLOPs'
    )
    assert quoted in " ".join((ROOT / "docs" / "memory.md").read_text().split())


@pytest.mark.parametrize("option", ["base plan", "recompute block"])
@pytest.mark.parametrize("name", MEMORY["JOBS"])
def test_memory_options_are_those_of_dry_runs(name: str, option: str) -> None:
    """Run python docs/memory_options.py where this fails."""
    job = Job.load(ROOT / "examples" / f"{name}.toml")
    found = MEMORY["fullest"](MEMORY["with_option"](job, option), MEMORY["JOBS"][name])
    peak, *_, teraflops, _ = memory_rows(name)[option]
    assert found.count.peak / 2**30 == pytest.approx(float(peak.replace(",", "")), rel=1e-3)
    assert found.count.flops / 1e12 == pytest.approx(float(teraflops.replace(",", "")), rel=1e-3)


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


README = " ".join((ROOT / "README.md").read_text().split())


def test_readme_has_the_numbers_of_the_pages() -> None:
    """Families by axis, techniques in pairs, and speeds beside two baselines on an H100."""
    page = (ROOT / "docs" / "families.md").read_text().partition("## Decoders of text")[2].partition("\n## ")[0]
    proved = {
        axis: int(count) for axis, count in re.findall(r"^- (\w+).*?: (\d+)(?: of \d+)? proved", page, re.MULTILINE)
    }
    text = "sequence and pipeline parallelism for more than 130 families of language models, context parallelism"
    assert text in README
    assert min(proved[axis] for axis in ("zero", "tp", "pp")) > 130
    assert "(ring and Ulysses) for more than 90, expert parallelism for 48 of 54 with experts" in README
    assert proved["cp"] > 90
    assert "- ep: 48 of 54 proved" in page
    assert f"each pair of [{len(TECHNIQUES)} techniques]" in README
    table = (ROOT / "docs" / "compute.md").read_text().partition("| 2 rows a step |")[2].partition("\n\n")[0]
    packed = dict(re.findall(r"^\| (.*?) \|.*?\|.*?\| ([\d,]+) \(", table, re.MULTILINE))
    speed = {name: int(tokens.replace(",", "")) for name, tokens in packed.items()}
    plain, compiled = speed["plain Transformers, SDPA, bf16 autocast"], speed["plain, bf16 autocast, torch.compile"]
    default, fastest = speed["+ Triton kernels: the default"], speed["Weft, zero 0, compiled blocks"]
    ratios = f"at {default / plain:.2f} to {fastest / plain:.2f} times the speed of plain Transformers in bf16 autocast"
    assert ratios in README
    assert (
        f"at {default / compiled:.2f} to {fastest / compiled:.2f} times that of the same with torch.compile" in README
    )


def axes(**degrees: int) -> ResolvedPlan:
    return resolved(Plan.model_validate({"parallel": degrees}), 2)


def mamba() -> Any:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=96)
    return build_on_meta(config, torch.float32)


def bert() -> torch.nn.Module:
    with torch.device("meta"):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=96))


def pack_rows(model: Any) -> None:
    if problem := check_packing(model, read_anatomy(model)).problem:
        raise ModelError(problem)


LIMITS: dict[str, Callable[[], object]] = {
    "rings of context parallelism are for decoders of text": lambda: choose(bert(), axes(cp=2), "cpu", None),
    "stages for models of Transformers": lambda: choose(
        torch.nn.Sequential(torch.nn.Linear(4, 4)), axes(pp=2), "cpu", None
    ),
    "train only with `data.packing = false`": lambda: pack_rows(mamba()),
    "and refused under cp": lambda: choose(mamba(), axes(cp=2), "cpu", None),
}
"""What the README says that Weft does not do, with an attempt to do it."""


@pytest.mark.parametrize("limit", LIMITS)
def test_what_the_readme_excludes_is_refused(limit: str) -> None:
    assert limit in README.partition("## What Weft does not do today")[2].partition("## Further")[0]
    with pytest.raises(WeftError):
        LIMITS[limit]()


def test_joint_slots_overlap_as_the_readme_says() -> None:
    assert "overlap inside a rank only with expert parallelism (`ep` above 1)" in README
    plans = [{"parallel": {"pp": 2, "ep": ep}, "pipeline": {"schedule": "dualpipev"}} for ep in (1, 2)]
    assert [runs_jointly(Plan.model_validate(plan)) for plan in plans] == [False, True]


def test_tables_of_a_plan_and_errors_are_public_names() -> None:
    tables = {name.capitalize() for name in Plan.model_fields} - {"Techniques", "Prediction"}
    assert tables <= set(weft.__all__)
    assert issubclass(weft.errors.Stopped, weft.WeftError)


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
    resolved(Job.parse(tables, assignments).plan, ranks)


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
