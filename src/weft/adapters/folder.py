"""Folders of adapters, as stock PEFT writes and loads them: adapter_config.json and adapter_model.safetensors."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from weft.adapters.base import check_same_digest, pin_base
from weft.adapters.model import NAME, add_adapters, import_peft, peft_config, round_targets
from weft.checkpoint.convert import existing_folder, read_prepared
from weft.checkpoint.export_files import finish_folder, set_end_of_text
from weft.checkpoint.huggingface import gather_weights, save_model
from weft.checkpoint.manifest import verify_folder
from weft.checkpoint.model_config import read_config
from weft.checkpoint.plain_model import build_plain, cast
from weft.checkpoint.restore import Reader
from weft.comm.objects import broadcast_json
from weft.errors import CheckpointError, JobError, refuse_hub_id
from weft.inputs import check_new
from weft.job import Adapter, Job
from weft.launch.scratch import part_folder
from weft.precision.dtypes import DTYPES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of PEFT's names in a file; the rest is the name in the model, without the name of the adapter."""
DIGEST = "weft_base"
"""Key in the metadata of the weights file with the digest of the base model."""
MAX_CONFIG_BYTES = 2**20
SAME = ("r", "lora_alpha", "use_dora")
"""Values of adapter_config.json that the job has as well."""
UNSUPPORTED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "trainable_token_indices": None,
    "lora_bias": False,
}
"""Values of adapter_config.json that Weft's adapters have; others are refused."""


# Write


def save_adapters(model: PreTrainedModel, job: Job, folder: Path, tokenizer: Path | None) -> str:
    """Gather the adapters of a parallelized model and write a folder that stock PEFT loads. Collective; rank 0 writes.

    Args:
        model: parallelized model with adapters.
        job: job with the digest of its base model.
        folder: folder to write; an existing folder is replaced when the new one is complete.
        tokenizer: folder whose tokenizer files are copied.

    Returns:
        Error message, for example of a full disk, the same on all ranks; "" if the folder was written.
    """
    weights, problem = gather_weights(model, trained_only=True), ""
    if dist.get_rank() == 0:
        try:
            named = {name_in_file(name): weight for name, weight in weights.items()}
            write_folder(named, job, folder, tokenizer)
        except (OSError, SafetensorError, RuntimeError, ValueError) as error:  # the other ranks wait for the answer
            problem = str(error)
    return broadcast_json(problem)


def write_folder(weights: dict[str, Tensor], job: Job, folder: Path, tokenizer: Path | None) -> None:
    """Write a folder that stock PEFT loads. The folder appears complete or not at all.

    Args:
        weights: full weights of the adapters, by their names in the file.
        job: job with the digest of its base model.
        folder: folder to write; an existing folder is replaced when the new one is complete.
        tokenizer: folder whose tokenizer files are copied; None for none.
    """
    named = {name: weight.contiguous() for name, weight in weights.items()}
    config = peft_config(job.adapter)
    config.base_model_name_or_path = str(Path(job.model.path).resolve()) if job.model.path else None
    config.inference_mode = True
    with part_folder(folder) as scratch:
        part = scratch / "adapter"
        part.mkdir()
        save_file(named, part / WEIGHTS, metadata={"format": "pt", DIGEST: job.adapter.base})
        config.save_pretrained(part)
        finish_folder(part, CONFIG, tokenizer, folder)


def name_in_file(name: str) -> str:
    """Name in PEFT's file of a weight by its name in the model; a magnitude vector has no ".weight"."""
    name = PREFIX + name.replace(f".{NAME}.", ".")
    return name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name


# Read


def check_folder(job: Job) -> None:
    """Refuse to start from a folder whose adapter differs from that of the job, or belongs to another base model.

    Args:
        job: job with the digest of its base model.

    Raises:
        CheckpointError: the folder has no adapter, or the files are damaged.
        JobError: the adapters differ, or the base models do.
        ModelError: the path reads as the id of an adapter on the Hub.
    """
    if job.adapter.kind == "none" or job.adapter.path is None:
        return
    refuse_hub_id(job.adapter.path, "adapter.path")
    folder = Path(job.adapter.path)
    config, expected = _read_config(folder), peft_config(job.adapter).to_dict()
    for key, supported in UNSUPPORTED.items():
        if config.get(key, supported) not in (supported, None, {}):
            raise JobError(
                f"{key} = {config[key]!r} in {CONFIG}",
                where=str(folder),
                rule=f"Weft trains adapters with {key} = {supported!r}",
                fix="train this adapter with PEFT under `weft run`, or start a new one: remove adapter.path",
            )
    for key in SAME:
        if config.get(key, expected[key]) != expected[key]:
            name = {"lora_alpha": "alpha", "use_dora": "kind"}.get(key, key)
            value = getattr(job.adapter, name)
            raise JobError(
                f"adapter.{name} = {value!r}, and the adapter in {folder} has {key} = {config.get(key)!r}",
                where=f"adapter.{name}",
                rule="an adapter to start from has the kind, rank and alpha of the job",
                fix=f"set adapter.{name} to that of the folder, or remove adapter.path",
            )
    with _open(folder) as file:
        check_same_digest((file.metadata() or {}).get(DIGEST, ""), job, folder)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        with (folder / CONFIG).open("rb") as file:
            table = json.loads(file.read(MAX_CONFIG_BYTES))
        if isinstance(table, dict):
            return table
        problem = "it holds no JSON object"
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error)
    raise _unreadable(folder, f"{CONFIG} cannot be read: {problem}")


