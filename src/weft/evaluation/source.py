"""Model of an evaluation: a run folder with its export and checkpoints, or a Hugging Face folder."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from weft.adapters.folder import export_adapters
from weft.checkpoint.convert import to_huggingface
from weft.checkpoint.folders import folder_of, list_checkpoints, step_of
from weft.checkpoint.key import read_key
from weft.checkpoint.weight_files import check_described
from weft.errors import CheckpointError, ModelError
from weft.inputs import check_source
from weft.job import Job, has_trainer


@contextmanager
def model_folder(source: Path, step: int | None) -> Iterator[tuple[Path, int | None]]:
    """Context with the Hugging Face folder of a model, and the step of its checkpoint.

    A checkpoint is converted, and adapters are merged, into a temporary folder beside the run, which is removed at the end.

    Args:
        source: run folder, or Hugging Face folder.
        step: step of a checkpoint of the run; None: the newest weights, of the export or of a checkpoint.

    Raises:
        CheckpointError: the folder is neither, or has no such checkpoint, or its weights are quantized without scales.
        ModelError: its config.json cannot be read.
    """
    check_source(source, step)
    if not (source / "job.toml").is_file():
        check_described(source)
        yield source, None
        return
    if has_trainer(source / "job.toml"):
        yield _of_trainer(source, step), None
        return
    job = Job.load(source / "job.toml")
    has_adapters, checkpoints = job.adapter.kind != "none", Path(job.checkpoint.folder or source)
    newest = next(map(step_of, list_checkpoints(checkpoints)), None)
    exported = _exported_step(source, "adapter_config.json" if has_adapters else "config.json")
    if step is None and exported is not None and (newest is None or newest <= exported):
        found, checkpoint = exported, None
    else:
        found = _known_step(checkpoints, newest if step is None else step, step)
        checkpoint = folder_of(checkpoints, found)
    if checkpoint is None and not has_adapters:
        yield source / "export", found
        return
    key = read_key(job.checkpoint.key_file)
    with tempfile.TemporaryDirectory(dir=source, prefix=".eval-") as scratch:
        target = Path(scratch) / "model"
        if has_adapters:
            export_adapters(source, target, merge=True, dtype="fp32", checkpoint=checkpoint, key=key)
        elif checkpoint is not None:
            to_huggingface(checkpoint, target, run=source, key=key)
        yield target, found


def _known_step(checkpoints: Path, found: int | None, wanted: int | None) -> int:
    """Step of a checkpoint that there is.

    Args:
        checkpoints: folder with the checkpoints.
        found: step to read; None: there is none.
        wanted: step that the user named, if any.
    """
    if found is None or not folder_of(checkpoints, found).is_dir():
        steps = ", ".join(str(step_of(path)) for path in list_checkpoints(checkpoints)) or "none"
        raise CheckpointError(
            f"there is no checkpoint of step {wanted}" if wanted is not None else "the run has no weights yet",
            where=str(checkpoints),
            rule=f"a run has the checkpoints that it kept (steps: {steps}), and an export at its end",
            fix="choose one of these steps, or leave --step out for the newest weights",
        )
    return found


def _of_trainer(run: Path, step: int | None) -> Path:
    """Folder of the model of a run with a trainer of TRL."""
    if step is not None or not (run / "export" / "config.json").is_file():
        merge = (run / "export" / "adapter_config.json").is_file() and step is None
        raise CheckpointError(
            f"{run} has adapters at its end"
            if merge
            else f"{run} has no model" + (" of that step" if step else " yet"),
            where=str(run) if step is None else f"--step {step}",
            rule="of a run with a trainer, the full model that it saved at its end is read",
            fix=f"merge the adapters with `weft export {run} TO --merge`, and name TO"
            if merge
            else "leave --step out after the end of the run, or name the folder of a model",
        )
    return run / "export"


def _exported_step(run: Path, config: str) -> int | None:
    """Step of the export of a run, from its run.json; None without an export, which has the file `config`."""
    if not (run / "export" / config).is_file():
        return None
    try:
        return int(json.loads((run / "run.json").read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_tokenizer(folder: Path) -> Any:
    """Tokenizer of a folder.

    Raises:
        ModelError: the folder has none, or it has neither a beginning-of-text nor an end-of-text token.
    """
    problem = ""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            problem = "the tokenizer has neither a beginning-of-text nor an end-of-text token"
    except (OSError, ValueError, KeyError) as error:
        problem = f"there is no tokenizer: {str(error).strip().splitlines()[0]}"
    if problem:
        raise ModelError(
            problem,
            where=str(folder),
            rule="tasks are texts: their evaluation needs a tokenizer, and a token before the first one of a text",
            fix="copy the tokenizer of the model into the folder; a run on token ids has no tokenizer to evaluate with",
        )
    return tokenizer


def load_model(folder: Path, device: torch.device) -> PreTrainedModel:
    """Full model of a Hugging Face folder, in the dtype of its configuration, for evaluation.

    Raises:
        ModelError: it cannot be loaded as a causal language model, or weights are missing.
    """
    problem = ""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True
        )
        model, report = loaded
        if missing := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
            problem = f"{len(missing)} weights are missing or have the wrong shape, the first is {missing[0]}"
    except (OSError, RuntimeError, SafetensorError, ValueError, KeyError) as error:
        problem = f"the model cannot be loaded: {str(error).strip().splitlines()[0]}"
    if problem:
        raise ModelError(
            problem,
            where=str(folder),
            rule="the folder is one that AutoModelForCausalLM.from_pretrained loads completely",
            fix="name the folder of a causal language model",
        )
    return model.to(device).eval()
