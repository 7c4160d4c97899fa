"""Training report: complete, escaped, offline, small, valid for aborted runs, and laid out without overflow in a browser."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.lab.families import family
from tests.observe.run_folder import FACTS, JOB, write_run
from weft.errors import DataError
from weft.job import Job
from weft.observe.figures import loss_figure, smooth, step_figure
from weft.observe.record import read_run
from weft.observe.report import best_baseline_beaten, write_report
from weft.training import metrics
from weft.training.metrics import read_metrics

PLOTS = ["loss", "grad-norm", "learning-rate", "loss-scale", "throughput", "step-time", "memory", "peak"]
MOST_BYTES = 1_500_000  # maximum size of a page


class Page(HTMLParser):
    """Texts, attributes and tags of a page, without the contents of scripts and styles."""

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


def plots_of(page: Page) -> list[str]:
    """Ids of the charts of a page, in order."""
    ids = [attributes.get("id") or "" for tag, attributes in page.tags if tag == "div"]
    return [name.removeprefix("plot-") for name in ids if name.startswith("plot-")]


def parse(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run")))


@pytest.mark.must("format: report.html")
def test_page_contains_figures_plan_job_environment_and_sample(report: Path) -> None:
    page = parse(report)
    assert "qwen3_moe · 30.5B parameters · 3.35B active" in page.texts
    figures = dict(pairwise(page.texts))
    assert figures["Baseline beaten"] == "bigram"
    assert figures["Peak memory"] == "10.99 GiB"
    assert figures["Skipped steps"] == "1"
    overflows = "Steps with non-finite gradients: 1 on pp rank 1."
    pools = "Offloaded activations: peak 1 GiB of 1 GiB reserved; 75% of the requested bytes reused free blocks."
    settings = ("parallel.dp_shard", 'model_type = "qwen3_moe"', "2.13.0+cpu", FACTS["sample"], "(24)")
    for expected in (overflows, pools, "aten.mm in mlp", *settings):
        assert expected in page.text
    assert "not complete" not in page.text
    assert plots_of(page) == PLOTS
    assert sum(tag == "path" for tag, _ in page.tags) > len(PLOTS)
    for expected in ("unigram 6.214", "bigram 4.387", "skipped step", "median 63.7k", "gathered parameters", "0.0003"):
        assert any(expected in text for text in page.texts), expected


def test_page_loads_nothing_from_anywhere(report: Path) -> None:
    page = parse(report)
    links = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action", "poster", "background")
    ]
    assert links == []
    assert not {"iframe", "img", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    policies = [attributes["content"] or "" for tag, attributes in page.tags if "http-equiv" in attributes]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]  # pictures inside of the page
    assert not {"script", "link"} & {tag for tag, _ in page.tags}


def test_headings_go_down_by_one_and_plots_are_described(report: Path) -> None:
    page = parse(report)
    levels = [int(tag[1]) for tag, _ in page.tags if tag in ("h1", "h2", "h3", "h4")]
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    labels = [attributes["aria-label"] or "" for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(labels) == len(PLOTS)
    assert labels[0].startswith("Loss: From 8.")


def test_all_values_are_escaped(tmp_path: Path) -> None:
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
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any(attributes.get("title") == "x" for _, attributes in page.tags)
    assert page.text.count("alert(1)") >= 8


def test_sample_and_usage_follow_the_loss(report: Path) -> None:
    page = parse(report)
    headings = [text for text in page.texts if text in ("Loss", "Sample", "Use this model", "Optimization", "Plan")]
    assert headings == ["Loss", "Sample", "Use this model", "Optimization", "Plan"]


def test_code_example_of_the_report_runs(tmp_path: Path) -> None:
    folder, text = write_run(tmp_path, steps=3), ['The quick brown fox jumps. It\'s "so" \\ quick.']
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text, vocab_size=300, special_tokens=["</s>"])
    # Without an end-of-text token, generation does not stop early.
    config = LlamaConfig(**{**family("llama"), "vocab_size": 300, "eos_token_id": None})
    torch.manual_seed(0)  # for the weights and for sampling
    LlamaForCausalLM(config).save_pretrained(folder / "export")
    without = program_of(write_report(folder))  # a run on token ids exports no tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder / "export")
    (folder / "run.json").write_text(json.dumps(FACTS | {"sample": text[0]}), encoding="utf-8")
    program = program_of(write_report(folder))
    assert "tokenizer" in program
    for source, begins in ((program, "The quick brown fox"), (without, "tensor([[  1,   2,   3")):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(source, {})
        assert printed.getvalue().startswith(begins)
        assert len(printed.getvalue()) > len(begins) + 10


def program_of(report: Path) -> str:
    return next(text for text in parse(report).texts if "from_pretrained" in text)


def test_only_long_runs_are_smoothed(tmp_path: Path) -> None:
    for steps, smoothed in ((49, False), (50, True)):
        page = parse(write_report(write_run(tmp_path / str(steps), steps=steps)))
        assert ("smoothed" in page.texts) == smoothed


def test_unknown_mfu_and_constant_loss_scale_are_omitted(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=10)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plain = [json.dumps(line | {"mfu": None, "loss_scale": 1.0}) + "\n" for line in lines]
    before = parse(write_report(folder))
    (folder / "metrics.jsonl").write_text("".join(plain), encoding="utf-8")
    after = parse(write_report(folder))
    assert ("MFU" in before.texts, "MFU" in after.texts) == (True, False)
    assert ("loss-scale" in plots_of(before), "loss-scale" in plots_of(after)) == (True, False)


def test_default_settings_are_collapsed(tmp_path: Path) -> None:
    job = Job.parse({**JOB.model_dump(), "plan": {"parallel": {"zero": 2}, "memory": {"recompute": ["block"]}}})
    html = write_report(write_run(tmp_path, steps=3, job=job)).read_text(encoding="utf-8")
    shown, folded, _ = html[html.index("<h2>Plan") :].split("<details>")
    assert [name for name in SETTINGS if f">{name}<" in shown] == ["parallel.zero", "memory.recompute"]
    assert [name for name in SETTINGS if f">{name}<" in folded] == ["parallel.tp", "precision.update"]


SETTINGS = ("parallel.tp", "parallel.zero", "precision.update", "memory.recompute")


def test_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    rows = read_metrics(write_run(tmp_path, steps=400) / "metrics.jsonl")
    long = [replace(rows[step % 400], step=step + 1) for step in range(20_000)]
    long[12_000] = replace(long[12_000], loss=99.0)
    loss = loss_figure(long, [], {})
    assert len(loss) < 100_000
    assert ">100<" in loss  # a tick of the axis: the spike is kept
    for name in ("learning_rate", "step_seconds"):
        assert len(step_figure(long, name, name)) < 100_000


def test_page_with_a_long_pipeline_stays_small(tmp_path: Path) -> None:
    for micro_batches, drawn in ((120, True), (2000, False)):
        plan = {"parallel": {"pp": 8, "dp_shard": 1}, "pipeline": {"schedule": "1f1b"}}
        job = Job.parse(
            {**JOB.model_dump(), "plan": plan, "train": {"global_batch_size": micro_batches, "micro_batch_size": 1}}
        )
        path = write_report(write_run(tmp_path / str(micro_batches), steps=3, job=job))
        assert path.stat().st_size < MOST_BYTES
        assert ("plot-pipeline" in path.read_text(encoding="utf-8")) == drawn
        assert ("too many to draw" in parse(path).text) != drawn


def test_pipeline_is_drawn(tmp_path: Path) -> None:
    plan = {"parallel": {"pp": 2, "dp_shard": 1}, "pipeline": {"schedule": "zbv", "virtual_stages": 2}}
    job = Job.parse({**JOB.model_dump(), "plan": plan, "train": {"global_batch_size": 8, "micro_batch_size": 2}})
    text = parse(write_report(write_run(tmp_path, steps=3, job=job))).text
    assert "zbv with 4 micro-batches" in text
    assert "plot-pipeline" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_missing_schedule_file_is_reported(tmp_path: Path) -> None:
    plan = {"parallel": {"pp": 2, "dp_shard": 1}, "pipeline": {"schedule": "gone.csv"}}
    job = Job.parse({**JOB.model_dump(), "plan": plan})
    assert "the schedule gone.csv cannot be read" in parse(write_report(write_run(tmp_path, steps=3, job=job))).text


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_page_of_an_aborted_run_lists_missing_data(tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path, steps=steps)
    (folder / "run.json").unlink()
    text = parse(write_report(folder)).text
    assert "This run is not complete" in text
    assert "run.json is missing" in text
    assert ("contains no steps" if steps == 0 else f"The last recorded step is {steps} of 400.") in text
    assert ("No step was recorded." in text) == (steps == 0)


def test_page_of_a_run_that_has_written_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run folder"):
        write_report(tmp_path)
    (tmp_path / "run_id").write_text("1")
    text = parse(write_report(tmp_path)).text
    assert all(name in text for name in ("metrics.jsonl", "evaluations.jsonl", "job.toml", "run.json"))


def test_null_values_in_run_json_count_as_missing(tmp_path: Path) -> None:
    text = parse(write_report(write_run(tmp_path, steps=2, facts=dict.fromkeys(FACTS)))).text
    assert "No sample text was recorded." in text
    assert "Memory by kind was not recorded." in text


def test_a_missing_folder_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.must("fault: `run.json` or `prepared.json` is damaged")
@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        "[" * 100_000,
        "9" * 5000,
        '{"baselines": 7}',
        '{"sample": ["a"]}',
        '{"environment": {"a": {}}}',
        "\udcff",
    ],
)
def test_invalid_run_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        write_report(tmp_path)


def test_run_json_that_is_not_a_regular_file_or_too_large_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(DataError, match="no regular file"):
        write_report(tmp_path)
    (tmp_path / "run.json").unlink()
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="more than"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(7.0, ("none", "lowest is 4.0000")), (5.0, ("unigram", "by 1.000 nats")), (3.5, ("bigram", "by 0.500 nats"))],
)
def test_baseline_beaten_is_the_lowest_above_the_loss(loss: float, expected: tuple[str, str]) -> None:
    assert best_baseline_beaten(loss, {"unigram": 6.0, "bigram": 4.0}) == expected


def test_smoothing_keeps_straight_lines_and_bridges_gaps() -> None:
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


@pytest.mark.parametrize("width", [1400, 400])
def test_no_element_overflows_the_page(browser: str, report: Path, tmp_path: Path, width: int) -> None:
    """Load the page in a frame of this width; a script finds charts, labels and tables that are too wide."""
    around = tmp_path / "around.html"
    script = """
        onload = () => {
            const page = document.querySelector('iframe').contentDocument
            const wide = [...page.querySelectorAll('body *')].filter(one => {
                const box = one.getBoundingClientRect()
                const table = one.closest('.scroll table')
                return !table && box.width && (box.left < -1 || box.right > WIDTH + 1)
            })
            document.title = page.querySelectorAll('svg path').length + ' paths; too wide: '
                + page.documentElement.scrollWidth + ' ' + wide.map(one => one.outerHTML.slice(0, 80)).join(' ')
        }"""
    frame = f'<iframe srcdoc="{escape(report.read_text(encoding="utf-8"))}" width={width} height=3000></iframe>'
    around.write_text(f"{frame}<script>{script.replace('WIDTH', str(width))}</script>", encoding="utf-8")
    title = next(text for text in dump_dom(browser, around, tmp_path).texts if "too wide" in text)
    paths, _, wide = title.partition(" paths; too wide: ")
    assert int(paths) > len(PLOTS)
    assert wide == f"{width} "


def dump_dom(browser: str, path: Path, scratch: Path) -> Page:
    """DOM of a page after its scripts have run in a headless browser without network."""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=2000 --dump-dom"
    )
    command = [browser, *flags.split(), f"--user-data-dir={scratch / 'profile'}", path.as_uri()]
    return Page(subprocess.run(command, capture_output=True, check=True, timeout=120, text=True).stdout)


def test_a_long_run_is_read_once_and_keeps_the_communication_of_some_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_THINNED", 10)
    run = read_run(write_run(tmp_path, steps=95))
    whole = read_metrics(tmp_path / "metrics.jsonl")
    assert all(one is other for one, other in zip(run.rows, run.history, strict=True))
    kept = [row for row in run.rows if row.comm]
    assert 10 <= len(kept) <= 20
    assert kept[-1] == whole[-1]
    assert [replace(row, comm=None) for row in run.rows] == [replace(row, comm=None) for row in whole]
    assert "dp_shard" in parse(write_report(tmp_path)).text
