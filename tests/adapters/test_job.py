"""Jobs with adapters end to end: files of a run, resume, export, refusals."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import typer.testing
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.pool import RankError
from tests.lab.runs import train_in_the_pool
from weft.checkpoint.folders import folder_of
from weft.checkpoint.manifest import read_manifest
from weft.cli import app
from weft.errors import CheckpointError, JobError
from weft.evaluation.source import model_folder
from weft.job import Job
from weft.observe.report import write_report
from weft.training.metrics import read_metrics

TABLE: dict[str, Any] = {**family("llama"), "vocab_size": 300}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a base model."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TABLE)).save_pretrained(folder)
    return folder


def job_of(folder: Path, base: Path, **tables: Any) -> Job:
    folder.mkdir(exist_ok=True)
    adapter = {"kind": "lora", "r": 4, "alpha": 8.0, **tables.pop("adapter", {})}
    tables["train"] = {"steps": 4, "global_batch_size": 4, "micro_batch_size": 1, **tables.get("train", {})}
    tables.setdefault("optimizer", {"lr": 1e-2, "warmup_steps": 0})
    path = write_job(folder, adapter=adapter, checkpoint={"every": 2, "keep": 0}, **tables)
    return Job.parse({**Job.load(path).model_dump(exclude_none=True), "model": {"path": str(base)}})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Folder of a run with LoRA under ZeRO stage 3, in which rank 1 has trained too."""
    job = job_of(tmp_path_factory.mktemp("finished"), base, plan={"parallel": {"zero": 3}})
    return train_in_the_pool(job, 2)[0]


def losses(out: Path) -> list[float]:
    return [row.loss for row in read_metrics(out / "metrics.jsonl")]


def test_checkpoints_and_optimizer_have_adapters_only(finished: Path) -> None:
    elements = sum(p.numel() for p in load_file(finished / "export" / "adapter_model.safetensors").values())
    manifest = read_manifest(folder_of(finished, 4))
    names = [name for name in manifest.tensors if name.partition("/")[0] in ("weights", "exp_avg", "exp_avg_sq")]
    assert names
    assert all("lora_" in name for name in names)
    held = sum(4 * torch.Size(manifest.tensors[name].shape).numel() for name in names)
    assert held == 3 * 4 * elements  # weights and two moments in float32
    memory = json.loads((finished / "run.json").read_text())["memory"]
    assert memory["measured"]["optimizer"] == memory["predicted"]["optimizer"] == 2 * 4 * elements / 2
    unit = 4 * elements / 2  # FSDP2 keeps the input of the last reduce-scatter, that of one of the two blocks
    assert memory["measured"]["gradients"] - unit == memory["predicted"]["gradients"] == 4 * elements / 2
    assert memory["measured"]["parameters"] == memory["predicted"]["parameters"]


def test_stock_peft_loads_the_export_and_its_merge_equals_ours(finished: Path, base: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = peft.PeftModel.from_pretrained(plain, str(finished / "export")).merge_and_unload()
    result = typer.testing.CliRunner().invoke(app, ["export", str(finished), str(tmp_path / "merged"), "--merge"])
    assert result.exit_code == 0, result.output
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=0, atol=1e-6)
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    changed = [name for name, weight in ours.state_dict().items() if not torch.equal(weight, untouched[name])]
    assert len(changed) == 14  # seven linear layers in two blocks


def test_export_writes_the_folder_of_the_adapter_of_any_step(finished: Path, base: Path, tmp_path: Path) -> None:
    run = typer.testing.CliRunner().invoke
    assert run(app, ["export", str(finished), str(tmp_path / "end")]).exit_code == 0
    assert run(app, ["export", str(finished), str(tmp_path / "four"), "--step", "4"]).exit_code == 0
    assert run(app, ["export", str(finished), str(tmp_path / "two"), "--step", "2"]).exit_code == 0
    end, four, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("end", "four", "two"))
    assert end.keys() == four.keys() == two.keys()
    assert all(torch.equal(end[name], four[name]) for name in end)
    assert not all(torch.equal(end[name], two[name]) for name in end)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert peft.PeftModel.from_pretrained(plain, str(tmp_path / "two")) is not None


def test_evaluations_and_compressions_read_the_merged_model_of_any_step(finished: Path, base: Path) -> None:
    read: dict[int | None, dict[str, torch.Tensor]] = {}
    for step in (None, 2):
        with model_folder(finished, step) as (folder, found):
            assert found == (step or 4)
            read[step] = load_file(folder / "model.safetensors")
        assert not folder.exists()
    assert not all(torch.equal(read[2][name], weight) for name, weight in read[None].items())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged: Any = peft.PeftModel.from_pretrained(plain, str(finished / "export")).merge_and_unload()
    for name, weight in read[None].items():
        torch.testing.assert_close(weight, merged.state_dict()[name], rtol=0, atol=1e-6)


def test_the_report_shows_how_to_load_the_adapter(finished: Path) -> None:
    assert "AutoModelForCausalLM.from_pretrained(folder)" in write_report(finished).read_text()


def test_resume_from_zero_3_to_tp_2_continues_the_same_losses(finished: Path, base: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, base, plan={"precision": {"param_dtype": "fp32"}, "parallel": {"tp": 2}})
    job = job.model_copy(update={"out": str(tmp_path / "resumed")})
    data = Job.load(finished / "job.toml").data
    job = job.model_copy(update={"data": data})
    out, _ = train_in_the_pool(job, 2, resume=str(folder_of(finished, 2)))
    assert losses(out)[-2:] == pytest.approx(losses(finished)[-2:], rel=1e-5)


