"""Batches of a script whose plan lets ranks of tp, cp and pp share rows, and results that are gathered from them."""

import hashlib
from typing import Any

from accelerate.data_loader import SkipBatchSampler, prepare_data_loader
from torch import Tensor

from weft.comm.objects import all_gather_json
from weft.data import IGNORED
from weft.errors import ModelError, PlanError
from weft.plan import Plan


def load_by_data_rank(accelerator: Any, loader: Any, device_placement: bool | None) -> Any:
    """Data loader with the batches of this data rank, which each rank reads itself.

    Args:
        accelerator: `WeftAccelerator` with the settings of the script.
        loader: data loader of the script.
        device_placement: True: move batches to the device; None: as the accelerator does.

    Raises:
        PlanError: rank 0 would read the batches of all ranks.
    """
    if accelerator.dispatch_batches:
        raise PlanError(
            "dispatch_batches = True with ranks that share rows",
            where="plan.parallel",
            rule="each rank reads its own batches under tp, cp and pp",
            fix="set dispatch_batches=False in DataLoaderConfiguration, or accelerator_config of TrainingArguments",
        )
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.data_ranks,
        process_index=accelerator.data_rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if device_placement is None else device_placement,
        rng_types=accelerator.rng_types.copy(),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )


def count_last_rows(loader: Any) -> None:
    """Tell a loader of a resumed epoch how many rows its last batches have: accelerate does so for whole epochs alone.

    Args:
        loader: loader in use; None without one.
    """
    skipping = getattr(loader, "batch_sampler", None)
    if isinstance(skipping, SkipBatchSampler) and loader.remainder == -1:
        inner = skipping.batch_sampler
        ranks = 1 if getattr(inner, "split_batches", False) else getattr(inner, "num_processes", 1)
        loader.remainder = len(loader.dataset) % (inner.batch_size * ranks)


def check_rows(inputs: Any, data_rank: int, plan: Plan) -> None:
    """Compare the rows of a forward with those of the ranks that share them, and refuse targets at padding. Collective.

    Args:
        inputs: batch of the model.
        data_rank: data rank of this rank.

    Raises:
        ModelError: ranks of one data rank have different rows; or a pad token is a target under cp or pp. The same on every
            rank.
    """
    rows, labels, mask = (inputs.get(name) for name in ("input_ids", "labels", "attention_mask"))
    found = {"data_rank": data_rank, "rows": "", "at_padding": 0}
    if isinstance(rows, Tensor):
        found["rows"] = hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest()
    if isinstance(labels, Tensor) and isinstance(mask, Tensor) and mask.shape == labels.shape:
        found["at_padding"] = int(((labels != IGNORED) & (mask == 0)).sum())
    everywhere = all_gather_json(found)
    for other in everywhere:
        first = next(one for one in everywhere if one["data_rank"] == other["data_rank"])
        if other["rows"] != first["rows"]:
            raise ModelError(
                f"the ranks of data rank {first['data_rank']} have different rows",
                where="forward",
                rule="ranks of tp, cp and pp run the same rows",
                fix="read rows by a data loader that accelerator.prepare returns, not by a sampler of your own over all ranks",
            )
    at_padding = max(one["at_padding"] for one in everywhere)
    if at_padding and plan.parallel.cp * plan.parallel.pp > 1:
        raise ModelError(
            f"{at_padding} targets at padding",
            where="labels",
            rule="under cp and pp, tokens that attention_mask excludes are no targets",
            fix=f"set labels to {IGNORED} where attention_mask is 0, as DataCollatorForLanguageModeling does",
        )


def has_tensors_only(data: Any) -> bool:
    """True for a tensor, or nested lists, tuples and dictionaries of tensors."""
    if isinstance(data, dict):
        return all(map(has_tensors_only, data.values()))
    if isinstance(data, list | tuple):
        return bool(data) and all(map(has_tensors_only, data))
    return isinstance(data, Tensor)
