"""The report: complete from a run folder, frank about an aborted one, escaped, offline, drawn by a real browser."""

import math
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.observe.run_folder import FACTS, JOB, write_run
from weft.errors import DataError
from weft.job import Job
from weft.observe.figures import smooth
from weft.observe.report import best_baseline_beaten, write_report

PLOTS = ["loss", "grad-norm", "learning-rate", "throughput", "step-time", "memory", "peak"]


class Page(HTMLParser):
    """Texts, attributes and tags of a page; what stands inside scripts and styles is no text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def parse(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run")))


def test_page_holds_figures_plan_job_environment_and_sample(report: Path) -> None:
    page = parse(report)
    assert "qwen3_moe · 30.5B parameters · 3.35B active" in page.texts
    figures = dict(pairwise(page.texts))
    assert figures["Baseline beaten"] == "bigram"
    assert figures["Peak memory"] == "10.99 GiB"
    assert figures["Skipped steps"] == "1"
    overflows = "Steps whose gradients were not finite: 1 on rank 1 of pp."
    pools = (
        "The activations that wait elsewhere take 1 GiB at most, of 1 GiB held; 75% of what was asked for was there."
    )
    settings = ("parallel.dp_shard", 'model_type = "qwen3_moe"', "2.13.0+cpu", FACTS["sample"], "(24)")
    for expected in (overflows, pools, "aten.mm in mlp", *settings):
        assert expected in page.text
    assert "not complete" not in page.text
    ids = [attributes.get("id") for tag, attributes in page.tags if tag == "div"]
    assert [name for name in ids if name] == [f"plot-{name}" for name in PLOTS]


def test_page_loads_nothing_from_anywhere(report: Path) -> None:
    page = parse(report)
    links = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action", "poster", "background")
    ]
    assert links == []
    assert not {"link", "iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    policies = [attributes["content"] or "" for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policies[0].startswith("default-src 'none'")
    assert "http" not in policies[0]


def test_headings_go_down_by_one_and_plots_are_described(report: Path) -> None:
    page = parse(report)
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    labels = [attributes["aria-label"] or "" for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(labels) == len(PLOTS)
    assert labels[0].startswith("Loss: From 8.")


def test_values_are_escaped_wherever_they_stand(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><b title="x">&\''
    facts = FACTS | {
        "model_type": evil,
        "device": evil,
        "sample": evil,
        "environment": {evil: evil},
        "anatomy": {evil: [evil]},
        "baselines": {evil: 6.0},
        "memory": {"measured": {evil: 5}, "predicted": {}},
    }
    job = JOB.model_copy(update={"out": evil})
    page = parse(write_report(write_run(tmp_path, steps=50, facts=facts, job=job)))
    clean = parse(write_report(write_run(tmp_path / "clean", steps=50)))
    assert "b" not in {tag for tag, _ in page.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == sum(tag == "script" for tag, _ in clean.tags)
    assert page.text.count("alert(1)") >= 8


def test_a_pipeline_is_drawn(tmp_path: Path) -> None:
    plan = {"parallel": {"pp": 2, "dp_shard": 1}, "pipeline": {"schedule": "zbv", "virtual_stages": 2}}
    job = Job.parse({**JOB.model_dump(), "plan": plan, "train": {"global_batch": 8, "micro_batch": 2}})
    text = parse(write_report(write_run(tmp_path, steps=3, job=job))).text
    assert "zbv with 4 micro-batches" in text
    assert "plot-pipeline" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_pipeline_whose_schedule_is_gone_is_named(tmp_path: Path) -> None:
    plan = {"parallel": {"pp": 2, "dp_shard": 1}, "pipeline": {"schedule": "gone.csv"}}
    job = Job.parse({**JOB.model_dump(), "plan": plan})
    assert "the schedule gone.csv cannot be read" in parse(write_report(write_run(tmp_path, steps=3, job=job))).text


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_run_gives_a_page_that_says_what_is_missing(tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path, steps=steps)
    (folder / "run.json").unlink()
    text = parse(write_report(folder)).text
    assert "This run is not complete" in text
    assert "run.json is missing" in text
    assert ("holds no step" if steps == 0 else f"The last step on record is {steps} of 400.") in text
    assert ("No step was recorded." in text) == (steps == 0)


def test_an_empty_folder_gives_a_page_too(tmp_path: Path) -> None:
    text = parse(write_report(tmp_path)).text
    assert all(name in text for name in ("metrics.jsonl", "evaluations.jsonl", "job.toml", "run.json"))


def test_null_values_in_run_json_count_as_missing(tmp_path: Path) -> None:
    text = parse(write_report(write_run(tmp_path, steps=2, facts=dict.fromkeys(FACTS)))).text
    assert "No sample text was recorded." in text
    assert "Memory by kind was not recorded." in text


def test_a_missing_folder_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(7.0, ("none", "lowest is 4.0000")), (5.0, ("unigram", "by 1.000 nats")), (3.5, ("bigram", "by 0.500 nats"))],
)
def test_baseline_beaten_is_the_lowest_above_the_loss(loss: float, expected: tuple[str, str]) -> None:
    assert best_baseline_beaten(loss, {"unigram": 6.0, "bigram": 4.0}) == expected


def test_smoothing_keeps_a_line_and_bridges_what_is_not_finite() -> None:
    line = np.linspace(9, 3, 400)
    line[100] = math.nan
    smoothed = smooth(line)
    assert np.allclose(smoothed[20:80], line[20:80])  # no lag
    assert np.isfinite(smoothed).all()
    noisy = line + np.random.default_rng(0).standard_normal(400)
    assert np.nanstd(smooth(noisy) - line) < 0.5 * np.nanstd(noisy - line)
    assert smooth(np.array([2.0])).tolist() == [2.0]


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or pytest.skip("no chromium, chromium-browser or google-chrome on the PATH")


def test_a_browser_draws_every_plot_without_an_error(browser: str, report: Path, tmp_path: Path) -> None:
    dom = dump_dom(browser, report, tmp_path)
    html = next(attributes for tag, attributes in dom.tags if tag == "html")
    assert "data-error" not in html, html
    drawn = [attributes for tag, attributes in dom.tags if "js-plotly-plot" in (attributes.get("class") or "").split()]
    assert [attributes["id"] for attributes in drawn] == [f"plot-{name}" for name in PLOTS]
    assert sum(attributes.get("class") == "main-svg" for _, attributes in dom.tags) >= len(PLOTS)
    for expected in ("unigram 6.214", "bigram 4.387", "skipped step", "median 63.7k", "gathered parameters", "3e−4"):
        assert any(expected in text for text in dom.texts), expected


def test_a_script_that_fails_leaves_a_mark_a_test_can_see(browser: str, report: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    html = report.read_text(encoding="utf-8")
    broken.write_text(html.replace("</main>", "<script>notThere()</script></main>"), encoding="utf-8")
    marks = next(attributes for tag, attributes in dump_dom(browser, broken, tmp_path).tags if tag == "html")
    assert "notThere" in (marks.get("data-error") or "")


def dump_dom(browser: str, path: Path, scratch: Path) -> Page:
    """The page as it stands after its scripts have run in a headless browser without a network."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1400,2400 --virtual-time-budget=10000 --dump-dom"
    )
    command = [browser, *flags.split(), f"--user-data-dir={scratch / 'profile'}", path.as_uri()]
    return Page(subprocess.run(command, capture_output=True, check=True, timeout=120, text=True).stdout)
