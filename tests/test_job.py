"""Jobs: TOML round trip, dotted settings, and errors with a fix."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import JobError
from weft.job import Data, Job, Model, Optimizer, Train, keys, read_plan
from weft.plan import Parallel, Plan, Precision

LLAMA = {"model": {"config": {"model_type": "llama", "hidden_size": 64}}}


@pytest.mark.must("format: job, job.toml")
@given(
    lr=st.floats(1e-8, 1),
    steps=st.integers(1, 10**9),
    zero=st.sampled_from([0, 1, 2, 3]),
    scale=st.one_of(st.sampled_from(["none", "dynamic"]), st.floats(1e-3, 2**20)),
    out=st.text(
        st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters=":"), min_size=1, max_size=20
    ),
)
def test_toml_round_trip(lr: float, steps: int, zero: int, scale: str | float, out: str) -> None:
    job = Job(
        model=Model(config={"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}, "layer_types": ["a", "b"]}),
        data=Data(source="text", path=out),
        optimizer=Optimizer(lr=lr),
        train=Train(steps=steps),
        plan=Plan(parallel=Parallel(zero=zero), precision=Precision(loss_scale=scale)),  # type: ignore[arg-type]
        out=out,
    )
    assert Job.parse(tomllib.loads(job.to_toml())) == job


def test_settings_with_dotted_keys() -> None:
    settings = [
        "optimizer.betas=[0.8, 0.99]",
        "data.source=text",
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


def test_plan_in_a_separate_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[parallel]\nzero = 1\n")
    job = Job.parse({**LLAMA, "plan": str(path)}, ["plan.precision.param_dtype=fp32"])
    assert (job.plan.parallel.zero, job.plan.precision.param_dtype) == (1, "fp32")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stpes=3", "did you mean train.steps?"),
        ("lr=3", "did you mean optimizer.lr?"),
        ("train.zero=3", "did you mean plan.parallel.zero?"),
        ("qqq.zzz=3", "weft schema"),
        ("optimizer.lr=-1", "optimizer.lr = -1"),
        ("out=s3://bucket/run", "checkpoint.remote"),
        ("checkpoint.folder=gs://bucket/run", "checkpoint.folder is a path on a disk"),
        ("data.path=my.txt", "set data.source"),
        ("plan.parallel.zero=4", "plan.parallel.zero = 4"),
        ("data.source=csv", 'data.source is "python", "text", "jsonl", "parquet", "datasets" or "tokens"'),
        ("optimizer.lr", "written key=value"),
        ("train.steps.x=1", "train.steps"),
        ("out.x=1", "out"),
        ('model.path="x"', "both a path and a config"),
        ('plan="missing.toml"', "there is no file missing.toml"),
        ("trian.steps=3", "did you mean [train]?"),
        ("parallel.tp=2", "did you mean [plan.parallel]?"),
        ("plan.paralel.tp=2", "did you mean [plan.parallel]?"),
        ("course={lr=1.0,betas=[0.9,0.95]}", "did you mean [optimizer]?"),
        ("data.nope=1", "[data] has source, format"),
        ("train=3", "write [train], and its keys below: steps"),
        ("train=[{steps=3}]", "write [train], and its keys below: steps"),
        ("optimizer.name=sgd", 'optimizer.name is "adamw", "muon", "adafactor", "lion" or "onebit-adam"'),
        ("optimizer.name=sgd", 'for example optimizer.name = "adamw"'),
        ("optimizer.name=AdamW", 'did you mean optimizer.name = "adamw"?'),
        ("optimizer.lr=fast", "optimizer.lr is a number above 0"),
        ("optimizer.lr=fast", "for example optimizer.lr = 0.0003"),
        ("optimizer.lr=inf", "optimizer.lr = inf"),
        ("optimizer.lr=nan", "optimizer.lr = nan"),
        ("optimizer.betas=[0.9]", "for example optimizer.betas = [0.9, 0.95]"),
        ("optimizer.betas=[0.9,1.5]", "optimizer.betas[1] = 1.5"),
        ("train.steps=true", "train.steps = true"),
        ("train.steps=2.5", "train.steps is a whole number of at least 1"),
        ("data.packing=maybe", "data.packing is true or false"),
        ("data.held_out=2%", "data.held_out is a number of at least 0 and below 1"),
        ("data.format=chats", 'did you mean data.format = "chat"?'),
        ('data.sets={"a.jsonl"=-1}', "data.sets is a table of paths, each with a number above 0"),
        ("data.path=5", 'write it in quotes: data.path = "5"'),
        ("model.config=[1,2]", "model.config is a string or a table"),
        ("plan.memory.recompute=block", 'write plan.memory.recompute = ["block"]'),
        ("plan.memory.recompute=[1]", 'for example plan.memory.recompute = ["block"]'),
        ("plan.precision.loss_scale=big", 'plan.precision.loss_scale is "none" or "dynamic" or a number above 0'),
        ("plan.pipeline.block_costs=[1.0,inf]", "block_costs = [1.0, inf]"),
        ("plan.prediction.micro_batch=1", "plan.prediction.cluster is missing"),
    ],
)
def test_invalid_setting_is_explained(setting: str, words: str) -> None:
    base = {**LLAMA, "train": {"steps": 1}, "out": "runs"}
    with pytest.raises(JobError) as caught:
        Job.parse(base, [setting])
    assert words in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.rule or "there is no file" in words
    assert caught.value.fix


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
        (['plan.comm.compression="4-bit"'], '"none", "bf16", "fp16", "int8", "2:4" or "1-bit"'),
    ],
)
def test_1_bit_compression_requires_1_bit_adam(settings: list[str], words: str) -> None:
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
    with pytest.raises(JobError, match="is a folder"):
        Job.load(tmp_path)
    broken.rename(tmp_path / "job.toml")
    with pytest.raises(JobError) as caught:
        Job.load(tmp_path)
    assert caught.value.fix == f"name the file in it: {tmp_path / 'job.toml'}"
    for raw in (b"\xff\xfe", b"a = " + b"[" * 5000):
        broken.write_bytes(raw)
        with pytest.raises(JobError, match="not a TOML file"):
            Job.load(broken)
    with pytest.raises(JobError, match="there is no file"):
        Job.load(broken / "job.toml")
    with pytest.raises(JobError, match="not a TOML file: embedded null"):
        Job.load("job\0.toml")
    with pytest.raises(JobError, match="neither a path nor a config"):
        Job.parse({})


def test_many_wrong_keys_fit_one_screen() -> None:
    with pytest.raises(JobError, match="and 25 more") as caught:
        Job.parse({f"wrong{number}": 1 for number in range(30)})
    assert len(str(caught.value).splitlines()) < 15


def test_plan_given_as_a_job_is_recognized() -> None:
    with pytest.raises(JobError) as caught:
        Job.parse({"parallel": {"tp": 2}, "memory": {}}, where="plan.toml")
    assert caught.value.fix is not None
    assert "--set plan=plan.toml" in caught.value.fix


PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"


def rows_of_other_frameworks() -> dict[str, list[str]]:
    """Keys of Weft in the last column of docs/coming-from.md, by a name that another framework has for a setting."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        left, _, right = line.strip("| ").partition(" | ") if line.startswith("| `") else ("", "", "")
        answers = [
            key
            for key in re.findall(r"`(--[\w-]+|[a-z_]+(?:\.[a-z_]+)*)", right)
            if key.startswith("--") or key in keys()
        ]
        for code in re.findall(r"`-*([a-z][\w.-]+)", left) if answers else ():
            found.setdefault(code.replace("-", "_").rstrip("."), []).extend(answers)
    return found


