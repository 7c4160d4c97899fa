"""`weft compress` from start to end: rows, compression, measurements, compression.json and report.html."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.compress.measure import Quality
from weft.compress.recipe import Recipe, read_recipe
from weft.compress.rows import check_texts, check_tokenizer, read_data, read_rows
from weft.compress.run import Compressed, compress
from weft.compress.source import read_causal_config
from weft.device.cpu import Cpu
from weft.errors import DataError
from weft.evaluation.source import model_folder
from weft.inputs import check_new
from weft.observe import page

RESULTS = "compression.json"


@dataclass(frozen=True)
class CompressionReport:
    """Savings and cost of a compression."""

    source: str
    folder: str
    recipe: dict[str, Any]
    bytes_before: int
    bytes_after: int
    seconds: float
    errors: dict[str, float]
    """Relative squared error of the outputs of each layer."""
    before: Quality | None
    after: Quality | None
    """Held-out loss and speed; None if they were not measured."""
    machine: str

    @property
    def change(self) -> float | None:
        """Change of the held-out loss, relative to the loss before; None if it was not measured."""
        return self.after.loss / self.before.loss - 1 if self.before and self.after else None


def compress_model(
    source: Path | str,
    out: Path | str,
    recipe: Recipe | str = "int8",
    *,
    calibrate: Path | str | None = None,
    held_out_rows: int = 64,
    step: int | None = None,
    ranks: int = 1,
    log: Callable[[str], None] = print,
) -> CompressionReport:
    """Compress a model, measure both models, and write the report into the new folder.

    Plain Transformers loads the folder in a process without Weft, and its logits are compared with those of the model before.

    Args:
        source: run folder, or Hugging Face folder.
        out: folder to write; it must not exist.
        recipe: what becomes of the weights; as text, what `weft compress --recipe` takes.
        calibrate: TOML file with a table `data`; None: that of the run's job, if there is one.
        held_out_rows: maximum rows for the held-out loss, the first ones; 0: do not measure it.
        step: step of a checkpoint of the run; None: the newest weights.
        ranks: processes of this host that share the work.
        log: called with a line of progress.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    source, out = Path(source), Path(out)
    recipe = read_recipe(recipe, source) if isinstance(recipe, str) else recipe
    check_new(out)
    with model_folder(source, step) as (folder, _):
        config = read_causal_config(folder).get_text_config()
        data = read_data(None if calibrate is None else Path(calibrate), source)
        rows: list[Tensor] | None = None
        held_out: list[Tensor] = []
        if data is not None and (recipe.calibrates or recipe.prunes or held_out_rows):
            if calibrate is not None:  # in a run, its own text has the same tokens again
                check_tokenizer(data, folder)
            split = read_rows(data, folder, recipe.rows, held_out_rows, log)
            check_texts(split, config.vocab_size, getattr(config, "max_position_embeddings", None), data)
            rows, held_out = split
            if held_out_rows:
                if not any(bool((text[1:] >= 0).any()) for text in held_out):
                    raise DataError(
                        "the held-out split has no target",
                        where="--calibrate",
                        rule="the held-out loss is over the targets of the held-out rows",
                        fix="use a longer text, another data.held_out, or --no-evaluate",
                    )
                log(f"{len(held_out)} held-out texts of {sum(map(len, held_out))} tokens")
        elif held_out_rows:
            log("no held-out loss: name a text with --calibrate")

        def report_of(found: Compressed) -> CompressionReport:
            return CompressionReport(str(source), str(out), recipe.model_dump(), machine=Cpu().name, **vars(found))

        def write(made: Path, found: Compressed) -> None:
            report = report_of(found)
            (made / RESULTS).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
            page.write_report_page(made, out.name, _content(report))

        return report_of(compress(folder, out, recipe, rows, log, ranks, held_out, write))


def print_report(report: CompressionReport) -> None:
    """Print sizes, losses and speeds."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(*(Column(name, justify="right" if index else "left") for index, name in enumerate(COLUMNS)))
    for row in _rows(report):
        table.add_row(*row)
    Console().print(table)


COLUMNS = ("", "MB", "held-out loss", "change", "perplexity", "accuracy", "tokens/s here")


def _rows(report: CompressionReport) -> list[list[str]]:
    rows = []
    for name, size, quality, change in (
        ("before", report.bytes_before, report.before, None),
        ("after", report.bytes_after, report.after, report.change),
    ):
        measured = [""] * 5
        if quality is not None:
            measured = [
                f"{quality.loss:.4f}",
                "" if change is None else f"{change:+.2%}",
                f"{quality.perplexity:.2f}",
                f"{quality.accuracy:.2%}",
                f"{quality.tokens_per_second:.0f}",
            ]
        rows.append([name, f"{size / 1e6:.1f}", *measured])
    return rows


def _content(report: CompressionReport) -> list[str]:
    """Fragments of the page."""
    kept = report.bytes_after / max(1, report.bytes_before)
    settings = Recipe(**report.recipe).model_dump(exclude_defaults=True)
    recipe = ", ".join(f"{name} = {value}" for name, value in settings.items())
    change = "not measured" if report.change is None else f"{report.change:+.2%}"
    figures = [
        ("Size", f"{kept:.1%}", f"{report.bytes_after / 1e6:.1f} of {report.bytes_before / 1e6:.1f} MB"),
        ("Held-out loss", change, "relative to the model before"),
        ("Time", f"{report.seconds:.0f} s", report.machine),
    ]
    return [
        page.header("Compression", Path(report.folder).name, f"{report.source}: {recipe}"),
        page.key_figures(figures),
        page.section(
            "Before and after",
            page.lead(
                "Measured by plain Transformers, which decompresses the weights when it starts. Accuracy is the fraction of "
                "tokens that the model finds more likely than any other."
            ),
            page.table(COLUMNS, _rows(report)),
        ),
        *([_errors(report.errors)] if report.errors else []),
    ]


def _errors(errors: dict[str, float]) -> str:
    """Section of the page."""
    worst = sorted(errors.items(), key=lambda item: -item[1])
    return page.section(
        "Error of each layer",
        page.lead("Squared error of the outputs on calibration rows, or of the weights, relative to their squares."),
        page.table(("Layer", "error"), [[name, f"{error:.2e}"] for name, error in worst[:12]]),
        page.folded("All layers", page.table(("Layer", "error"), [[n, f"{e:.2e}"] for n, e in errors.items()])),
    )
