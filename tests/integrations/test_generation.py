"""TRL's trainers that generate rows, under a plan: the completions of a run, trained on by a plain script, give its losses."""

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.integrations.scripts_in_pool import plain, under, variables_of
from tests.integrations.test_trainer import BATCH, LAYOUTS, plan_of
from tests.lab.families import family
from tests.lab.pool import RankError, run_ranks
from weft.integrations.accelerator import WeftAccelerator
from weft.integrations.full_copy import with_full_weights
from weft.plan import Parallel, Plan

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"beta": 0.0},
    "grpo beta": {"beta": 0.1},
    "grpo lora": {"beta": 0.1, "lora": True},
    "grpo batch": {"beta": 0.0, "scale_rewards": "batch"},
    "rloo": {"beta": 0.0},
}
COUNTED = ("loss", "grad_norm", "reward", "reward_std", "entropy", "kl", "num_tokens", "completions/mean_length")


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = json.loads((folder / "result.json").read_text())
    return [{key: row[key] for key in COUNTED if key in row} for row in rows if "loss" in row]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model that all runs start from; GRPO loads its reference model from it too."""
    folder = tmp_path_factory.mktemp("start")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "tie_word_embeddings": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, **heads)).save_pretrained(folder)
    return folder


def settings(kind: str, **more: Any) -> str:
    return json.dumps({**KINDS[kind], **more})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_unmodified_script_equals_one_process(kind: str, layout: str, start: Path, tmp_path: Path) -> None:
    ranks, plan, batch = plan_of(layout)
    under(plan, ranks, "trl_grpo.py", kind.split()[0], start, tmp_path / "weft", batch, settings(kind))
    replay = settings(kind, replay=str(tmp_path / "weft"))
    plain("trl_grpo.py", kind.split()[0], start, tmp_path / "plain", BATCH, replay)
    rows, others = rows_of(tmp_path / "weft"), rows_of(tmp_path / "plain")
    assert len(rows) == len(others) == 3
    for now, then in zip(rows, others, strict=True):
        assert now == pytest.approx(then, rel=1e-4, abs=1e-5)
        assert now["loss"] == pytest.approx(then["loss"], rel=1e-5, abs=1e-6)
    weights, saved = (
        {
            name: value
            for file in (tmp_path / run / "final").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        for run in ("weft", "plain")
    )
    assert weights.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.allclose(weights[name], value, atol=2e-4), name


def test_ranks_that_share_rows_train_on_the_same_completions(start: Path, tmp_path: Path) -> None:
    """Groups of four over two data ranks with two rows each; two micro-batches and two passes for each generation."""
    plan = Plan(parallel=Parallel(tp=2, zero=2))
    options = settings("grpo", steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=2, max_steps=4)
    under(plan, 4, "trl_grpo.py", "grpo", start, tmp_path, 2, options)
    completions = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert completions[0] == completions[1] != completions[2] == completions[3]
    assert [len(rows) for rows in completions[0]] == [4, 4]
    logs, rewards = json.loads((tmp_path / "logs.json").read_text())
    assert logs == {"prompt": [8], "completion": [8], "advantages": [8]}
    assert rewards == [8]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rewards_rise(seed: int, start: Path, tmp_path: Path) -> None:
    more = {"wanted": 7, "max_steps": 30, "learning_rate": 0.01, "num_generations": 8, "seed": seed}
    under(Plan(parallel=Parallel(tp=2)), 2, "trl_grpo.py", "grpo", start, tmp_path, 16, settings("grpo", **more))
    rewards = [row["reward"] for row in rows_of(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.1
    assert sum(rewards[-3:]) / 3 > 0.4


def test_a_reward_that_is_no_number_is_refused(start: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="reward returns nan for row 1"):
        under(Plan(), 2, "trl_grpo.py", "grpo", start, tmp_path, BATCH, settings("grpo", nan=True))


@pytest.mark.parametrize(
    ("kind", "batch", "more", "message"),
    [
        ("rloo", 4, {"beta": 0.1}, "beta = 0.1 in RLOO, under tp or cp"),
        ("grpo", 2, {}, "2 rows of all data ranks for groups of 4"),
    ],
)
def test_what_ranks_would_do_differently_is_refused(
    kind: str, batch: int, more: dict[str, Any], message: str, start: Path, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=message):
        under(Plan(parallel=Parallel(tp=2)), 2, "trl_grpo.py", kind, start, tmp_path, batch, settings(kind, **more))


def copied(rank: int, ranks: int, name: str, plan: Plan) -> None:
    AcceleratorState._reset_state(True)
    with mock.patch.dict(os.environ, variables_of(rank, ranks)):
        accelerator = WeftAccelerator(plan=plan)
        accelerator.keeps_structures = True
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family(name)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = torch.arange(32).view(2, 16) % 64
        accelerator.backward(model(input_ids=rows, labels=rows).loss)
        optimizer.step()
        weights = accelerator.get_state_dict(model)
        with torch.no_grad(), with_full_weights(accelerator.structures[model], model) as full:
            found = full(rows).logits
            cached = full(rows[:, -1:], past_key_values=full(rows[:, :-1], use_cache=True).past_key_values).logits
            torch.testing.assert_close(cached[:, 0], found[:, -1], rtol=1e-4, atol=1e-4)
        assert all(parameter.is_meta for parameter in accelerator.structures[model].parameters())
        if rank == 0:
            untouched = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family(name)))
            untouched.load_state_dict(weights)
            torch.testing.assert_close(found, untouched(rows).logits)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama", {"zero": 3}),
        ("qwen3_moe", {"zero": 3, "ep": 2}),
        ("phi3", {"tp": 2}),
        ("gpt2", {"cp": 2}),
        ("qwen3", {"tp": 2, "zero": 2}),
    ],
)
def test_a_copy_has_the_weights_after_an_update(name: str, parallel: dict[str, Any]) -> None:
    run_ranks(4 if parallel == {"tp": 2, "zero": 2} else 2, copied, name, Plan(parallel=Parallel(**parallel)))


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_encoder_decoder_generates_in_evaluations_each_row_once(zero: int, tmp_path: Path) -> None:
    folders = [tmp_path / "plain", tmp_path / "ranks"]
    for folder in folders:
        folder.mkdir()
    plain("predict_with_generate.py", folders[0], 4)
    under(Plan(parallel=Parallel(zero=zero)), 2, "predict_with_generate.py", folders[1], 2)
    (then, expected), (now, found) = (json.loads((folder / "result.json").read_text()) for folder in folders)
    assert found == expected
    assert now == then == [7, 7]
