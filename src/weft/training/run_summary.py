"""End of run.json: baselines on the same tokens, a generated sample, and the software environment."""

import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft.adapters.folder import load_with_adapter
from weft.data import Prepared, Rows, scored_pairs, unigram_and_bigram
from weft.job import Job
from weft.own_code import package_version
from weft.training.run_folder import (
    SUMMARY,
    read_table,
    write_summary,
)
from weft.training.task_samples import sample_task

BASELINE_ROWS = 40_000  # maximum rows of the training split for bigram counts
PROMPT_TOKENS, NEW_TOKENS = 24, 96  # of the sample


def complete_summary(job: Job, prepared: Prepared, out: Path, log: Callable[[str], None]) -> None:
    """Add baselines, a generated sample and the software environment to run.json."""
    libraries = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    environment = {
        "weft": package_version(),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    summary = read_table(out / SUMMARY) | _results(job, prepared, out, log) | {"environment": environment}
    write_summary(out, summary, log, "baselines and sample")


def _results(job: Job, prepared: Prepared, out: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Baselines, and a sample of the export; None if the model does not generate under the settings of its folder."""
    kind, found = job.task.kind, dict[str, Any](sample=None)
    try:
        if kind != "causal":
            found = sample_task(job, prepared, out, log)
        elif prepared.tokenizer:
            found = {"sample": sample(out / "export", prepared, load=partial(_load, job))}
    except Exception as error:  # of any type; the run has ended, and its export is complete
        log(f"{'sample':<12}none: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if kind == "causal":
        return {"baselines": _baselines(job, prepared), **found}
    return {"task": kind, "baselines": None, "accuracy": None, "metrics": {}, **found}


def _baselines(job: Job, prepared: Prepared) -> dict[str, float] | None:
    """Held-out cross entropy of unigram and bigram models on the same tokens, in nats; None without held-out tokens."""
    if not prepared.held_out:
        return None
    data = job.data
    train, held_out = (
        Rows(spans, seq_len=data.seq_len, packing=data.packing, shuffle=False, seed=0)
        for spans in (prepared.train, prepared.held_out)
    )
    unigram, bigram = unigram_and_bigram(
        scored_pairs(train, BASELINE_ROWS), scored_pairs(held_out), prepared.vocab_size
    )
    return {"unigram": unigram, "bigram": bigram}


def _load(job: Job, folder: Path) -> Any:
    """Exported model, loaded by plain Transformers or by PEFT."""
    if job.adapter.kind == "none":
        return AutoModelForCausalLM.from_pretrained(folder)
    return load_with_adapter(folder, job).eval()


def sample(
    folder: Path,
    prepared: Prepared,
    *,
    load: Callable[[Path], Any] = AutoModelForCausalLM.from_pretrained,
) -> str:
    """Text that the exported model generates from the start of a held-out row, using plain Transformers.

    In chats it answers the prompt of the first held-out chat.
    """
    spans = prepared.held_out or prepared.train
    if spans[0].whole:
        chat = Rows(spans, seq_len=spans[0].last, packing=False, shuffle=False, seed=0)[0].tokens
        row = chat[: max(1, int((chat < 0).cumprod(0).sum()))]
        row = torch.where(row < 0, ~row, row)
    else:
        row = Rows(spans, seq_len=PROMPT_TOKENS, packing=True, shuffle=False, seed=0)[0].tokens[:PROMPT_TOKENS]
    model = load(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    ids = row.to(torch.int64)[None]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[1] + NEW_TOKENS
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_length=min(limit, ids.shape[1] + NEW_TOKENS),
        do_sample=True,
        temperature=0.7,
        top_k=40,
    )
    return tokenizer.decode(generated[0])
