"""Kinds of jobs by experimental trainers of TRL, other reference models, and adapters to go on from: as TRL in one process."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM

from tests.integrations.scripts_in_pool import variables_of
from tests.lab.pool import run_ranks
from tests.posttraining.conftest import PAIRS, ROWS, line
from tests.posttraining.test_run import LAYOUTS, OPTIONS, train_on_rank, weights_of
from weft.errors import DataError, JobError
from weft.job import Adapter
from weft.posttraining.export import export_model
from weft.posttraining.job import TrainerJob
from weft.posttraining.kinds import KINDS
from weft.posttraining.trainers import check_job, config_class, trainer_class

CHATS = [
    {"messages": [{"role": "user", "content": f"Say {i} :"}, {"role": "assistant", "content": line(i)}]}
    for i in range(32)
]
ON_POLICY = {"lmbda": 1.0, "temperature": 1e-4, "max_new_tokens": 6}  # so cold that all processes draw the same tokens
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "orpo": ("orpo", {}),
    "cpo": ("cpo", {"cpo_alpha": 0.5}),
    "cpo ipo": ("cpo", {"loss_type": "ipo"}),
    "simpo": ("simpo", {"simpo_gamma": 0.7}),
    "gkd": ("gkd", {"lmbda": 0.0}),
    "gkd of the student's answers": ("gkd", ON_POLICY),
    "gkd of the teacher's answers": ("gkd", {**ON_POLICY, "lmbda": 0.0, "seq_kd": True}),
    "dpo with another reference": ("dpo", {}),
    "kto with another reference": ("kto", {}),
}
COUNTED = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "nll_loss")


@pytest.fixture(scope="module")
def other_model(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with other weights and the same tokenizer: a reference, or a teacher."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(small_model, folder)
    config = transformers.AutoConfig.from_pretrained(small_model)
    config.num_hidden_layers, config.initializer_range = 3, 0.2
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tables_of(case: str, model: Path, other: Path, rows: Path, out: Path, **options: Any) -> dict[str, Any]:
    kind, own = CASES[case]
    length = {"max_length": 64}
    trainer = {"kind": kind, "options": {**OPTIONS, **length, **own, **options}}
    trainer |= {"teacher": str(other)} if kind == "gkd" else {}
    trainer |= {"reference": str(other)} if "reference" in case else {}
    return {"out": str(out), "model": {"path": str(model)}, "data": {"path": str(rows)}, "trainer": trainer}


def _plain(rank: int, ranks: int, tables: dict[str, Any], adapter: str) -> None:
    """TRL alone, as its documentation writes it."""
    from datasets import load_dataset

    job = TrainerJob.model_validate(tables)
    model = job.model.path
    AcceleratorState._reset_state(True)
    with mock.patch.dict("os.environ", variables_of(0, 1)):
        loss = {"loss_type": "simpo", "cpo_alpha": 0.0} if job.trainer.kind == "simpo" else {}
        arguments = config_class(job.trainer.kind)(
            output_dir=job.out, report_to="none", use_cpu=True, bf16=False, **loss, **job.trainer.options
        )
        transformers.set_seed(1)
        more: dict[str, Any] = {"processing_class": transformers.AutoTokenizer.from_pretrained(model)}
        if job.trainer.teacher:
            more["teacher_model"] = job.trainer.teacher
        if job.trainer.reference:
            more["ref_model"] = AutoModelForCausalLM.from_pretrained(job.trainer.reference)
        start: Any = model
        if adapter:
            start = peft.PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(model), adapter, is_trainable=True
            )
        rows = load_dataset("json", data_files=job.data.path, split="train")
        trainer = trainer_class(job.trainer.kind)(model=start, args=arguments, train_dataset=rows, **more)
        trainer.train()
        trainer.save_model(f"{job.out}/export")
        trainer.save_state()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def logs_of(out: Path) -> list[dict[str, float]]:
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [{key: row[key] for key in COUNTED if key in row} for row in history if "loss" in row]


def assert_same_runs(found: Path, expected: Path, steps: int = 3) -> None:
    logs, others = logs_of(found), logs_of(expected)
    assert len(logs) == len(others) == steps
    for now, then in zip(logs, others, strict=True):
        assert now == pytest.approx(then, rel=1e-4, abs=1e-5)
    weights, saved = weights_of(found / "export"), weights_of(expected / "export")
    assert weights.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.allclose(weights[name], value, atol=2e-4), name


def rows_for(case: str) -> list[dict[str, Any]]:
    return CHATS if CASES[case][0] == "gkd" else ROWS["kto"] if CASES[case][0] == "kto" else PAIRS


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *((case, "zero 2") for case in CASES if "kto" not in case),
        *((case, "tp2") for case in ("orpo", "cpo", "simpo", "kto with another reference")),
        ("gkd of the student's answers", "zero 3"),
    ],
)
def test_a_job_equals_trl_in_one_process(
    case: str,
    layout: str,
    small_model: Path,
    other_model: Path,
    write_rows: Callable[[list[Any]], Path],
    tmp_path: Path,
) -> None:
    """TRL takes the mean of some losses over a micro-batch: data ranks are its steps of accumulation."""
    rows, (ranks, plan) = write_rows(rows_for(case)), LAYOUTS[layout]
    data_ranks = ranks // plan.parallel.tp
    arguments = (small_model, other_model, rows)
    alone = tables_of(case, *arguments, tmp_path / "plain", gradient_accumulation_steps=data_ranks)
    run_ranks(1, _plain, alone, "", timeout=120)
    tables = tables_of(case, *arguments, tmp_path / "weft")
    job = TrainerJob.model_validate({**tables, "plan": plan.model_dump()})
    job.check("job")
    check_job(job, ranks)
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    assert_same_runs(tmp_path / "weft", tmp_path / "plain")


@pytest.mark.parametrize("kind", ["dpo", "orpo"])
def test_a_job_goes_on_from_an_adapter(
    kind: str, small_model: Path, other_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    """The reference of DPO is the model with the adapter as it was."""
    rows, (ranks, plan) = write_rows(PAIRS), LAYOUTS["zero 2"]
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    start = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(small_model), config)
    start.save_pretrained(tmp_path / "start")
    CASES.setdefault(kind, (kind, {}))
    alone = tables_of(kind, small_model, other_model, rows, tmp_path / "plain", gradient_accumulation_steps=2)
    run_ranks(1, _plain, alone, str(tmp_path / "start"), timeout=120)
    tables = tables_of(kind, small_model, other_model, rows, tmp_path / "weft")
    adapter = Adapter(kind="lora", r=4, targets=("q_proj", "up_proj"), path=str(tmp_path / "start"))
    job = TrainerJob.model_validate({**tables, "plan": plan.model_dump(), "adapter": adapter.model_dump()})
    job.check("job")
    check_job(job, ranks)
    run_ranks(ranks, train_on_rank, job, None, timeout=120)
    assert_same_runs(tmp_path / "weft", tmp_path / "plain")
    assert not (tmp_path / "weft" / "export" / "ref").exists()
    (tmp_path / "weft" / "job.toml").write_text(job.to_toml())
    merged = export_model(tmp_path / "weft", tmp_path / "merged", merge=True, dtype="fp32")
    expected = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(small_model), str(tmp_path / "weft" / "export")
    )
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        wanted = expected(tokens).logits
        assert torch.allclose(AutoModelForCausalLM.from_pretrained(merged)(tokens).logits, wanted, atol=1e-4)


RECORDED: list[dict[str, Any]] = []


def record(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> torch.Tensor:
    """Reward that keeps what it has judged."""
    rewards = [float(sum(row) % 7) for row in completion_ids]
    RECORDED.append({"prompts": prompts, "rows": completion_ids, "rewards": rewards})
    return torch.tensor(rewards)


def _recorded(rank: int, ranks: int, job: TrainerJob) -> list[dict[str, Any]]:
    RECORDED.clear()
    train_on_rank(rank, ranks, job, None)
    return list(RECORDED)


@pytest.mark.parametrize("layout", ["zero 2", "zero 3"])
def test_online_dpo_learns_from_its_answers_as_a_plain_loop(
    layout: str, small_model: Path, other_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    """The loop gets the completions of the run, and a reference model of its own."""
    ranks, plan = LAYOUTS[layout]
    options = {**OPTIONS, "max_new_tokens": 6, "beta": 0.3, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    trainer = {
        "kind": "online_dpo",
        "rewards": [f"{__name__}:record"],
        "reference": str(other_model),
        "options": options,
    }
    tables: dict[str, Any] = {"out": str(tmp_path / "run"), "model": {"path": str(small_model)}, "trainer": trainer}
    tables |= {"data": {"path": str(write_rows(ROWS["grpo"]))}, "plan": plan.model_dump()}
    job = TrainerJob.model_validate(tables)
    job.check("job")
    check_job(job, ranks)
    recorded = run_ranks(ranks, _recorded, job, timeout=120)
    assert [len(part) for part in recorded] == [3, 3]
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (small_model, other_model))
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options["learning_rate"], weight_decay=0.0)
    logs = logs_of(tmp_path / "run")
    assert len(logs) == 3
    for step, log in enumerate(logs):
        losses = []
        for part in (rank[step] for rank in recorded):
            scores = []
            for prompt, row in zip(part["prompts"], part["rows"], strict=True):
                own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
                if tokenizer.eos_token_id in row:
                    row = row[: row.index(tokenizer.eos_token_id) + 1]
                tokens = torch.tensor([own + row])
                parts = [
                    each(tokens).logits[0, len(own) - 1 : -1].log_softmax(-1)[range(len(row)), row].sum()
                    for each in (model, reference)
                ]
                scores.append(parts[0] - parts[1].detach())
            half = len(scores) // 2
            for index in range(half):
                first = part["rewards"][index] >= part["rewards"][index + half]
                chosen, rejected = (index, index + half) if first else (index + half, index)
                losses.append(-F.logsigmoid(options["beta"] * (scores[chosen] - scores[rejected])))
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        assert log["loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-4)  # TRL rounds it to four digits
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        assert log["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        optimizer.step()
    saved = weights_of(tmp_path / "run" / "export")
    for name, value in model.named_parameters():
        if name in saved:
            assert torch.allclose(saved[name], value, atol=5e-4), name


def load(folder: Path, trainer: dict[str, Any], **tables: Any) -> TrainerJob:
    start = {"out": "run", "model": {"path": "model"}, "data": {"path": "rows.jsonl"}, "trainer": trainer}
    job = TrainerJob.model_validate({**start, **tables})
    job.check(str(folder))
    return job


@pytest.mark.parametrize(
    ("trainer", "tables", "message"),
    [
        ({"kind": "gkd"}, {}, "gkd with trainer.teacher = ''"),
        ({"kind": "dpo", "teacher": "there"}, {}, "dpo with trainer.teacher = 'there'"),
        ({"kind": "grpo", "rewards": ["a:b"], "reference": "there"}, {}, "grpo with trainer.reference = 'there'"),
        ({"kind": "online_dpo"}, {}, "online_dpo with no rewards"),
        (
            {"kind": "online_dpo", "rewards": ["a:b"]},
            {"data": {"path": "rows", "held_out": 0.1}},
            "online_dpo with rows to evaluate on",
        ),
        (
            {"kind": "gkd", "teacher": "there"},
            {"data": {"path": "rows", "chat_template_args": {"a": 1}}},
            "gkd with data.chat_template_args",
        ),
        ({"kind": "dpo"}, {"adapter": {"kind": "none", "path": "there"}}, "adapter.kind = none with adapter.path"),
    ],
)
def test_keys_that_a_kind_does_not_take_are_refused(
    trainer: dict[str, Any], tables: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        load(tmp_path, trainer, **tables)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dpo", {"loss_type": ["ipo"], "beta": 0}, r"options\.beta = 0 with trainer\.kind = dpo"),
        ("kto", {"beta": -0.1}, r"options\.beta = -0\.1"),
        ("simpo", {"loss_type": "hinge"}, "loss_type = hinge with trainer.kind = simpo"),
        ("cpo", {"beta": 0.0}, r"options\.beta = 0\.0"),
        ("orpo", {"bata": 0.1}, "did you mean beta?"),
    ],
)
def test_options_by_which_nothing_is_learned_are_refused(
    kind: str,
    options: dict[str, Any],
    message: str,
    small_model: Path,
    write_rows: Callable[[list[Any]], Path],
    tmp_path: Path,
) -> None:
    job = load(
        tmp_path,
        {"kind": kind, "options": options},
        model={"path": str(small_model)},
        data={"path": str(write_rows(ROWS.get(kind, PAIRS)))},
    )
    with pytest.raises(JobError, match=message):
        check_job(job, 2)


@pytest.mark.parametrize("key", ["reference", "teacher"])
def test_another_model_with_other_tokens_is_refused(
    key: str, small_model: Path, other_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(other_model, changed)
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["weft"], words["warp"] = words["warp"], words["weft"]
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    trainer = {"kind": "dpo" if key == "reference" else "gkd", key: str(changed)}
    rows = write_rows(PAIRS if key == "reference" else CHATS)
    job = load(tmp_path, trainer, model={"path": str(small_model)}, data={"path": str(rows)})
    with pytest.raises(DataError, match=r"2 tokens of .* have other ids in .*changed"):
        check_job(job, 2)


def test_a_trainer_that_this_version_of_trl_lacks_is_refused() -> None:
    """As of XPO, which TRL has moved from place to place."""
    for name, module in (("XPO", "trl.experimental.xpo"), ("XPO", "trl")):
        own = KINDS["dpo"]._replace(name=name, module=module)
        with (
            mock.patch.dict(KINDS, {"dpo": own}),
            pytest.raises(JobError, match=rf"TRL \d+\.\d+\.\d+ has no {name}Trainer in {module}"),
        ):
            trainer_class("dpo")


def test_messages_in_parts_and_arguments_of_the_template_reach_trl(
    small_model: Path, write_rows: Callable[[list[Any]], Path], tmp_path: Path
) -> None:
    """A row is that of plain contents, and has the arguments of the job."""
    from weft.posttraining.rows import check_rows, read_rows

    plain = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
        }
        for row in PAIRS[:4]
    ]
    parts = [
        {
            name: [
                {**m, "content": [{"type": "text", "text": part} for part in (m["content"][:2], m["content"][2:])]}
                for m in messages
            ]
            for name, messages in row.items()
        }
        for row in plain
    ]
    job = load(tmp_path, {"kind": "dpo"}, data={"path": str(write_rows(parts)), "chat_template_args": {"mood": "glad"}})
    found, _ = read_rows(job.data, 0, "dpo")
    check_rows(found, "dpo", "rows", has_template=True)
    assert found.to_list() == [{**row, "chat_template_kwargs": {"mood": "glad"}} for row in plain]
    for row in parts:  # beside a content that is a text
        row["prompt"].insert(0, {"role": "system", "content": "Be brief.", "name": "me"})
    job = load(tmp_path, {"kind": "dpo"}, data={"path": str(write_rows(parts))})
    found, _ = read_rows(job.data, 0, "dpo")
    check_rows(found, "dpo", "rows", has_template=True)
    assert [[m["content"] for m in row["prompt"]] for row in found] == [
        ["Be brief.", row["prompt"][0]["content"]] for row in plain
    ]
    own = [{**row, "chat_template_kwargs": {"mood": mood}} for row, mood in zip(plain, "abcd", strict=True)]
    job = load(tmp_path, {"kind": "dpo"}, data={"path": str(write_rows(own)), "chat_template_args": {"tone": 1}})
    found, _ = read_rows(job.data, 0, "dpo")
    assert [row["chat_template_kwargs"] for row in found] == [{"tone": 1, "mood": mood} for mood in "abcd"]
    for kind in ("grpo", "gkd"):
        rows = found.rename_column("chosen", "messages") if kind == "gkd" else found
        with pytest.raises(DataError, match=f"the column chat_template_kwargs for trainer.kind = {kind}"):
            check_rows(rows, kind, "rows", has_template=True)
    image = [{**plain[0], "prompt": [{"role": "user", "content": [{"type": "image"}]}]}]
    with pytest.raises(DataError, match="prompt of row 1 has a content that is no text"):
        check_rows(
            read_rows(load(tmp_path, {"kind": "dpo"}, data={"path": str(write_rows(image))}).data, 0)[0],
            "dpo",
            "rows",
            has_template=True,
        )
