"""Resume of small jobs at every step: `python -m tests.posttraining.resumes` prints the table of docs/fine-tuning.md."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.lab.pool import run_ranks
from tests.posttraining.conftest import PAIRS, ROWS, make_small_model
from weft.job import Adapter
from weft.plan import Parallel, Plan, Precision
from weft.posttraining.job import TrainerJob

STEPS = 4
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7}
LORA = Adapter(kind="lora", r=4, dropout=0.2)
ZERO_2, ZERO_3, TP = {"zero": 2}, {"zero": 3}, {"tp": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Adapter]] = {
    "dpo": ("dpo", {}, ZERO_3, Adapter()),
    "dpo, moving reference": ("dpo", MOVING, ZERO_2, Adapter()),
    "dpo, moving reference, tp 2": ("dpo", MOVING, TP, Adapter()),
    "dpo, precomputed reference": ("dpo", {"precompute_ref_log_probs": True}, ZERO_2, Adapter()),
    "dpo, adapters with dropout": ("dpo", {"disable_dropout": False}, ZERO_2, LORA),
    "dpo, accumulation over two epochs": ("dpo", {"gradient_accumulation_steps": 4}, ZERO_2, Adapter()),
    "kto": ("kto", {}, ZERO_2, Adapter()),
    "reward": ("reward", {}, ZERO_3, Adapter()),
    "grpo": ("grpo", {}, ZERO_2, Adapter()),
    "grpo, num_iterations 2": ("grpo", {"num_iterations": 2}, ZERO_3, Adapter()),
    "grpo, steps_per_generation 4": ("grpo", {"steps_per_generation": 4}, ZERO_2, Adapter()),
    "grpo, moving reference, num_iterations 2, tp 2": (
        "grpo",
        {"beta": 0.2, "num_iterations": 2, **MOVING},
        TP,
        Adapter(),
    ),
    "rloo, steps_per_generation 2": ("rloo", {"steps_per_generation": 2, "beta": 0.1}, ZERO_2, Adapter()),
    "rloo, num_iterations 3, adapters": ("rloo", {"num_iterations": 3}, ZERO_2, LORA),
    "orpo": ("orpo", {}, ZERO_2, Adapter()),
    "cpo": ("cpo", {"cpo_alpha": 0.5}, ZERO_3, Adapter()),
    "simpo": ("simpo", {}, TP, Adapter()),
    "gkd, answers of either model": ("gkd", {"lmbda": 0.5, "max_new_tokens": 6}, ZERO_2, Adapter()),
    "online_dpo": ("online_dpo", {"max_new_tokens": 6}, ZERO_2, Adapter()),
}
"""Kind, options, parallelism and adapters, by description."""


def weft_only(completions: list[str], **_: Any) -> list[float]:
    """Reward: share of the word weft, and the length."""
    return [text.split().count("weft") / 8 + len(text) / 100 for text in completions]


def job_of(case: str, model: Path, rows: Path, out: Path) -> TrainerJob:
    """Job of a case, which saves after every step, and logs and evaluates after every second one."""
    kind, options, parallel, adapter = CASES[case]
    generates = kind in ("grpo", "rloo", "online_dpo")
    own = {"num_generations": 4, "max_completion_length": 6} if kind in ("grpo", "rloo") else {"max_length": 64}
    shared = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1}
    shared |= {} if generates else {"eval_strategy": "steps", "eval_steps": 2}  # generation takes seconds
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    shared |= {"logging_steps": 2, "learning_rate": 3e-3, "seed": 1, **sizes}
    return TrainerJob.model_validate(
        {
            "out": str(out),
            "model": {"path": str(model)},
            "adapter": adapter.model_dump(),
            "data": {"path": str(rows), "held_out": 0.0 if generates else 0.125},
            "trainer": {
                "kind": kind,
                "rewards": ["tests.posttraining.resumes:weft_only"] if generates else [],
                "teacher": str(model) if kind == "gkd" else "",
                "options": {**shared, **own, **options},
            },
            "plan": Plan(parallel=Parallel(**parallel), precision=Precision(param_dtype="fp32")).model_dump(),
        }
    )


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Rows of a kind of trainer."""
    if kind == "gkd":
        answers = [{"role": "assistant", "content": pair["chosen"]} for pair in PAIRS]
        return [{"messages": [{"role": "user", "content": f"Say {i} :"}, own]} for i, own in enumerate(answers)]
    return ROWS["grpo"] if kind == "online_dpo" else ROWS.get(kind, PAIRS)


def history_of(out: Path, after: int) -> list[dict[str, float]]:
    """Logs of steps after `after`, without times."""
    rows = json.loads((out / "trainer_state.json").read_text())["log_history"]
    times = ("runtime", "per_second", "step_time", "train_loss", "preparation_time")
    kept = [
        {key: value for key, value in row.items() if not key.endswith(times)} for row in rows if row["step"] > after
    ]
    return [row for row in kept if "loss" in row or any(key.startswith("eval_") for key in row)]


def weights_of(out: Path) -> dict[str, torch.Tensor]:
    """Exported weights of a run."""
    return {name: value for file in (out / "export").glob("*.safetensors") for name, value in load_file(file).items()}


def resume_everywhere(case: str, model: Path, folder: Path) -> dict[int, str]:
    """Train a case in one go, and resume it after each of its steps.

    Returns:
        Difference by step after which the run was resumed; "" where logs and weights are equal bit by bit.
    """
    from tests.posttraining.test_run import train_on_rank

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in rows_of(CASES[case][0])))
    run_ranks(2, train_on_rank, job_of(case, model, rows, folder / "whole"), None, timeout=120)
    expected, found = weights_of(folder / "whole"), {}
    for step in range(1, STEPS):
        out = folder / f"after-{step}"
        run_ranks(
            2, train_on_rank, job_of(case, model, rows, out), str(folder / f"whole/checkpoint-{step}"), timeout=120
        )
        logs = [
            f"{key} at step {then['step']}: {now.get(key)}, not {value}"
            for now, then in zip(history_of(out, step), history_of(folder / "whole", step), strict=True)
            for key, value in then.items()
            if now.get(key) != value
        ]
        weights = weights_of(out)
        assert weights.keys() == expected.keys()
        others = [name for name, value in expected.items() if not torch.equal(weights[name], value)]
        found[step] = "; ".join(logs[:3] + others[:1])
    return found


def main() -> None:
    """Print a row for each case, after the logs of all."""
    table = ["| job, on two ranks | resumed after step 1 | 2 | 3 |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_small_model(Path(scratch) / "model")
        for index, case in enumerate(CASES):
            folder = Path(scratch, str(index))
            folder.mkdir()
            results = resume_everywhere(case, model, folder).values()
            table.append(f"| {case} | {' | '.join(result or 'none' for result in results)} |")
    print("\n".join(table))


if __name__ == "__main__":
    main()
