"""Effect of dtypes on the held-out loss: the same training with each precision setting.

    python benchmarks/convergence.py [--steps 150]       # three quarters of an hour on one core
    python benchmarks/convergence.py --only 0 1 2 3 7    # some rows, each compared with the first one
    python benchmarks/convergence.py --fp8 dense         # FP8 matmuls beside bf16, in a dense model
    python benchmarks/convergence.py --fp8 experts       # the same in a Mixture-of-Experts model, experts included

A model like that of `weft train` (a Qwen3-MoE of 4 million parameters on the source code of Python's standard library), one
rank, the same tokens in three orders (seeds). Printed are the mean held-out loss and its distance from that of fp32, mean and
range. The second row is the first with micro-batches of two rows: the distance of runs that differ only in rounding. A
dynamic loss scale starts at 2^16, so a step or two are skipped. Nothing is timed: a CPU has no fast fp16.

The learning rate is a sixth of the recipe's. At the recipe's own, the first hundred steps are so steep that rounding alone
changes the final loss by 0.2, as the second row would show: dtypes could not be distinguished.
"""

import argparse
import statistics
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from weft.data import Prepared, prepare
from weft.job import Job, read_toml
from weft.training.optimizer import learning_rate, set_learning_rate
from weft.training.session import held_out_batches, open_session, train_batches
from weft.training.step import evaluate, train_step

RECIPE = read_toml(Path(str(files("weft.recipes") / "first.toml")))
MODEL = RECIPE["model"]["config"] | {"num_hidden_layers": 4}  # 4.3 million parameters
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}  # 3.7 million parameters, in sizes that FP8 blocks divide
RATE = 5e-4
SEEDS = (0, 1, 2)
BF16: dict[str, Any] = {"param_dtype": "bf16"}
HALF: dict[str, Any] = {**BF16, "backward": "fp16", "loss_scale": "dynamic"}
AGAIN = "fp32, sums in another order"
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"param_dtype": "fp32"},
    AGAIN: {"param_dtype": "fp32"},
    "bf16 forward and backward, fp32 update": BF16,
    "the same, split weights": {**BF16, "weights": "split"},
    "the same, router, norms and head in fp32": {**BF16, "fp32_modules": ["router", "norm", "head"]},
    "the same, states of 8 bits": {**BF16, "optimizer_state_dtype": "int8"},
    "the same, states of 4 bits": {**BF16, "optimizer_state_dtype": "int4"},
    "bf16 forward, fp16 backward, fp32 update": HALF,
    "the same, split weights, router, norms and head in fp32": {
        **HALF,
        "weights": "split",
        "fp32_modules": ["router", "norm", "head"],
    },
    "fp16 forward and backward, fp32 update": {"param_dtype": "fp16", "loss_scale": "dynamic"},
    "bf16 all through": {**BF16, "update": "bf16", "reduce_dtype": "bf16"},
}
FP8: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp32": {"param_dtype": "fp32"},
    "bf16, FP8 matmuls": {**BF16, "matmul": "fp8", "emulate_fp8": True},
    "bf16, FP8 matmuls in blocks": {**BF16, "matmul": "fp8_block", "emulate_fp8": True},
}

FP8_EXPERTS = {name: formats for name, formats in FP8.items() if "blocks" not in name}
"""Blocks of 128 values do not divide the sizes of the model with experts."""


def run(
    prepared: Prepared, model: dict[str, Any], precision: dict[str, Any], micro_batch: int, steps: int, seed: int
) -> tuple[float, int]:
    """Held-out loss, and the number of skipped steps."""
    train = {"steps": steps, "seed": seed, "global_batch_size": 4, "micro_batch_size": micro_batch, "evaluate_rows": 64}
    job = merge(RECIPE, {"model": {"config": model}, "train": train, "optimizer": {"lr": RATE, "schedule": "cosine"}})
    session = open_session(Job.parse(merge(job, {"plan": {"parallel": {"zero": 0}, "precision": precision}})), prepared)
    settings = session.job.optimizer
    skipped = 0
    for step, micro_batches in enumerate(train_batches(session, session.position), 1):
        set_learning_rate(session.optimizer.inner, learning_rate(step, steps, settings))
        result = train_step(session.model, session.optimizer, micro_batches, settings.clip_norm)
        skipped += result.problem is not None
    loss = evaluate(session.model, held_out_batches(session))
    dist.destroy_process_group()
    return loss, skipped


def merge(tables: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Merge nested tables; values of `others` take precedence."""
    merged = dict(tables)
    for name, value in others.items():
        merged[name] = merge(merged.get(name, {}), value) if isinstance(value, dict) and name != "config" else value
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--only", nargs="+", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--fp8", choices=("dense", "experts"))
    chosen = parser.parse_args()
    model, formats = {"dense": (DENSE, FP8), "experts": (MODEL, FP8_EXPERTS)}.get(chosen.fp8, (MODEL, FORMATS))
    names = [list(formats)[index] for index in chosen.only or range(len(formats))]
    table = Table(title=f"{chosen.steps} steps, seeds {', '.join(map(str, chosen.seeds))}")
    for column in ("", "held-out loss", f"from {names[0]}", "skipped steps"):
        table.add_column(column, justify="left" if not column else "right")
    prepared = prepare(Job.parse(RECIPE).data, model_folder=None, log=print)
    reference: list[float] = []
    for name in names:
        rows = 2 if name == AGAIN else 4
        runs = [run(prepared, model, formats[name], rows, chosen.steps, seed) for seed in chosen.seeds]
        losses = [loss for loss, _ in runs]
        reference = reference or losses
        differences = [loss - base for loss, base in zip(losses, reference, strict=True)]
        table.add_row(
            name,
            f"{statistics.mean(losses):.4f}",
            f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})",
            str(sum(skipped for _, skipped in runs)),
        )
        print(name, losses, flush=True)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
