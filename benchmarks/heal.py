"""Loss of smaller models after training: quantization in training, and healing with and without a teacher.

    python benchmarks/heal.py                     # small models, three seeds: about an hour on two free cores
    python benchmarks/heal.py --quick
    python benchmarks/heal.py models/smollm2 --steps 500 --rows 4 --lr 8e-4    # SmolLM2-135M: hours

Small models: a model of 6 blocks is trained on Python's standard library, and continued in each way for the same number of
steps, from the same weights, on the same rows, at a quarter of the learning rate. SmolLM2, of examples/fetch_smollm.py, is
healed for `--steps`, and quantized in training for `--quantized-steps` with each seed. Losses are of held-out rows, by plain
Transformers in fresh processes.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from weft.compress.measure import measure
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.rows import read_rows
from weft.compress.run import compress
from weft.device.cpu import Cpu
from weft.job import Data, Job
from weft.planner.train import train

SMALL = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


class Bench:
    """Runs in a folder, and their held-out losses."""

    def __init__(self, folder: Path, data: dict[str, Any], lr: float, rows: int, held_out: int):
        self.folder, self.data, self.lr, self.rows, self.held_out = folder, data, lr, rows, held_out
        self.split: Any = None

    def job(self, name: str, model: dict[str, Any], steps: int, seed: int, **tables: Any) -> Job:
        settings = {"lr": self.lr, "warmup_steps": min(100, steps // 5), **tables.pop("optimizer", {})}
        return Job.model_validate(
            {
                "model": model,
                "data": self.data,
                "optimizer": settings,
                "train": {
                    "steps": steps,
                    "global_batch_size": self.rows,
                    "micro_batch_size": 4,
                    "seed": seed,
                    "evaluate_rows": 4,
                    **tables.pop("train", {}),
                },
                "plan": {"precision": {"param_dtype": "fp32", **tables.pop("precision", {})}},
                "out": str(self.folder / name),
                **tables,
            }
        )

    def train(self, *arguments: Any, **tables: Any) -> Path:
        """Train; returns the run folder."""
        return train(self.job(*arguments, **tables), ranks=1, log=lambda line: None)

    def compress(self, model: Path, recipe: Recipe) -> Path:
        """Compress into a new folder."""
        out = self.folder / f"compressed-{len(list(self.folder.glob('compressed-*')))}"
        compress(model, out, recipe, self.rows_of(model).calibration, lambda line: None)
        return out

    def rows_of(self, model: Path) -> Any:
        if self.split is None:
            self.split = read_rows(Data(**self.data), model, 64, self.held_out, lambda line: None)
        return self.split

    def loss(self, model: Path) -> float:
        return measure(model, self.rows_of(model).held_out).loss

    def heal(self, name: str, model: Path, teacher: Path | None, steps: int, seed: int, **tables: Any) -> float:
        """Held-out loss after training from a folder, with the loss of a teacher or the plain one."""
        if teacher is not None:
            tables["distillation"] = {"teacher": str(teacher)}
            tables["train"] = {"loss": "weft:distillation"}
        return self.loss(self.train(name, {"path": str(model)}, steps, seed, **tables) / "export")


def small_models(bench: Bench, seed: int, first: int, more: int) -> dict[str, float]:
    """Held-out losses of one seed."""
    path = {"config": {**SMALL, "initializer_range": 0.02}, "init_seed": seed}
    base = bench.train("base", path, first, seed) / "export"
    losses = {"trained": bench.loss(base)}
    low: dict[str, Any] = {"optimizer": {"lr": bench.lr / 4}}  # of all continuations
    losses |= dict(quantized(bench, base, more, seed, 128, low["optimizer"], "fp32"))
    dropped = bench.compress(base, read_recipe("drop=0.34"))
    losses["a third of the blocks dropped"] = bench.loss(dropped)
    losses["dropped, healed"] = bench.heal("healed", dropped, None, more, seed, **low)
    losses["dropped, healed with a teacher"] = bench.heal("taught", dropped, base, more, seed, **low)
    smaller = {"config": {**SMALL, "num_hidden_layers": 4}, "init_seed": seed}
    losses["smaller model from the start, all steps"] = bench.loss(
        bench.train("smaller", smaller, first + more, seed) / "export"
    )
    return losses


def quantized(
    bench: Bench, base: Path, steps: int, seed: int, group_size: int, settings: dict[str, Any], dtype: str
) -> Iterator[tuple[str, float]]:
    """Held-out losses of a model that is trained and then quantized, and of one that is quantized in training, as they come.

    Args:
        bench: folder, data and rows.
        base: model from which both start.
        steps: steps of each.
        seed: seed of both.
        group_size: of int4.
        settings: table of the optimizer.
        dtype: of the forward.
    """
    path, recipe = {"path": str(base)}, Recipe(weights="int4", group_size=group_size)  # type: ignore[arg-type]
    longer = bench.train(f"longer-{seed}", path, steps, seed, optimizer=settings, precision={"param_dtype": dtype})
    yield "trained longer", bench.loss(longer / "export")
    nearest = recipe.model_copy(update={"method": "nearest"})
    yield "trained longer, then int4 to the nearest", bench.loss(bench.compress(longer / "export", nearest))
    yield "trained longer, then int4 by GPTQ", bench.loss(bench.compress(longer / "export", recipe))
    aware = {"param_dtype": dtype, "quantize": "int4", "quantize_group_size": group_size}
    run = bench.train(f"aware-{seed}", path, steps, seed, optimizer=settings, precision=aware)
    yield "quantization-aware int4 for as long", bench.loss(bench.compress(run / "export", read_recipe("trained", run)))


def large_model(bench: Bench, model: Path, steps: int, seeds: int, quantized_steps: int) -> Iterator[tuple[str, float]]:
    """Held-out losses of a model that others have trained, as they come."""
    fast: dict[str, Any] = {"precision": {"param_dtype": "auto"}}
    low = bench.lr / 4
    yield "as it is", bench.loss(model)
    sparse = bench.compress(model, read_recipe("2:4"))
    yield "2:4", bench.loss(sparse)
    zeros = {"lr": low, "keep_zeros": True}
    yield f"2:4, healed for {steps} steps", bench.heal("sparse", sparse, None, steps, 0, optimizer=zeros, **fast)
    dropped = bench.compress(model, read_recipe("drop=0.34"))
    yield "a third of the blocks dropped", bench.loss(dropped)
    healed = bench.heal("dropped", dropped, None, steps, 0, optimizer={"lr": low}, **fast)
    yield f"dropped, healed for {steps} steps", healed
    start = bench.train("start", {"config": str(dropped / "config.json")}, steps, 0, **fast) / "export"
    yield f"of the same size from the start, {steps} steps", bench.loss(start)
    for seed in range(seeds):
        yield from quantized(bench, model, quantized_steps, seed, 64, {"lr": low}, "auto")


def main(
    model: Annotated[Path | None, typer.Argument(help="Hugging Face folder in place of the small models.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each continuation.")] = 150,
    rows: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    held_out: Annotated[int, typer.Option(help="Held-out rows.")] = 32,
    seeds: Annotated[int, typer.Option(help="Seeds.")] = 3,
    quantized_steps: Annotated[int, typer.Option(help="Steps of a large model with quantization.")] = 150,
    first: Annotated[int, typer.Option(help="Steps in which the small model is trained.")] = 1500,
    quick: Annotated[bool, typer.Option(help="One seed of few steps.")] = False,
) -> None:
    """Train, and print the losses."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        data: dict[str, Any] = {"source": "python", "seq_len": 256 if model else 128}
        if model is not None:
            data["tokenizer"] = str(model)
            bench = Bench(Path(scratch), data, lr, rows, held_out)
            for name, loss in large_model(bench, model, steps, seeds, quantized_steps):
                losses.setdefault(name, []).append(loss)
                show(losses)
        else:
            for seed in range(1 if quick else seeds):
                folder = Path(scratch) / str(seed)
                bench = Bench(folder, {**data, "vocab_size": 2048}, lr, rows, held_out)
                folder.mkdir()
                for name, loss in small_models(bench, seed, 20 if quick else first, 10 if quick else steps).items():
                    losses.setdefault(name, []).append(loss)
                shutil.rmtree(folder)
                show(losses)


def show(losses: dict[str, list[float]]) -> None:
    """Print mean and single losses."""
    table = Table("model", "held-out loss", "of each seed", title=f"{Cpu().name}, one rank")
    for name, found in losses.items():
        table.add_row(name, f"{statistics.mean(found):.4f}", " ".join(f"{loss:.4f}" for loss in found))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
