"""Tasks of an evaluation: names of lm-eval, folders or files with its YAML, and JSONL files. Imports lm-eval when called."""

import difflib
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from weft.errors import DataError, JobError
from weft.evaluation.records import Kind, read_records

YAML = (".yaml", ".yml")
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}  # defaults of lm_eval.simple_evaluate
LIKELIHOODS = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
GENERATED_TOKENS = 32  # of an answer of one line


@dataclass
class Tasks:
    """Loaded tasks and groups of lm-eval by name, in the form that `lm_eval.evaluate` takes."""

    tasks: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)

    def generating(self) -> list[str]:
        """Names of the tasks for which the model generates text."""
        return [name for name, task in self.tasks.items() if task.get_config("output_type") not in LIKELIHOODS]


def check_harness() -> None:
    """Refuse tasks where lm-eval is not installed.

    Raises:
        JobError: names the extra.
    """
    if find_spec("lm_eval") is None:
        raise JobError(
            "lm_eval is not installed",
            where="tasks",
            rule="evaluation on tasks uses lm-eval, an extra of Weft",
            fix='pip install "weft-train[eval]"',
        )
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of each override of a default


def load_tasks(
    names: Sequence[str], num_fewshot: int | None = None, generation: Mapping[str, Any] = MappingProxyType({})
) -> Tasks:
    """Load tasks with their data sets, which must be on this disk unless downloads are allowed.

    Args:
        names: each is a task, group or tag of lm-eval, a .yaml file of a task, a folder with such files, or a JSONL file in
            the format of `weft.evaluation.records`.
        num_fewshot: worked examples in each prompt, except in tasks that fix them at 0 or have no prompt; None: as each task
            says.
        generation: settings of generation that replace those of the tasks.

    Raises:
        JobError: lm-eval is not installed, or a name or file is no task.
        DataError: a record of a JSONL file breaks a rule, or the data set of a task is not on this disk.
    """
    check_harness()
    from lm_eval.tasks import TaskManager

    if not names:
        raise _refusal("no tasks are given", "name at least one task")
    folders = [name for name in names if Path(name).is_dir()]
    listed = [name for name in names if name not in folders and not name.endswith((".jsonl", *YAML))]
    manager = TaskManager(include_path=folders, include_defaults=bool(listed))
    if unknown := [name for name in listed if name not in manager.all_tasks]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, 3)
        raise _refusal(f"there is no task {unknown[0]}", f"did you mean {' or '.join(near)}?" if near else LISTING)
    loaded = Tasks()
    with seeded():
        for name in names:
            if name in folders:
                for task in _tasks_of_folder(Path(name)):
                    _add(loaded, manager, task, task)
            else:
                _add(loaded, manager, name, _own_task(Path(name)) if name.endswith(".jsonl") else name)
    for name, task in loaded.tasks.items():
        default = task.get_config("num_fewshot")
        if task.get_config("output_type") == "loglikelihood_rolling":  # of texts without a prompt
            task.set_config("num_fewshot", 0)
        elif default is None or (num_fewshot is not None and default != 0):  # as simple_evaluate does
            task.set_config("num_fewshot", num_fewshot or 0)
        if generation and name in loaded.generating():
            task.set_config("generation_kwargs", {**(task.get_config("generation_kwargs") or {}), **generation})
    return loaded


def check_examples(tasks: Tasks) -> None:
    """Refuse more worked examples in a prompt than a task has records for them, before a rank starts.

    Args:
        tasks: result of `load_tasks`.

    Raises:
        JobError: names the task and both numbers.
    """
    for name, task in tasks.tasks.items():
        wanted, sampler = task.get_config("num_fewshot"), getattr(task, "sampler", None)
        records = [repr(record) for record in sampler.fewshot_docs()] if wanted and sampler is not None else []
        leaves_out_asked = bool(records) and task.fewshot_cfg.split == task.config.test_split
        most = len(records) - (max(Counter(records).values()) if leaves_out_asked else 0)  # with all equal to it
        if records and wanted > most:
            raise JobError(
                f"{wanted} worked examples in each prompt of {name}, which has {most} for them",
                where="num_fewshot",
                rule="the examples of a prompt are different records of the task",
                fix=f"set num_fewshot to {most} or less" if most > 0 else "leave num_fewshot out",
            )


LISTING = "`lm_eval ls tasks` lists all tasks; a task of your own is a .jsonl file"


@contextmanager
def seeded() -> Iterator[None]:
    """Context with the seeds of lm-eval, which leaves the random state of the caller as it was."""
    before, numpy_before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):  # of the host only: this may run before ranks are forked
        random.seed(SEEDS["random"])
        np.random.seed(SEEDS["numpy"])
        torch.default_generator.manual_seed(SEEDS["torch"])
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(numpy_before)


def _add(loaded: Tasks, manager: Any, name: str, spec: Any) -> None:
    """Load one name into `loaded`."""
    try:
        found = manager.load([spec])
    except KeyError:
        raise _refusal(f"{name} is no task of lm-eval", LISTING) from None
    except Exception as error:  # of any library that reads data sets
        raise DataError(
            f"task {name} cannot be loaded: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            where="tasks",
            rule="a task needs its data set on this disk; Weft downloads only with HF_HUB_OFFLINE=0",
            fix="run the command once with HF_HUB_OFFLINE=0 where there is a network, or write the records as a .jsonl file",
        ) from None
    if twice := sorted(loaded.tasks.keys() & found["tasks"].keys()):
        raise _refusal(f"the task {twice[0]} is named twice", "name each task once, and give files different names")
    loaded.tasks |= found["tasks"]
    loaded.groups |= found["groups"]


def _tasks_of_folder(folder: Path) -> list[str]:
    """Names of the tasks in the YAML files of a folder; files whose names begin with _ are templates."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder, include_defaults=False)
    read = {entry.yaml_path for entry in manager.task_index.values()}
    for file in sorted(path for path in folder.glob("**/*") if path.suffix in YAML):
        if file not in read and not file.name.startswith("_"):
            raise _refusal(f"{file} is no task of lm-eval", "give it the keys task, dataset_path and output_type")
    if not manager.all_subtasks:
        raise _refusal(f"{folder} has no task", "name a folder with .yaml files of lm-eval, or a .jsonl file")
    return manager.all_subtasks


def _own_task(path: Path) -> dict[str, Any]:
    """Settings of lm-eval for the records of a JSONL file."""
    kind, records = read_records(path)
    return {
        "task": path.stem,
        "custom_dataset": partial(_data_set, records),
        "test_split": "test",
        "metadata": {"version": 1},
        **SETTINGS[kind],
    }


def _data_set(records: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
    from datasets import Dataset

    return {"test": Dataset.from_list(records)}


def _metrics(*names: str) -> list[dict[str, Any]]:
    """Means over the records; a higher value is better."""
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


SETTINGS: dict[Kind, dict[str, Any]] = {
    "multiple choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "prompt",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": _metrics("acc", "acc_norm"),
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": GENERATED_TOKENS},
        "filter_list": [{"name": "none", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": _metrics("exact_match"),
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "byte_perplexity"},
            {"metric": "bits_per_byte"},
        ],
    },
}


def _refusal(what: str, fix: str) -> JobError:
    rule = "a task is a name of lm-eval, a .yaml file, a folder with .yaml files, or a .jsonl file"
    return JobError(what, where="tasks", rule=rule, fix=fix)
