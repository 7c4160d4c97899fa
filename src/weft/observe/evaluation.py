"""Results of tasks: a table in the terminal, and the section of a report."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from weft.evaluation.results import ModelResults, TaskEvaluation, TaskResult
from weft.observe import page
from weft.observe.chart import TONES, Series, line_chart, linear_axis

COLUMNS = ("task", "metric", "value", "standard error", "records")


def print_results(results: ModelResults) -> None:
    """Print the values of all tasks."""
    table = Table(*COLUMNS[:2], *(Column(name, justify="right") for name in COLUMNS[2:]))
    for row in _rows(results.tasks):
        table.add_row(*row)
    Console().print(table)


def evaluation_section(results: ModelResults | None, evaluations: Sequence[TaskEvaluation] = ()) -> list[str]:
    """Section of a report: results of `weft eval`, and values over the steps of training; empty without any."""
    parts = []
    if results:
        of_step = f"Step {results.step}" if results.step is not None else "Weights of the folder"
        settings = [
            f"at most {results.limit} records per task" if results.limit is not None else "",
            f"{results.num_fewshot} worked examples" if results.num_fewshot is not None else "",
            results.prompts.text(),
        ]
        about = ", ".join(filter(None, [f"{of_step}, evaluated with lm-eval {results.versions['lm_eval']}", *settings]))
        parts += [page.lead(f"{about}."), page.table(COLUMNS, _rows(results.tasks))]
    if evaluations:
        last = evaluations[-1]
        parts.append(page.group("plots", _plots(evaluations)))
        parts.append(page.folded(f"Values at step {last.step}", page.table(COLUMNS, _rows(last.tasks))))
    return [page.section("Evaluation", *parts)] if parts else []


def _plots(evaluations: Sequence[TaskEvaluation]) -> Iterator[str]:
    """One chart per metric, with a line per task."""
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for evaluation in evaluations:
        for name, value in evaluation.values().items():
            task, _, metric = name.rpartition("/")
            lines.setdefault(metric, {}).setdefault(task, []).append((evaluation.step, value))
    for index, (metric, by_task) in enumerate(lines.items()):
        series = []
        for tone, (task, points) in zip(TONES * len(by_task), by_task.items(), strict=False):
            x, y = np.array(points, dtype=np.float64).T
            series.append(Series(task, x, y, tone))
        steps, values = (np.concatenate([getattr(one, name) for one in series]) for name in "xy")
        chart = line_chart(series, linear_axis(steps, tight=True), linear_axis(values), ("step", metric))
        ends = ", ".join(f"{task} {points[0][1]:.4g} to {points[-1][1]:.4g}" for task, points in by_task.items())
        yield page.plot(
            f"plot-task-{index}", chart, metric, f"From step {int(min(steps))} to {int(max(steps))}: {ends}."
        )


def _rows(tasks: Mapping[str, TaskResult]) -> list[tuple[str, str, str, str, str]]:
    return [
        (task, name, _number(metric.value), _number(metric.stderr), "" if result.n is None else str(result.n))
        for task, result in tasks.items()
        for name, metric in result.metrics.items()
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