def _open(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS, "pt")
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder, f"{WEIGHTS} cannot be read: {error}") from None


def _unreadable(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        problem,
        where=str(folder),
        rule=f"the folder of an adapter has {CONFIG} and {WEIGHTS}, as PEFT's save_pretrained writes them",
        fix="name such a folder",
    )


def start_reads_weights(adapter: Adapter) -> bool:
    """True if `start_adapters` computes from the weights of the model: norms of rows."""
    return adapter.kind == "dora"


def start_adapters(plain: Any, adapter: Adapter, seed: int, *, in_4_bits: bool = False) -> None:
    """Add the adapters of a job to a full model, in place: those of `adapter.path`, or new ones.

    Args:
        plain: unmodified model with its weights.
        adapter: table of the job, accepted by `check_folder`.
        seed: seed of new adapters, see `add_adapters`.
        in_4_bits: True if the frozen weights will be packed: new norms of DoRA are those of the rounded weights.

    Raises:
        CheckpointError: the folder lacks a weight of an adapter, has it in another shape, or has others.
    """
    if in_4_bits and adapter.kind == "dora" and adapter.path is None:
        round_targets(plain, adapter)
    add_adapters(plain, adapter, seed)
    if adapter.path is None or adapter.kind == "none":
        return
    folder = Path(adapter.path)
    own = {name_in_file(name): p for name, p in plain.named_parameters() if p.requires_grad}
    with _open(folder) as file, torch.no_grad():
        saved = set(file.keys())
        for name in sorted(own.keys() | saved):
            shape = tuple(file.get_slice(name).get_shape()) if name in saved else None
            if name not in own or shape != tuple(own[name].shape):
                raise CheckpointError(
                    f"{name} is missing" if shape is None else f"{name} has shape {shape}",
                    where=str(folder),
                    rule=f"in the model its shape is {tuple(own[name].shape)}"
                    if name in own
                    else "the job has no adapter there",
                    fix="set adapter.targets and adapter.r to those of the folder, or remove adapter.path",
                )
            own[name].copy_(file.get_tensor(name))


# Export


def export_adapters(
    run: Path, target: Path, *, merge: bool, dtype: str, checkpoint: Path | None = None, key: bytes | None = None
) -> Path:
    """Write the adapters of a run as a folder of PEFT, or the model with the adapters merged into its weights.

    Args:
        run: run folder of a job with adapters.
        target: folder to write; it must not exist.
        merge: True to merge, with PEFT's `merge_and_unload` in float32.
        dtype: dtype of the written weights, a name of `weft.precision.dtypes`.
        checkpoint: folder of a checkpoint of the run; None: the end of the run.
        key: key that signed the manifest of the checkpoint.

    Raises:
        CheckpointError: there are no adapters, a file is damaged, or the target exists.
        JobError: the weights of the base model have changed since the run.
    """
    check_new(target)
    job = Job.load(run / "job.toml")
    tokenizer, end_of_text = read_prepared(run)
    if checkpoint is None:
        with _open(run / "export") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    else:
        with Reader(checkpoint, verify_folder(checkpoint, key)) as reader:
            names = [name for name in reader.manifest.tensors if name.startswith("weights/")]
            weights = {name_in_file(name.removeprefix("weights/")): reader.read(name) for name in names}
    written = {name: weight if merge else cast(name, weight, DTYPES[dtype]) for name, weight in weights.items()}
    if not merge:
        write_folder(written, job, target, existing_folder(tokenizer))
    else:
        with part_folder(target) as part:
            write_folder(written, job, part / "adapter", None)
            merged = merge_folder(part / "adapter", job)
        if job.model.path is None and end_of_text is not None:  # as training does when it saves a new model
            set_end_of_text(merged, end_of_text)
        source = Path(job.model.path) if job.model.path else None
        state = dict(merged.state_dict())
        save_model(merged, state, target, DTYPES[dtype], source, existing_folder(tokenizer))
    return target


def merge_folder(folder: Path, job: Job) -> PreTrainedModel:
    """Model of a job in float32, with the adapter of a folder merged into its weights by PEFT.

    Args:
        folder: folder of the adapter.
        job: job with the digest of its base model.

    Raises:
        CheckpointError: the weights of the model cannot be read.
        JobError: they have changed since the job was run.
    """
    base: Any = load_with_adapter(folder, pin_base(job))
    return base.merge_and_unload()


def load_with_adapter(folder: Path, job: Job) -> Any:
    """Model of a job in float32 as `peft.PeftModel`, with the adapter of a folder.

    Raises:
        CheckpointError: the weights of the model cannot be read.
    """
    plain = build_plain(job.model, read_config(job.model), torch.float32)
    return import_peft().PeftModel.from_pretrained(plain, str(folder), torch_device="cpu")
