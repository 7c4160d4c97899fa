"""Entry point of each rank of `weft eval`: python -m weft.evaluation.rank SETTINGS.json."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers

from weft.device.detect import detect
from weft.evaluation.harness import evaluate_tasks
from weft.evaluation.prompts import Prompts
from weft.evaluation.results import ModelResults
from weft.evaluation.run import Settings
from weft.evaluation.source import load_model, load_tokenizer
from weft.evaluation.tasks import load_tasks
from weft.files import replace_file
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import connect, rank_main


def main() -> None:
    """Evaluate the parts of this rank; rank 0 writes the results."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    evaluate_settings(settings, Heartbeat.open())
    dist.destroy_process_group()


def evaluate_settings(settings: Settings, heartbeat: Heartbeat) -> None:
    """Evaluate a model on this rank. Collective.

    Args:
        settings: the same on every rank.
        heartbeat: heartbeat of this rank, which each forward of the model updates.
    """
    device = detect()
    rank, world_size, local_rank = connect(device)
    prompts = Prompts(**settings.prompts)
    tasks = load_tasks(settings.tasks, settings.num_fewshot, prompts.gen_kwargs)
    folder = Path(settings.model)
    model = load_model(folder, device.torch_device(local_rank))
    model.register_forward_pre_hook(lambda *_: heartbeat.phase("evaluating"))

    from weft.evaluation.language_model import DistributedLM  # imports lm-eval, which load_tasks has checked

    progress = rank == 0 and sys.stderr.isatty()
    own = DistributedLM(
        model,
        load_tokenizer(folder),
        settings.batch_size,
        part=rank,
        parts=world_size,
        progress=progress,
        chat_template_args=prompts.chat_template_args,
    )
    samples: list[dict[str, Any]] | None = [] if settings.samples and rank == 0 else None
    results = evaluate_tasks(own, tasks, settings.limit, progress=progress, prompts=prompts, samples=samples)
    if samples is not None and settings.samples:
        lines = (json.dumps(sample, default=str, ensure_ascii=False) for sample in samples)
        replace_file(Path(settings.samples), "".join(f"{line}\n" for line in lines))
    if rank == 0:
        names = {"weft": "weft-train", "lm_eval": "lm-eval", "torch": "torch", "transformers": "transformers"}
        ModelResults(
            model=settings.source,
            step=settings.step,
            tasks=results,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            prompts=prompts,
            versions={name: version(package) for name, package in names.items()},
        ).write(Path(settings.out))


if __name__ == "__main__":
    rank_main(main)
