"""Jobs: TOML both ways, dotted settings, and errors that say what to do."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import JobError
from weft.job import Data, Job, Model, Optimizer, Train, keys
from weft.plan import Parallel, Plan, Precision

LLAMA = {"model": {"config": {"model_type": "llama", "hidden_size": 64}}}


@given(
    lr=st.floats(1e-8, 1),
    steps=st.integers(1, 10**9),
    zero=st.sampled_from([0, 1, 2, 3]),
    scale=st.one_of(st.sampled_from(["none", "dynamic"]), st.floats(1e-3, 2**20)),
    out=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=20),
)
def test_toml_both_ways(lr: float, steps: int, zero: int, scale: str | float, out: str) -> None:
    job = Job(
        model=Model(config={"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}, "layer_types": ["a", "b"]}),
        data=Data(path=out),
        optimizer=Optimizer(lr=lr),
        train=Train(steps=steps),
        plan=Plan(parallel=Parallel(zero=zero), precision=Precision(loss_scale=scale)),  # type: ignore[arg-type]
        out=out,
    )
    assert Job.parse(tomllib.loads(job.to_toml())) == job


def test_settings_with_dotted_keys() -> None:
    settings = [
        "optimizer.betas=[0.8, 0.99]",
        "data.path=/some/where",
        "plan.parallel.zero=1",
        "model.config.num_hidden_layers=3",
    ]
    job = Job.parse(LLAMA, settings)
    assert job.optimizer.betas == (0.8, 0.99)
    assert job.data.path == "/some/where"
    assert job.plan.parallel.zero == 1
    assert job.model.config == {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3}
    assert "num_hidden_layers" not in LLAMA["model"]["config"]


def test_plan_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[parallel]\nzero = 1\n")
    job = Job.parse({**LLAMA, "plan": str(path)}, ["plan.precision.forward=fp32"])
    assert (job.plan.parallel.zero, job.plan.precision.forward) == (1, "fp32")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stpes=3", "did you mean train.steps?"),
        ("lr=3", "did you mean optimizer.lr?"),
        ("train.zero=3", "did you mean plan.parallel.zero?"),
        ("qqq.zzz=3", "weft schema"),
        ("optimizer.lr=-1", "optimizer.lr = -1"),
        ("plan.parallel.zero=4", "plan.parallel.zero = 4"),
        ("data.source=csv", "'python', 'text', 'jsonl', 'parquet' or 'tokens'"),
        ("optimizer.lr", "written key=value"),
        ("train.steps.x=1", "train.steps"),
        ("out.x=1", "out"),
        ('model.path="x"', "both a path and a config"),
        ('plan="missing.toml"', "there is no file missing.toml"),
    ],
)
def test_a_bad_setting_is_explained(setting: str, words: str) -> None:
    base = {**LLAMA, "train": {"steps": 1}, "out": "runs"}
    with pytest.raises(JobError) as caught:
        Job.parse(base, [setting])
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (['plan.comm.compression="1-bit"'], "optimizer.name = adamw with plan.comm.compression = 1-bit"),
        (["optimizer.name=onebit-adam"], "optimizer.name = onebit-adam with plan.comm.compression = none"),
        (["optimizer.name=onebit-adam", 'plan.comm.compression="2:4"'], "with plan.comm.compression = 2:4"),
        (
            ["optimizer.name=onebit-adam", 'plan.comm.compression="1-bit"'],
            "freeze_steps = 1000 with 10 steps of warm-up",
        ),
        (['plan.comm.compression="4-bit"'], "'none', 'bf16', 'fp16', 'int8', '2:4' or '1-bit'"),
    ],
)
def test_signs_and_1_bit_adam_go_together(settings: list[str], words: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.parse({**LLAMA, "train": {"steps": 1000}}, settings)
    assert words in str(caught.value)
    good = ["optimizer.name=onebit-adam", 'plan.comm.compression="1-bit"', "optimizer.freeze_steps=200"]
    assert Job.parse({**LLAMA, "train": {"steps": 1000}}, good).optimizer.freeze_steps == 200


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no file"):
        Job.load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\nsteps = 3")
    with pytest.raises(JobError, match="not a TOML file"):
        Job.load(broken)
    with pytest.raises(JobError, match="neither a path nor a config"):
        Job.parse({})


def test_the_schema_describes_every_key() -> None:
    schema = json.dumps(Job.model_json_schema())
    for key in keys():
        assert f'"{key.rsplit(".", 1)[-1]}"' in schema
