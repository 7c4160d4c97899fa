"""Small tasks as JSONL files, and their evaluation by lm-eval alone: the reference of the tests."""

import json
import logging
from pathlib import Path
from typing import Any

QUESTIONS = (
    ("The capital of France is", ["Paris", "Rome", "Madrid", "Oslo"], 0),
    ("The capital of Japan is", ["Seoul", "Tokyo", "Beijing", "Hanoi"], 1),
    ("Two plus two is", ["five", "nine", "one", "four"], 3),
    ("The opposite of hot is", ["cold", "red", "tall"], 0),
    ("Bees make", ["milk", "silk", "paper", "honey"], 3),
    ("A is", ["1", "2"], 1),  # choices of one token, whose logits HFLM computes once
    ("The author of Hamlet is", ["Dickens", "Shakespeare"], 1),
)


def write_tasks(folder: Path) -> list[str]:
    """Write a task of each kind in the format of Weft; return multiple choice, perplexity, generation."""
    rows = {
        "facts": [{"question": q, "choices": c, "answer": c[a] if a % 2 else a} for q, c, a in QUESTIONS],
        "texts": [{"text": f"{q} {c[a]}. " * (1 + 2 * i)} for i, (q, c, a) in enumerate(QUESTIONS)],
        "says": [{"prompt": q, "answer": c[a]} for q, c, a in QUESTIONS],
    }
    for name, records in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return [str(folder / f"{name}.jsonl") for name in rows]


def stock_results(
    folder: Path,
    scratch: Path,
    *names: str,
    limit: int | None = None,
    chat_template_args: dict[str, Any] | None = None,
    samples: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, dict[str, float]]:
    """Evaluate a model folder by `lm_eval.simple_evaluate` with HFLM, on the same records as Hugging Face JSON data sets.

    Args:
        folder: model folder.
        scratch: folder for the records.
        names: tasks of `write_tasks`.
        limit: maximum records per task.
        chat_template_args: arguments of the chat template, which HFLM takes.
        samples: dictionary that gets the samples of each task.
        more: arguments of `simple_evaluate`.

    Returns:
        All values and standard errors that are numbers, by task and lm-eval's name.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    rows: dict[str, list[dict[str, Any]]] = {
        "facts": [{"q": q, "choices": c, "gold": a} for q, c, a in QUESTIONS],
        "texts": [{"page": f"{q} {c[a]}. " * (1 + 2 * i)} for i, (q, c, a) in enumerate(QUESTIONS)],
        "says": [{"q": q, "right": c[a]} for q, c, a in QUESTIONS],
    }
    settings: dict[str, dict[str, Any]] = {
        "facts": {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{q}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "page",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
        },
        "says": {
            "output_type": "generate_until",
            "doc_to_text": "q",
            "doc_to_target": "right",
            "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 32},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    tasks = []
    for name in names:
        file = scratch / f"stock-{name}.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in rows[name]))
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
        tasks.append({"task": name, **data, **settings[name]})
    model = HFLM(pretrained=str(folder), device="cpu", batch_size=3, chat_template_args=chat_template_args)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        limit=limit,
        bootstrap_iters=10,
        log_samples=samples is not None,
        **more,
        task_manager=TaskManager(include_defaults=False),
    )
    assert found is not None
    if samples is not None:
        samples |= found["samples"]
    return {
        task: {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if "," in key and not isinstance(value, str)
        }
        for task, values in found["results"].items()
    }


def flat(tasks: Any) -> dict[str, dict[str, float]]:
    """Results of Weft in the form of `stock_results`."""
    return {
        task: {name: metric.value for name, metric in result.metrics.items()}
        | {f"{name}_stderr": metric.stderr for name, metric in result.metrics.items() if metric.stderr is not None}
        for task, result in tasks.items()
    }
