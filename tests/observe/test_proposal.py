"""Output of `weft plan`: titles, units, equal layouts, page size, no scripts."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.families import family
from weft.job import Job
from weft.observe.proposal import parameters_in_words, print_proposal
from weft.observe.proposal_page import write_page
from weft.planner.costmodel.hardware import ClusterSpec, find_device
from weft.planner.search.propose import Proposal, propose


@pytest.fixture(scope="module")
def found() -> Proposal:
    data = {"source": "tokens", "path": "none.npy", "seq_len": 32}
    job = Job.parse({"model": {"config": family("llama")}, "data": data, "train": {"global_batch_size": 16}})
    return propose(job, ClusterSpec(find_device("CPU"), 1, 2), confirm=False)


def test_page_shows_units_and_equal_layouts(found: Proposal, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(found, path)
    html = path.read_text(encoding="utf-8")
    assert "M parameters on 2 CPU</h1>" in html
    assert html.count("<em>chosen</em>") == 1
    assert html.count("<em>equal</em>") == sum(abs(slower) < 0.03 for slower in found.slower[1:]) > 0
    assert "ms per step" in html
    assert "GiB per rank" in html
    assert "plot-pipeline" not in html
    assert "<script" not in html
    assert len(html) < 100_000


def test_pipeline_of_the_chosen_layout_is_drawn(found: Proposal, tmp_path: Path) -> None:
    piped = next(
        alternative.choice for alternative in found.alternatives if alternative.setting == "pp" and alternative.choice
    )
    write_page(replace(found, best=[piped], costs=found.costs[:1]), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    drawn = html[html.index("plot-pipeline") :]
    assert 'title="0F0"' in drawn
    assert '<p class="foot">ms</p>' in drawn or '<p class="foot">μs</p>' in drawn


def test_unknown_mfu_is_omitted(found: Proposal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = replace(found, costs=[replace(cost, mfu=None) for cost in found.costs])  # type: ignore[arg-type]
    write_page(unknown, tmp_path / "page.html")
    assert "MFU" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    print_proposal(unknown)
    assert "chosen" in capsys.readouterr().out


def test_unknown_costs_are_omitted(found: Proposal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Costs of a device without a price, such as a 910B, or without a power."""
    names = ("dollars_per_trillion_tokens", "dollars_per_month", "joules_per_token", "grams_co2_per_million_tokens")
    unknown = replace(found, costs=[replace(cost, **dict.fromkeys(names)) for cost in found.costs])  # type: ignore[arg-type]
    print_proposal(unknown)
    printed = capsys.readouterr().out
    assert "chosen" in printed
    assert not any(word in printed for word in ("dollars", "$", "/J", "CO2", "None"))
    write_page(unknown, tmp_path / "page.html")
    assert "None" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_equal_low_memory_layouts_are_printed_once(found: Proposal, capsys: pytest.CaptureFixture[str]) -> None:
    print_proposal(found)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("within")]
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (34_720, "0.0347 M parameters"),
        (140_000, "0.14 M parameters"),
        (30_532_122_624, "30.5 B parameters"),
        (1.03e12, "1.03 T parameters"),
    ],
)
def test_parameters_in_words(count: int, words: str) -> None:
    assert parameters_in_words(count) == words
