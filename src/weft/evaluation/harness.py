"""Evaluation of a language model on loaded tasks by lm-eval."""

import os
from contextlib import ExitStack, redirect_stderr
from typing import Any

import torch.distributed as dist

from weft.evaluation.prompts import Prompts
from weft.evaluation.results import TaskResult, task_results
from weft.evaluation.tasks import SEEDS, Tasks, seeded

BOOTSTRAP_SAMPLES = 1000  # for standard errors that have no formula
HARNESS_ENVIRONMENT = {"DISABLE_MULTIPROC": "1"}
"""Environment variables of ranks that evaluate: lm-eval would fork processes for the bootstrap from a rank with threads."""


def evaluate_tasks(
    model: Any,
    tasks: Tasks,
    limit: int | None,
    *,
    progress: bool = False,
    prompts: Prompts = Prompts(),  # noqa: B008  (it is frozen)
    samples: list[dict[str, Any]] | None = None,
) -> dict[str, TaskResult]:
    """Evaluate a model. Collective; only rank 0 computes standard errors. The random state of the caller is left as it was.

    Args:
        model: `weft.evaluation.language_model.DistributedLM`, or any LM of lm-eval.
        tasks: result of `load_tasks`; may be evaluated several times.
        limit: maximum records per task, the first ones; None: all.
        progress: show the progress bars of lm-eval, on stderr.
        prompts: form of the prompts; settings of generation are those of `tasks`.
        samples: list that gets the prompts, answers and metrics of each record, as lm-eval logs them, with their task.
    """
    from lm_eval.evaluator import evaluate

    leads = not dist.is_initialized() or dist.get_rank() == 0
    with ExitStack() as stack:
        stack.enter_context(seeded())
        if not progress:  # lm-eval has no setting for all of its bars
            stack.enter_context(redirect_stderr(stack.enter_context(open(os.devnull, "w", encoding="utf-8"))))
        for task in tasks.tasks.values():
            task.set_fewshot_seed(seed=SEEDS["fewshot"])
        found: Any = evaluate(
            lm=model,
            task_dict={"tasks": tasks.tasks, "groups": tasks.groups},
            limit=limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES if leads else 0,
            log_samples=samples is not None,
            system_instruction=prompts.system_instruction,
            apply_chat_template=prompts.apply_chat_template,
            fewshot_as_multiturn=prompts.fewshot_as_multiturn,
        )
    if samples is not None:
        samples += [
            {"task": task, **sample} for task, found_samples in found["samples"].items() for sample in found_samples
        ]
    return task_results(found)