def test_new_adapters_are_those_of_peft_after_the_same_seed(base: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, base, optimizer={"lr": 1e-30, "weight_decay": 0.0}, train={"steps": 1})
    out, _ = train_in_the_pool(job, 2)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    expected = peft.get_peft_model_state_dict(peft.get_peft_model(plain, settings))
    found = load_file(out / "export" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-9)


def test_a_run_starts_from_the_adapter_of_another_run(finished: Path, base: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, base, adapter={"path": str(finished / "export")}, train={"steps": 1})
    out, _ = train_in_the_pool(job.model_copy(update={"data": Job.load(finished / "job.toml").data}), 2)
    assert losses(out)[0] < losses(finished)[0] - 0.01


def test_adapters_of_experts_train_resume_and_merge(tmp_path: Path) -> None:
    experts = {**family("qwen3_moe"), "vocab_size": 300}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**experts)).save_pretrained(tmp_path / "base")
    targets = {"adapter": {"targets": ["experts.gate_up_proj", "experts.down_proj"]}}
    precision = {"precision": {"param_dtype": "fp32"}}
    job = job_of(tmp_path / "ep", tmp_path / "base", plan={"parallel": {"ep": 2}, **precision}, **targets)
    out, _ = train_in_the_pool(job, 2)
    assert losses(out)[-1] < losses(out)[0] - 1e-3
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged: Any = peft.PeftModel.from_pretrained(plain, str(out / "export")).merge_and_unload()
    result = typer.testing.CliRunner().invoke(app, ["export", str(out), str(tmp_path / "merged"), "--merge"])
    assert result.exit_code == 0, result.output
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=0, atol=1e-6)
        assert torch.equal(weight, untouched[name]) == (".experts." not in name), name
    again = job_of(tmp_path / "tp", tmp_path / "base", plan={"parallel": {"tp": 2}, **precision}, **targets)
    again = again.model_copy(update={"data": job.data})
    resumed, _ = train_in_the_pool(again, 2, resume=str(folder_of(out, 2)))
    assert losses(resumed)[-2:] == pytest.approx(losses(out)[-2:], rel=1e-5)
    started = job_of(tmp_path / "from", tmp_path / "base", train={"steps": 1}, plan=precision)
    adapter = job.adapter.model_copy(update={"path": str(out / "export")})
    started = started.model_copy(update={"data": job.data, "adapter": adapter})
    assert losses(train_in_the_pool(started, 2)[0])[0] < losses(out)[0] - 1e-3


# Bad input


def refusal(job: Job, error: type[Exception], **options: Any) -> str:
    with pytest.raises(error) as caught:
        train_in_the_pool(job, 2, **options)
    return str(caught.value)


def test_an_adapter_of_another_base_is_refused(finished: Path, base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TABLE)).save_pretrained(other)
    data = Job.load(finished / "job.toml").data
    start = job_of(tmp_path / "start", other, adapter={"path": str(finished / "export")})
    assert "belongs to a model with digest" in refusal(start, JobError)
    resumed = job_of(tmp_path / "resumed", other).model_copy(update={"data": data})
    checkpoint = str(folder_of(finished, 2))
    assert "belongs to a model with digest" in refusal(resumed, JobError, resume=checkpoint, accept_changes=True)
    assert not (tmp_path / "resumed" / "run").exists()
    full = resumed.model_copy(update={"adapter": type(resumed.adapter)()})
    assert "adapter.kind = 'none', and the checkpoint is of adapter.kind = 'lora'" in refusal(
        full, JobError, resume=checkpoint, accept_changes=True
    )


@pytest.mark.parametrize(
    ("adapter", "message", "fix"),
    [
        ({"targets": ["q_proj", "k_prj"]}, "the target 'k_prj' matches no module", "write 'k_proj'"),
        ({"targets": "lm_head"}, "matches lm_head, which is no linear layer of a block", ""),
        ({"targets": ["self_attn"]}, "matches model.layers.0.self_attn, which is no linear layer", ""),
        ({"r": 0}, "adapter.r = 0", "1"),
        ({"targets": []}, "adapter.targets", ""),
        ({"alpha": 0}, "adapter.alpha = 0", ""),
        ({"dropout": 1.0}, "adapter.dropout = 1.0", ""),
        ({"kind": "lokr"}, 'adapter.kind = "lokr"', "lora"),
    ],
)
def test_bad_adapters_are_refused(base: Path, tmp_path: Path, adapter: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(JobError) as caught:
        train_in_the_pool(job_of(tmp_path, base, adapter=adapter), 2)
    assert message in str(caught.value)
    assert fix in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, base, adapter={"path": str(base)})
    assert "adapter_config.json cannot be read" in refusal(job, CheckpointError)
    assert "adapter.r = 8" in refusal(
        job_of(tmp_path, base, adapter={"path": str(_stock(base, tmp_path / "stock")), "r": 8}), JobError
    )


def _stock(base: Path, folder: Path) -> Path:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(plain, settings).save_pretrained(folder)
    return folder


def test_a_stock_adapter_with_other_targets_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    job = job_of(tmp_path, base, adapter={"path": str(_stock(base, tmp_path / "stock")), "targets": ["k_proj"]})
    assert "k_proj.lora_A.weight is missing" in refusal(job, RankError)


def test_merging_a_run_without_adapters_is_refused(tmp_path: Path) -> None:
    write_job(tmp_path)
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "export" / "config.json").write_text("{}")
    (tmp_path / "job.toml").rename(tmp_path / "run" / "job.toml")
    result = typer.testing.CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "to"), "--merge"])
    assert isinstance(result.exception, JobError)
