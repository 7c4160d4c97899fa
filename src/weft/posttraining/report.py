"""Report of a run with a trainer of TRL: one self-contained page, `report.html`, from the files of the run folder."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import DataError
from weft.evaluation.results import HISTORY, RESULTS, ModelResults
from weft.observe import figures, page
from weft.observe.chart import format_value
from weft.observe.evaluation import evaluation_section
from weft.posttraining.job import TrainerJob
from weft.posttraining.trainers import EXPORT
from weft.training.metrics import format_seconds, read_task_evaluations

STATE = "trainer_state.json"
"""File with the logs of the trainer, in the run folder."""
EVALUATION = "eval_"
UNPLOTTED = ("epoch", "num_tokens", "total_flos", "learning_rate", "train_loss")
TIMES = ("runtime", "per_second", "step_time")
FIRST = ("loss", "reward", "rewards/accuracies", "accuracy", "rewards/margins", "margin", "completions/mean_length")
"""Metrics that are shown first, in this order; the others follow by name, and are folded."""


class Curve(NamedTuple):
    """A metric over the steps, as the trainer logs it."""

    name: str
    training: list[tuple[int, float]]
    """(step, value) of training."""
    evaluation: list[tuple[int, float]]
    """(step, value) of evaluations."""

    @property
    def points(self) -> list[tuple[int, float]]:
        """Points of the evaluations, or of training without any."""
        return self.evaluation or self.training


def read_history(run: Path) -> list[dict[str, Any]]:
    """Rows that the trainer has logged, in order.

    Raises:
        DataError: the run has no logs yet, or they are damaged.
    """
    path = run / STATE
    if not path.is_file():
        path = max(run.glob(f"checkpoint-*/{STATE}"), key=lambda each: each.stat().st_mtime, default=path)
    try:
        history = json.loads(path.read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"no logs of a trainer in {run}: {type(error).__name__}: {error}",
            where=str(path),
            rule="a trainer writes its logs into each checkpoint and at the end of the run",
            fix="let the run reach its first checkpoint, or its end",
        ) from None
    return [row for row in history if isinstance(row, dict)]


def curves_of(history: list[dict[str, Any]]) -> list[Curve]:
    """Curves of all numeric metrics, those of `FIRST` first."""
    found: dict[str, Curve] = {}
    for row in history:
        for key, value in row.items():
            name = key.removeprefix(EVALUATION)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or "step" not in row or name in ("step", *UNPLOTTED) or name.endswith(TIMES):
                continue
            curve = found.setdefault(name, Curve(name, [], []))
            (curve.evaluation if key != name else curve.training).append((int(row["step"]), float(value)))
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(found.values(), key=lambda curve: (order.get(curve.name, len(FIRST)), curve.name))


def write_report(run: Path) -> Path:
    """Write `report.html` into the folder of a run with a trainer.

    Args:
        run: run folder; a run that was interrupted after a checkpoint is supported.

    Returns:
        The path of the page.

    Raises:
        DataError: the run has no logs yet, or they are damaged.
        JobError: `job.toml` is not a job of this version.
        OSError: the page cannot be written; an existing page is kept.
    """
    job, history = TrainerJob.load(run / "job.toml"), read_history(run)
    curves = curves_of(history)
    shown = [curve for curve in curves if curve.name in FIRST]
    others = [curve for curve in curves if curve.name not in FIRST]
    has_model = (run / EXPORT).is_dir()
    title = f"{job.trainer.kind} · {Path(job.model.path).name}"
    unfinished = [] if has_model else ["The run has not saved its model: it was interrupted, or it goes on."]
    results = ModelResults.read(run / RESULTS) if (run / RESULTS).is_file() else None
    evaluations = read_task_evaluations(run / HISTORY) if (run / HISTORY).is_file() else []
    content = [
        page.header("Weft training run", title, _summary(job, history)),
        page.notice("This run is not complete", unfinished),
        page.key_figures(_key_figures(shown)),
        page.section("Training", page.group("plots", [_plot(curve) for curve in shown])),
        *evaluation_section(results, evaluations),
        page.section("Use this model", _usage(run, job) if has_model else page.absent("There is no model yet.")),
    ]
    if others:
        table = page.table(("Metric", "first", "last", "steps"), [_row(curve) for curve in others])
        content.append(page.section("Other metrics", page.folded(f"{len(others)} metrics of TRL", table)))
    if (run / "plan.toml").is_file():
        content.append(page.section("Plan", page.preformatted((run / "plan.toml").read_text(encoding="utf-8"))))
    content.append(page.section("Job", page.folded("Full job (job.toml)", page.preformatted(job.to_toml()))))
    return page.write_report_page(run, title, content)


def _summary(job: TrainerJob, history: list[dict[str, Any]]) -> str:
    steps = max((int(row.get("step", 0)) for row in history), default=0)
    seconds = next((row["train_runtime"] for row in reversed(history) if "train_runtime" in row), None)
    plan = "plan of the planner" if job.plan is None else f"zero {job.plan.parallel.zero}, tp {job.plan.parallel.tp}"
    parts = [f"{steps} steps", f"adapter {job.adapter.kind}", plan, f"rows of {job.data.path}"]
    return " · ".join([*parts, *([f"trained in {format_seconds(seconds)}"] if seconds else [])])


def _key_figures(curves: list[Curve]) -> list[tuple[str, str, str]]:
    cards = []
    for curve in curves:
        points = curve.points
        where = "evaluation" if curve.evaluation else "training"
        cards.append((curve.name, f"{points[-1][1]:.4g}", f"{where}, from {points[0][1]:.4g}"))
    return cards


def _plot(curve: Curve) -> str:
    series = {"training": curve.training, "evaluation": curve.evaluation}
    (first, before), (last, after) = curve.points[0], curve.points[-1]
    where = "In evaluations" if curve.evaluation else "In training"
    return page.plot(
        f"plot-{curve.name.replace('/', '-').replace('_', '-')}",
        figures.history_figure(series, curve.name),
        curve.name,
        f"{where} from {format_value(before)} at step {first} to {format_value(after)} at step {last}.",
    )


def _row(curve: Curve) -> tuple[str, str, str, str]:
    points = curve.points
    name = f"{EVALUATION}{curve.name}" if curve.evaluation else curve.name
    return name, f"{points[0][1]:.4g}", f"{points[-1][1]:.4g}", f"{points[0][0]} to {points[-1][0]}"


def _usage(run: Path, job: TrainerJob) -> str:
    """Code example that loads the model with Transformers, or with PEFT if it has adapters."""
    folder, base = str((run / EXPORT).resolve()), str(Path(job.model.path).resolve())
    classifier = job.trainer.kind == "reward"
    kind = "AutoModelForSequenceClassification" if classifier else "AutoModelForCausalLM"
    lines = [f"from transformers import AutoTokenizer, {kind}", "", f"folder = {folder!r}"]
    if job.adapter.kind == "none":
        lines.append(f"model = {kind}.from_pretrained(folder)")
    else:
        loaded = f"{kind}.from_pretrained(base{', num_labels=1' * classifier})"
        lines.insert(0, "from peft import PeftModel")
        lines += [f"base = {base!r}", f"model = PeftModel.from_pretrained({loaded}, folder)"]
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)", 'inputs = tokenizer("...", return_tensors="pt")']
    if classifier:
        lines.append("print(model(**inputs).logits)  # the reward")
    else:
        lines += ["written = model.generate(**inputs, max_new_tokens=40)", "print(tokenizer.decode(written[0]))"]
    return page.preformatted("\n".join(lines))
