"""Base model of adapters: the digest of its weights, which checkpoints and folders of adapters carry."""

import json
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import safe_open

from weft.checkpoint.manifest import Manifest
from weft.checkpoint.model_config import read_config
from weft.checkpoint.weight_files import stored_tensors
from weft.errors import JobError
from weft.job import Job, Model


def pin_base(job: Job) -> Job:
    """Job with the digest of its base model in `adapter.base`; the same job if it has no adapter.

    Raises:
        CheckpointError: the weights of the base model cannot be read.
        JobError: `adapter.base` is the digest of another model.
    """
    if job.adapter.kind == "none":
        return job
    digest = base_digest(job.model)
    if job.adapter.base not in ("", digest):
        raise _other_base(job.adapter.base, digest, str(job.model.path or "model.config"))
    return job.model_copy(update={"adapter": job.adapter.model_copy(update={"base": digest})})


def check_same_base(job: Job, manifest: Manifest, folder: Path | str) -> None:
    """Refuse a checkpoint of adapters for another base model, and one of adapters in a job without or the reverse.

    Args:
        job: job that resumes, with the digest of its base model.
        folder: folder of the checkpoint.

    Raises:
        JobError: the base models differ.
    """
    before: dict[str, Any] = manifest.job.get("adapter") or {}
    if (before.get("kind", "none") == "none") != (job.adapter.kind == "none"):
        raise JobError(
            f"adapter.kind = {job.adapter.kind!r}, and the checkpoint is of adapter.kind = {before.get('kind', 'none')!r}",
            where=str(folder),
            rule="a checkpoint has either all weights of a model, or its adapters alone",
            fix="restore the earlier value; or merge an adapter with `weft export RUN FOLDER --merge`, and train from FOLDER",
        )
    if before.get("base", "") != job.adapter.base:
        raise _other_base(before["base"], job.adapter.base, str(folder))


def base_digest(source: Model) -> str:
    """Digest of the weights of a model: of the values in its folder in float32, or of its configuration and seed.

    Args:
        source: table of the job.

    Raises:
        CheckpointError: the weights are missing or damaged.
    """
    digest = blake3()
    if source.path is None:
        config = read_config(source).to_dict()
        digest.update(json.dumps([config, source.init_seed], sort_keys=True, default=str).encode())
        return digest.hexdigest()[:32]
    named = getattr(read_config(source, in_4_bits=True), "transformers_weights", None)
    stored = stored_tensors(Path(source.path), named, in_4_bits=True)
    for name in sorted(stored):
        with safe_open(stored[name].file, "pt") as opened:
            tensor = opened.get_tensor(name)
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.float().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _other_base(expected: str, found: str, where: str) -> JobError:
    return JobError(
        f"the adapter belongs to a model with digest {expected[:12]}, and this model has {found[:12]}",
        where=where,
        rule="an adapter is a difference to the weights of one base model: beside other weights it has no meaning",
        fix="restore model.path and its files, or start a new adapter for this model",
    )


def check_same_digest(found: str, job: Job, folder: Path) -> None:
    """Refuse an adapter folder for another base model; a folder of another library has no digest.

    Args:
        found: digest that the folder has, or "".
        job: job with the digest of its base model.
        folder: folder of the adapter.

    Raises:
        JobError: the base models differ.
    """
    if found and found != job.adapter.base:
        raise _other_base(found, job.adapter.base, str(folder))
