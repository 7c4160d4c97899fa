"""`--plan auto`: the planner chooses the plan for a script when its model and its settings are known, on the ranks."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from weft.backends.hierarchical import host_id
from weft.comm.objects import all_gather_json, broadcast_json, run_together
from weft.integrations.models import core_of, plan_for_script, refuse_pipeline
from weft.integrations.optimizer import refuse_not_elementwise
from weft.job import Job, read_plan
from weft.parallel.runtime import find_runtime
from weft.plan import BYTES, Plan, ResolvedPlan
from weft.planner.costmodel.hardware import ClusterSpec
from weft.planner.costmodel.local_device import local_device
from weft.planner.costmodel.peak_memory import LayerActivations
from weft.planner.dryrun.count_activations import count_activations
from weft.planner.search.for_script import ScriptModel, ScriptPlan, plan_script

AUTO = "auto"
LOG_FOLDER = Path("weft-logs")
SIMILAR = "A100-80"  # device whose rates are taken for one that the planner does not know
ROWS_READ = 64  # first rows of a data set, whose longest counts


@dataclass(frozen=True)
class AutoPlan:
    """Plan that is chosen when the model of a script is known."""

    folder: Path = LOG_FOLDER
    """Folder for plan.toml."""


@dataclass(frozen=True)
class Rows:
    """Rows of a script: those of a micro-batch of a data rank, and their length."""

    micro_batch: int
    accumulation: int
    tokens: int
    source: str
    """Source of the length, as text."""
    per_row: int = 1
    """Sequences of a row, such as a chosen and a rejected answer."""


def plan_or_auto(plan: Plan | AutoPlan | str | Path | None) -> Plan | AutoPlan:
    """Plan from a TOML file; "auto" is a plan that is chosen later; None is ZeRO stage 3 over all ranks, 0 for one.

    Raises:
        JobError: the file cannot be read.
    """
    if plan == AUTO:
        return AutoPlan()
    return read_plan(plan) if isinstance(plan, str | Path) else (plan or Plan())


def choose_plan(
    auto: AutoPlan,
    model: Any,
    rows: Rows,
    requested_precision: str,
    check: Callable[[ResolvedPlan], None],
    *,
    references: int = 0,
    generates: bool = False,
    recomputes: bool = False,
    one_data_rank_each: bool = False,
) -> Plan:
    """Choose the plan of a script, print it on rank 0, and write it to plan.toml. Collective.

    Rank 0 plans, and all ranks get its plan. A model that is parallelized already keeps its plan.

    Args:
        auto: folder for the plan.
        model: model that the script trains, with its weights.
        rows: rows of a micro-batch.
        requested_precision: "no", "bf16" or "fp16", as the script asks for.
        check: raises a WeftError for a resolved plan that the script cannot run under.
        references: parameters of further models of the script.
        generates: True if the script generates rows, with a full copy of the model.
        recomputes: True if the script itself recomputes blocks.
        one_data_rank_each: True if the script has read the number of data ranks already.

    Raises:
        PlanError: no plan fits; the same on every rank.
    """
    core = core_of(model)
    if (known := find_runtime(core)) is not None:
        return known.plan  # of an earlier trainer
    precision = plan_for_script(Plan(), requested_precision, core).precision
    cluster = _cluster()
    numbers = [(parameter.numel(), parameter.requires_grad) for parameter in core.parameters()]
    total = sum(number for number, _ in numbers)
    resolved = precision.resolve(cluster.device.native_bf16)
    script = ScriptModel(
        core,
        total,
        sum(number for number, is_trained in numbers if is_trained),
        resolved,
        rows.micro_batch * rows.per_row,
        rows.accumulation,
        rows.tokens,
        check,
        references=references,
        reserved=BYTES[resolved.param_dtype] * total if generates else 0,
        recomputes=recomputes,
        one_data_rank_each=one_data_rank_each,
    )

    def attempt() -> ScriptPlan | None:
        if dist.get_rank():
            return None
        found = plan_script(script, cluster, _count)
        _announce(found, rows, auto.folder / "plan.toml")
        return found

    found = run_together(attempt)
    return Plan.model_validate_json(broadcast_json(found.plan.model_dump_json() if found else None))


def plan_for_loop(auto: AutoPlan, prepared: Sequence[Any], accumulation: int, requested_precision: str) -> Plan:
    """Choose the plan of a loop with an Accelerator. Collective.

    The loop has read the number of processes already, so that each of them is one data rank.

    Args:
        auto: as for `choose_plan`.
        prepared: arguments of `accelerator.prepare`, with a model.
        accumulation: micro-batches of a step.
        requested_precision: as for `choose_plan`.

    Raises:
        PlanError: no plan fits; the same on every rank.
    """
    model, *others = (one for one in prepared if isinstance(one, nn.Module))
    loader = next((one for one in prepared if isinstance(one, DataLoader)), None)
    optimizers = [type(one).__name__ for one in prepared if isinstance(one, torch.optim.Optimizer)]
    tokens, source = row_length(None, getattr(loader, "dataset", None), None, getattr(model, "config", None))
    rows = Rows(getattr(loader, "batch_size", None) or 1, accumulation, tokens, source)

    def check(plan: ResolvedPlan) -> None:
        refuse_pipeline(plan)
        for name in optimizers:
            refuse_not_elementwise(name, plan.parallel.zero > 0 or plan.parallel.tp > 1)

    references = sum(parameter.numel() for other in others for parameter in other.parameters())
    recomputes = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    return choose_plan(
        auto,
        model,
        rows,
        requested_precision,
        check,
        references=references,
        recomputes=recomputes,
        one_data_rank_each=True,
    )


def _count(job: Job, device_type: str, with_tp: bool) -> LayerActivations | None:
    """Count activations by dry runs, which take some seconds."""
    print("weft: a few layers are dry-run, because memory is scarce", flush=True)
    return count_activations(job, device_type, with_tp)


def _cluster() -> ClusterSpec:
    """Devices of all ranks; a device has the least memory of all. Collective."""
    hosts = Counter("/".join(names) for names in all_gather_json(host_id()))
    per_host = next(iter(hosts.values())) if len(set(hosts.values())) == 1 else 1
    device = local_device(max(hosts.values()), SIMILAR)
    found = all_gather_json([device.memory, device.native_bf16])
    device = replace(
        device,
        memory=min(memory for memory, _ in found),
        native_bf16=all(native for _, native in found),
        per_host=per_host,
    )
    return ClusterSpec(device, dist.get_world_size() // per_host, per_host)


def _announce(found: ScriptPlan, rows: Rows, path: Path) -> None:
    """Print a plan in one line, and write it."""
    here, own = Path.cwd(), path.absolute()
    shown = own.relative_to(here) if own.is_relative_to(here) else own
    rows_of_rank = rows.micro_batch * rows.accumulation
    batch, usual = rows_of_rank * found.data_ranks, rows_of_rank * dist.get_world_size()
    batches = f"global batch {batch} rows" if batch == usual else f"global batch {batch} rows instead of {usual}"
    each = f", {rows.per_row} sequences per row" if rows.per_row > 1 else ""
    line = f"{found.layout}; {found.reason}; rows of {rows.tokens} tokens ({rows.source}){each}; {batches}"
    tables = found.plan.model_dump(exclude_none=True, exclude_defaults=True)
    tables["parallel"] = found.plan.parallel.model_dump()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {line}\n{tomli_w.dumps(tables)}", encoding="utf-8")
    print(f"weft: plan auto: {line}; written to {shown}", flush=True)


def row_length(arguments: Any, dataset: Any, tokenizer: Any, config: Any) -> tuple[int, str]:
    """Tokens of a row of a script, and where the number comes from.

    Args:
        arguments: TrainingArguments; of TRL they may have a limit. None: no arguments.
        dataset: rows of training; only a data set that can be indexed is read.
        tokenizer: tokenizer of the script, or None.
        config: configuration of the model, or None.
    """
    if limit := getattr(arguments, "max_length", None):
        return int(limit), "max_length"
    if limit := getattr(arguments, "max_completion_length", None):
        return 2 * int(limit), "max_completion_length, and as much for the prompt"
    if longest := _longest_row(dataset):
        return longest, f"longest of the first {min(ROWS_READ, len(dataset))} rows"
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    limit = int(getattr(tokenizer, "model_max_length", 0) or 0)
    if limit and (limit < positions or (not positions and limit < 10**9)):  # without a limit it is 1e30
        return limit, "model_max_length of the tokenizer"
    return (positions, "max_position_embeddings of the model") if positions else (2048, "a guess")


def _longest_row(dataset: Any) -> int:
    """Tokens of the longest of the first rows; 0 if the rows have no input_ids yet or cannot be indexed."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return 0
    longest = 0
    for index in range(min(ROWS_READ, len(dataset))):
        row = dataset[index]
        if not (hasattr(row, "get") and "input_ids" in row):
            return 0
        longest = max(longest, len(row["input_ids"]))
    return longest
