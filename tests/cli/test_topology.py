"""`weft topology`, and messages of `weft train` about a declared topology."""

import json
import sys
from pathlib import Path

import pytest

from tests.lab.commands import weft
from tests.lab.jobs import write_job
from tests.lab.plans import resolved
from weft.cli import main
from weft.job import Job
from weft.topology.topology import Topology
from weft.training.run import explain_links

DECLARED = """
inside_host = "memory"
hosts = [{ name = "here", ranks = 2 }]
links = [{ name = "memory", latency_seconds = 50e-6, bytes_per_second = 4e9 }]
"""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `weft` and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["weft", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def printed_by(*arguments: object) -> str:
    """Stdout of `weft`, in a fork, which ends well."""
    done = weft(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.must("command: topology")
@pytest.mark.must("format: topology, topology.toml")
def test_two_ranks(tmp_path: Path) -> None:
    """The topology is measured, printed, and written to a file that can be declared."""
    out, figures = tmp_path / "cluster.toml", tmp_path / "figures.json"
    files = ["--out", str(out), "--json", str(figures), "--cache", str(tmp_path / "cache")]
    options = ["--nproc-per-node", "2", "--seconds", "10", "--set", "plan.parallel.tp=2"]
    printed = printed_by("topology", *options, *files)
    assert "1 host, 2 ranks, measured in" in printed
    assert "GB/s from row to column" in printed
    assert "no link is slow" in printed
    assert "tp 2: inside a host (" in printed
    facts = json.loads(figures.read_text())
    assert Topology.load(out) == Topology.model_validate(facts["topology"])
    assert facts["measurement"]["hosts"][0][1] == 2
    assert facts["axes"][0].startswith("tp 2: inside a host")

    assert "min ago" in printed_by("topology", *options, *files)
    printed = printed_by("topology", "--file", out, "--set", "plan.parallel.tp=2")
    assert f"declared in {out}" in printed
    assert facts["axes"][0] in printed


def test_many_ranks_are_shown_by_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = DECLARED + 'between_hosts = "memory"\n'
    text = text.replace('{ name = "here", ranks = 2 }', ", ".join(f'{{ name = "h{n}", ranks = 8 }}' for n in range(3)))
    lines = text.splitlines()
    (tmp_path / "cluster.toml").write_text("\n".join([lines[-1], *lines[:-1]]))
    assert run(monkeypatch, "topology", "--file", str(tmp_path / "cluster.toml")) == 0
    printed = capsys.readouterr().out
    assert "3 hosts, 24 ranks, declared" in printed
    assert "from row to column" not in printed
    assert all(name in printed for name in ("h0", "16-23", "4 GB/s, 50 us"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--file", "nowhere.toml"], "there is no file nowhere.toml"),
        (["--file", "cluster.toml", "--nproc-per-node", "3"], "and 3 in the job"),
        (["--file", "cluster.toml", "--set", "plan.parallel.tp=3"], "cannot be divided by"),
        (["--nnodes", "2"], "host 0 of 2 has no --rdzv-endpoint"),
    ],
)
def test_bad_input(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cluster.toml").write_text(DECLARED)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "topology", *arguments) == 2
    text = capsys.readouterr().err
    assert words in text
    assert "Traceback" not in text


# weft train


def test_training_prints_the_links_of_axes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(DECLARED)
    job = Job.load(write_job(tmp_path), ["plan.parallel.tp=2", f"plan.comm.topology={path}"])
    assert explain_links(resolved(job.plan, 2), [2]) == ["tp 2: inside a host (memory, 4 GB/s, 50 us)"]
    unknown = Job.load(write_job(tmp_path), ["plan.parallel.tp=2"]).plan
    assert explain_links(resolved(unknown, 2), [2]) == []
    assert explain_links(resolved(unknown, 4), [2, 2]) == ["tp 2: inside a host", "dp_shard 2: between hosts"]


def test_training_refuses_a_topology_with_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(DECLARED.replace("ranks = 2", "ranks = 4"))
    job = write_job(tmp_path)
    assert run(monkeypatch, "train", str(job), "--nproc-per-node", "2", "--set", f"plan.comm.topology={path}") == 2
    assert "host 0 (here) has 4 ranks in the topology, and 2 in the job" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
