"""A run from outside: check the job, prepare its data, start the ranks, and look at what they leave."""

import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from weft.anatomy.roles import Anatomy
from weft.anatomy.transformers import can_separate_documents, read_anatomy
from weft.checkpoint.huggingface import build_on_meta, read_config
from weft.cluster.device import detect
from weft.cluster.launch import default_ranks, launch
from weft.data import Prepared, Rows, count_micro_batches, prepare, scored_pairs, unigram_and_bigram
from weft.errors import JobError
from weft.job import Job
from weft.parallel.parallelize import check_axes
from weft.train.metrics import format_count

BASELINE_ROWS = 40_000  # rows of the train split that the bigram counts look at, at most


def train(job: Job, *, ranks: int | None = None, say: Callable[[str], None] = print) -> Path:
    """Train a job on this machine's devices and return its run folder.

    Everything that can be refused is refused before a rank starts.

    Args:
        job: what to train.
        ranks: how many processes; by default one an accelerator, or two on CPU.
        say: receives lines of progress; the ranks print to the terminal themselves.

    Raises:
        WeftError: one of its subclasses, see `weft.errors`.
    """
    device = detect()
    ranks = ranks or default_ranks(device)
    plan = job.plan.resolve(ranks)
    job = job.model_copy(update={"plan": plan})
    config, anatomy = check_model(job)
    prepared = prepare(job.data, model_folder=Path(job.model.path) if job.model.path else None, say=say)
    check_tokens(job, prepared, config)
    out = _new_folder(Path(job.out), say)
    (out / "job.toml").write_text(job.to_toml(), encoding="utf-8")
    (out / "prepared.json").write_text(prepared.to_json(), encoding="utf-8")
    size = format_count(anatomy.parameters)
    say(f"{anatomy.family} with {size} parameters on {ranks} x {device.name}, output in {out}")
    try:
        launch([sys.executable, "-m", "weft.train.rank", str(out)], ranks=ranks, log_dir=out / "logs")
    finally:
        if (out / "run.json").exists():  # the ranks ended by themselves, at the last step or after a signal
            say("counting baselines on the same tokens, and writing a sample")
            _complete_summary(job, prepared, out)
    return out


def check_model(job: Job) -> tuple[PretrainedConfig, Anatomy]:
    """Build the model without memory and check that it can do what the job asks of it.

    Raises:
        ModelError: it cannot be built or read.
        JobError: its sequences are too short, or it cannot keep packed documents apart.
    """
    config = read_config(job.model)
    model = build_on_meta(config, torch.float32)
    anatomy = read_anatomy(model)
    limit = anatomy.max_positions
    if limit is not None and job.data.seq_len > limit:
        raise JobError(
            f"data.seq_len = {job.data.seq_len} is longer than the model's {limit} positions",
            where=f"model_type {anatomy.family}",
            rule="a row fits into max_position_embeddings of the model's configuration",
            fix=f"set data.seq_len to {limit} or less",
        )
    if job.data.packing and job.data.source != "tokens" and not can_separate_documents(model, anatomy):
        raise JobError(
            f"{anatomy.family} cannot keep packed documents apart",
            where="data.packing = true",
            rule="attention stays inside a document only where positions restart and nothing is carried along the row",
            fix="set data.packing = false: one piece of one document a row",
        )
    train = job.train
    micro_batches = count_micro_batches(train.global_batch, train.micro_batch, job.plan.parallel.data_ranks)
    check_axes(model, anatomy, job.plan, job.data.seq_len, micro_batches)
    return config, anatomy


def check_tokens(job: Job, prepared: Prepared, config: PretrainedConfig) -> None:
    """Check that the model has an embedding for every token.

    Raises:
        JobError: the tokenizer knows more tokens than the model.
    """
    entries = config.get_text_config().vocab_size
    if prepared.vocab_size > entries:
        raise JobError(
            f"the tokens need a vocabulary of {prepared.vocab_size}, the model has {entries}",
            where=f"tokenizer {prepared.tokenizer or job.data.path}",
            rule="every token has an entry in the model's embedding",
            fix=f"set model.config.vocab_size to {prepared.vocab_size} or more, or data.vocab_size to {entries} or less",
        )


def _new_folder(out: Path, say: Callable[[str], None]) -> Path:
    """An empty run folder; an older run there is moved aside, never overwritten."""
    if (out / "job.toml").exists():
        number = 1
        while (aside := out.with_name(f"{out.name}.{number}")).exists():
            number += 1
        out.rename(aside)
        say(f"the earlier run in {out} is now {aside}")
    out.mkdir(parents=True, exist_ok=True)
    return out


def _complete_summary(job: Job, prepared: Prepared, out: Path) -> None:
    """Add to run.json what needs no ranks: baselines, a sample of text, the environment."""
    summary = json.loads((out / "run.json").read_text(encoding="utf-8"))
    summary["baselines"] = _baselines(job, prepared)
    summary["sample"] = sample(out / "export", prepared) if prepared.tokenizer else None
    libraries = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    summary["environment"] = {
        "weft": version("weft-train"),
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
    }
    (out / "run.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")


def _baselines(job: Job, prepared: Prepared) -> dict[str, float] | None:
    """Held-out cross entropy of counting models on the same tokens; what a model must beat to have learnt context."""
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


def sample(folder: Path, prepared: Prepared, *, prompt_tokens: int = 24, new_tokens: int = 96) -> str:
    """Text the exported model writes after the beginning of a held-out row, loaded and run by plain Transformers."""
    spans = prepared.held_out or prepared.train
    row = Rows(spans, seq_len=prompt_tokens, packing=True, shuffle=False, seed=0)[0].tokens[:prompt_tokens]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    ids = row.to(torch.int64)[None]
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or ids.shape[1] + new_tokens
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_length=min(limit, ids.shape[1] + new_tokens),
        do_sample=True,
        temperature=0.7,
        top_k=40,
    )
    return tokenizer.decode(written[0])
