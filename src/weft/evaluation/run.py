"""Launch of `weft eval`: check model and tasks, evaluate on the ranks of this host, and return the results."""

import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from weft.device.detect import detect
from weft.errors import JobError
from weft.evaluation.harness import HARNESS_ENVIRONMENT
from weft.evaluation.prompts import Prompts, check_prompts
from weft.evaluation.results import RESULTS, ModelResults
from weft.evaluation.source import load_tokenizer, model_folder
from weft.evaluation.tasks import Tasks, check_examples, load_tasks
from weft.launch.launcher import default_ranks, early_forkserver, launch, thread_variables

RANK_MODULE = "weft.evaluation.rank"
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Settings of the length of answers, the first of which counts in lm-eval."""
DEFAULT_LENGTH = 256


@dataclass(frozen=True)
class Settings:
    """Settings of the ranks, passed to them in a JSON file."""

    model: str
    """Hugging Face folder."""
    source: str
    """Evaluated folder, for the results."""
    step: int | None
    tasks: tuple[str, ...]
    limit: int | None
    num_fewshot: int | None
    batch_size: int
    out: str
    samples: str = ""
    """File of the samples; empty: none."""
    prompts: dict[str, Any] = field(default_factory=dict)
    """Fields of `Prompts`."""


def evaluate_model(
    source: Path,
    tasks: tuple[str, ...],
    *,
    step: int | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    ranks: int | None = None,
    out: Path | None = None,
    prompts: Prompts = Prompts(),  # noqa: B008  (it is frozen)
    log_samples: bool = False,
) -> ModelResults:
    """Evaluate a model on tasks, on the devices of this machine. Invalid input is refused before a rank starts.

    Args:
        source: run folder, or Hugging Face folder.
        tasks: as in `weft.evaluation.tasks.load_tasks`.
        step: step of a checkpoint of the run; None: its newest weights.
        limit: maximum records per task; None: all.
        num_fewshot: worked examples in each prompt; None: as each task says.
        batch_size: rows per forward of a rank.
        ranks: number of ranks, each with the full model; None: one per accelerator, or two on CPU.
        out: file of the results, which is replaced; None: `eval.json` in `source`.
        prompts: form of the prompts, and settings of generated answers.
        log_samples: also write the prompts and answers of all records, see `samples_file`.

    Raises:
        WeftError: a subclass, see `weft.errors`.
    """
    device = detect()
    ranks, out = ranks or default_ranks(device), (out or source / RESULTS).absolute()
    with (
        early_forkserver(RANK_MODULE, device) as forkserver,
        model_folder(source, step) as (folder, of_step),
        tempfile.TemporaryDirectory(prefix="weft-eval-") as scratch,
    ):
        found = load_tasks(tasks, num_fewshot, prompts.gen_kwargs)
        check_examples(found)
        check_prompts(prompts, load_tokenizer(folder), found.generating(), str(folder))
        _check_lengths(found, folder)
        settings = Settings(
            model=str(folder.absolute()),
            source=str(source),
            step=of_step,
            tasks=tasks,
            limit=limit,
            num_fewshot=num_fewshot,
            batch_size=batch_size,
            out=str(out),
            samples=str(samples_file(out)) if log_samples else "",
            prompts=asdict(prompts),
        )
        path = Path(scratch) / "settings.json"
        path.write_text(dumps(asdict(settings)), encoding="utf-8")
        at = f" at step {of_step}" if of_step is not None else ""
        print(f"evaluating {source}{at} on {', '.join(found.tasks)}, {ranks} rank{'s' * (ranks > 1)}")
        logs = out.with_suffix(".logs")
        launch(
            [sys.executable, "-m", RANK_MODULE, str(path)],
            ranks=ranks,
            log_dir=logs,
            environment=HARNESS_ENVIRONMENT | thread_variables(device, ranks),
            forkserver=forkserver,
        )
        shutil.rmtree(logs, ignore_errors=True)  # kept after a failure
    return ModelResults.read(out)


def samples_file(out: Path) -> Path:
    """File of the samples beside a file of results: `eval.samples.jsonl` beside `eval.json`."""
    return out.with_suffix(".samples.jsonl")


def _check_lengths(tasks: Tasks, folder: Path) -> None:
    """Refuse tasks that generate as many tokens as the model has positions, or more.

    Raises:
        JobError: names the task and both numbers.
    """
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    positions: Any = getattr(config, "max_position_embeddings", None)
    for name in tasks.generating() if positions else ():
        settings = tasks.tasks[name].get_config("generation_kwargs") or {}
        length = next((settings[key] for key in LENGTHS if settings.get(key) is not None), DEFAULT_LENGTH)
        if int(length) >= positions:
            raise JobError(
                f"the task {name} generates {length} tokens, and the model has {positions} positions",
                where="--gen-kwargs",
                rule="prompt and answer fit into the positions of the model",
                fix=f"for example --gen-kwargs max_gen_toks={max(positions // 2, 1)}",
            )