def test_names_of_other_frameworks_are_found() -> None:
    assert len(rows_of_other_frameworks()) > 110


WEFT_NAMES = {f"train.{key.rsplit('.', 1)[-1]}" for key in keys()} | set(keys())
TOO_GENERAL = {"mode", "enabled"}


@pytest.mark.parametrize("name", sorted(rows_of_other_frameworks().keys() - TOO_GENERAL))
def test_a_name_of_another_framework_is_answered_with_the_page(name: str) -> None:
    setting = f"{name}=1" if "." in name else f"train.{name}=1"
    if setting.partition("=")[0] in WEFT_NAMES:
        return  # the name is that of Weft
    answers = rows_of_other_frameworks()[name]
    tables = [f"[{answer.partition('.')[0]}]" for answer in answers]  # [training] of torchtitan is nearest to [train]
    with pytest.raises(JobError) as caught:
        Job.parse({**LLAMA, "train": {"steps": 1}}, [setting])
    assert any(answer in str(caught.value.fix) for answer in [*answers, *tables]), caught.value


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("train.batch_size=8", "train.global_batch_size"),
        ("model.name=gpt2", "model.path"),
        ("plan.parallel.fsdp=2", "plan.parallel.zero = 3"),
        ("fsdp={a=1}", "plan.parallel.zero = 3"),
        ("precision.bf16=true", 'plan.precision.param_dtype = "bf16"'),
        ("training_args={learning_rate=1,num_train_epochs=2}", "optimizer.lr"),
        ("optimizer.momentum_decay=1", "keys of optimizer.options"),
    ],
)
def test_a_guess_is_answered_with_the_setting(setting: str, fix: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.parse(LLAMA, [setting])
    assert fix in str(caught.value.fix)
    assert caught.value.where == f"--set {setting}"


JOB = """out = "runs/x"
[model]
config = { model_type = "llama" }
[data]   # text
"seqlen" = 3
[train]
steps = -1
 [ plan.parallel ]
zero.stage = 3
[trian]
"""


def test_an_error_names_the_line_of_each_key_or_its_setting(tmp_path: Path) -> None:
    job, plan = tmp_path / "job.toml", tmp_path / "plan.toml"
    job.write_text(JOB)
    plan.write_text("[parallel]\ntp = 1\nzero = 7\n")

    def where(*settings: str) -> str | None:
        with pytest.raises(JobError) as caught:
            Job.load(job, settings)
        return caught.value.where

    assert where() == ", ".join(f"{job}:{line}" for line in (5, 7, 9, 10))
    assert where("train.steps=0", "train.steps=-2").split(", ")[1] == "--set train.steps=-2"  # type: ignore[union-attr]
    job.write_text(JOB.partition("[data]")[0])
    assert where(f"plan={plan}") == f"{plan}:3"
    assert where(f"plan={plan}", "plan.parallel.zero=8") == "--set plan.parallel.zero=8"
    assert where("optimizer.lr=inf") == "--set optimizer.lr=inf"
    job.write_text(JOB.partition("[data]")[0] + "[optimizer]\nlr = nan\n")
    assert where() == f"{job}:5"
    with pytest.raises(JobError) as caught:
        read_plan(plan)
    assert caught.value.where == f"{plan}:3"


TABLES = (
    "model.config",
    "plan.prediction",
    "optimizer.options",
    "data.sets",
    "data.chat_template_args",
    "task.scheduler",
)


@pytest.mark.parametrize("key", keys())
def test_every_key_states_its_rule(key: str) -> None:
    with pytest.raises(JobError) as caught:
        Job.parse(
            LLAMA,
            [f"{key}=1" if key in TABLES else f"{key}={{wrong=1}}"],
        )
    text = str(caught.value)
    assert f"{key} is " in text
    assert "fix: " in text


def test_the_schema_describes_every_key() -> None:
    schema = json.dumps(Job.model_json_schema())
    for key in keys():
        assert f'"{key.rsplit(".", 1)[-1]}"' in schema


def test_adafactor_refuses_states_in_bf16() -> None:
    settings = ["optimizer.name=adafactor", "plan.precision.optimizer_state_dtype=bf16", "optimizer.betas=[0.9,0.9]"]
    with pytest.raises(JobError, match="it would never decrease"):
        Job.parse(LLAMA, settings)
    assert Job.parse(LLAMA, [settings[0], "plan.precision.optimizer_state_dtype=int8"]).optimizer.name == "adafactor"
