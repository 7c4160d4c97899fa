"""Commands that no other test runs to their end: one small run of each, in a fork of the test process."""

import gzip
import json
import os
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from tests.lab.commands import weft
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.observe.run_folder import write_run
from weft.job import read_toml
from weft.planner.calibrate import calibrate
from weft.planner.costmodel import links, operators
from weft.planner.costmodel.cluster_file import read_cluster_file

ONE_BLOCK = {"config": {**family("llama"), "vocab_size": 300, "num_hidden_layers": 1}}


@pytest.mark.must("command: report")
def test_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=20)
    done = weft("report", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "run" / "report.html") in done.stdout
    assert "<title>" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.must("command: schema")
def test_schema_accepts_what_weft_train_accepts(tmp_path: Path) -> None:
    """Acceptance of all shipped jobs, with trainers and separate plans, and refusal of unknown keys."""
    done = weft("schema")
    assert done.returncode == 0, done.stderr
    schema = jsonschema.Draft202012Validator(json.loads(done.stdout))
    root = Path(__file__).parents[2]
    for path in [*(root / "examples").rglob("[!p]*.toml"), *(root / "src").rglob("*.toml"), write_job(tmp_path)]:
        schema.validate(tomllib.loads(path.read_text()))
    job = tomllib.loads((tmp_path / "job.toml").read_text())
    schema.validate({**job, "plan": "plan.toml"})
    for wrong in ({**job, "trian": {}}, {**job, "trainer": {"kind": "dpo"}}, {**job, "train": {"steps": 0}}):
        assert not schema.is_valid(wrong)


@pytest.mark.must("command: anatomy")
def test_anatomy(tmp_path: Path) -> None:
    done = weft("anatomy", write_job(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "model.layers.*.self_attn" in done.stdout


@pytest.mark.must("command: profile")
@pytest.mark.must("format: profile, trace.json.gz")
def test_profile(tmp_path: Path) -> None:
    """Two ranks; profiled steps are in the page and in one trace of both ranks."""
    done = weft("profile", write_job(tmp_path), "--steps", 1, "--warmup", 0, "--nproc-per-node", 2)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run.profile" / "profile"
    assert str(folder / "profile.html") in done.stdout
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events if event.get("cat") == "step"} == {0, 1}


@pytest.mark.must("command: launch k8s")
def test_launch_k8s(tmp_path: Path) -> None:
    """kubectl gets the manifests."""
    kubectl, got = tmp_path / "kubectl", tmp_path / "got"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {got}\ncat >> {got}\n')
    kubectl.chmod(0o755)
    pods = ("--image", "registry.example/weft:1.0", "--nproc-per-node", 2, "--nodes", 2, "--volume", "shared:/shared")
    set_ = ("--out", "/shared/run", "--set", "data.cache=/shared/cache", "--set", "data.path=/shared/text")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = weft("launch", "k8s", write_job(tmp_path), *pods, *set_, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert got.read_text().startswith("apply -f -\n")
    assert "kind: JobSet" in got.read_text()


@pytest.mark.must("command: calibrate")
@pytest.mark.must("format: cluster, cluster.toml")
def test_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller matmuls and trainings than a user's."""
    job = read_toml(write_job(tmp_path, train={"steps": 3, "micro_batch_size": 1}, model=ONE_BLOCK))
    fewer: dict[ModuleType, dict[str, Any]] = {
        calibrate: {
            "SIZES": (32, 256),
            "TILES": (32,),
            "DEPTHS": (64,),
            "SEQ": 128,
            "STREAM_BYTES": 2**22,
            "TRAININGS": 1,
            "JOB": job,
            "SMALL_JOB": job,
        },
        operators: {"SECONDS": 1e-4, "BETWEEN_BYTES": 2**16, "COLD_BYTES": 0, "BATCHES": 1},
        links: {"SIZES": (2**10, 2**16, 2**20), "SECONDS": 0.01, "LEAST_ROUNDS": 1, "REPEATS": 1},
    }
    for module, constants in fewer.items():
        for name, value in constants.items():
            monkeypatch.setattr(module, name, value)
    done = weft("calibrate", "--nproc-per-node", 2, "--out", tmp_path / "cluster.toml")
    assert done.returncode == 0, done.stderr
    found = read_cluster_file(tmp_path / "cluster.toml")
    assert (found.device, found.devices_per_host) == ("CPU", 2)
    assert found.figures.fp32_tflops > 1e-3
