"""Combinations of settings that are refused: rows with a name, a reason, a fix and the keys that they concern.

A single table for the runtime, the planner and the docs, so that all three refuse the same plans.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

from weft.plan.tables import BYTES, JOINT_SCHEDULES, OUTSIDE_OF_BLOCKS, QUANTIZED_PAIRS, Plan, Table

Value = str | int | float | bool | tuple[()]


@dataclass(frozen=True)
class Rule:
    """A combination of settings that is refused; keys are without "plan."."""

    name: str
    keys: tuple[str, ...]
    """Keys of the combination."""
    broken: Callable[[Plan], bool]
    """Function of a plan whose param_dtype is not "auto"."""
    reason: str
    fix: str
    candidates: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    """Candidate values for a fix, by key; the fix names only values that break no other rule."""
    open_keys: tuple[str, ...] = ()
    """Further fixes: keys to set, with what is asked of their values."""


@dataclass(frozen=True)
class Condition:
    """A condition on one setting; see `condition`."""

    key: str
    holds: Callable[[Plan], bool]
    text: str
    """Name of the key, with its values if they are given."""
    open_key: str = ""
    """Key to set, with what is asked of its value, if the condition names no value."""
    met_by: tuple[Value, ...] = ()
    """Values that meet the condition."""
    undone_by: tuple[Value, ...] = ()
    """Values that do not meet it."""


def condition(text: str) -> Condition:
    """Condition from "key", which any value but the default meets, "key = value | value", "key != value | value" or "key > n".

    Raises:
        KeyError: a plan has no such key.
    """
    key, operator, listed = re.fullmatch(r"([\w.]+)(?: (=|!=|>) (.+))?", text).groups()  # type: ignore[union-attr]
    values = tuple(map(_parse, (listed or "").split(" | ")))
    default, other = _default_and_choices(key)
    name = key.rpartition(".")[2]
    match operator:
        case "=":
            words = f"{name} = {' or '.join(map(str, values))}"
            return Condition(key, lambda plan: _value(plan, key) in values, words, met_by=values, undone_by=(default,))
        case "!=":
            return Condition(key, lambda plan: _value(plan, key) not in values, name, undone_by=values)
        case ">":
            least = values[0]
            above = f"plan.{key} above {least}"
            return Condition(key, lambda plan: _value(plan, key) > least, name, above, undone_by=(default,))
    open_key = "" if other else f"plan.{key}"
    return Condition(key, lambda plan: _value(plan, key) != default, name, open_key, met_by=other, undone_by=(default,))


def needs(first: str, second: str, why: str = "") -> Rule:
    """Rule: a condition that is refused unless another one holds; default reason: it has no effect."""
    one, two = condition(first), condition(second)
    why = why or f"{one.text} has no effect without {two.text}"
    candidates = {two.key: two.met_by} if two.met_by else {}
    return _rule(
        f"{one.text} without {two.text}", one, two, lambda plan: not two.holds(plan), why, candidates, two.open_key
    )


def excludes(first: str, second: str, why: str) -> Rule:
    """Rule: two conditions that are refused together."""
    one, two = condition(first), condition(second)
    return _rule(f"{one.text} with {two.text}", one, two, two.holds, why, {two.key: two.undone_by})


def _rule(
    name: str,
    one: Condition,
    two: Condition,
    also: Callable[[Plan], bool],
    why: str,
    candidates: Any,
    open_key: str = "",
) -> Rule:
    open_keys = (open_key,) if open_key else ()
    candidates = candidates | {one.key: one.undone_by}
    fix = _sentence(open_keys, candidates)
    return Rule(name, (one.key, two.key), lambda plan: one.holds(plan) and also(plan), why, fix, candidates, open_keys)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _default_and_choices(key: str) -> tuple[Any, tuple[str, ...]]:
    """Default of a key, and the other words that it takes; only the first if it takes also other values than words."""
    table, name = key.split(".")
    found: Any = Plan.model_fields[table].annotation
    info = found.model_fields[name]
    kinds = get_args(info.annotation) if get_origin(info.annotation) is Union else (info.annotation,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    others = tuple(word for word in words if isinstance(word, str) and word != info.default)
    return info.default, others[: None if len(kinds) == 1 else 1]


def _value(plan: Plan, key: str) -> Any:
    table, name = key.split(".")
    return getattr(getattr(plan, table), name)


def describe(rule: Rule, plan: Plan) -> str:
    """Name of a rule with the values of its keys."""
    values = ((key, _value(plan, key)) for key in rule.keys)
    shown = [f"plan.{key} = {json.dumps(value)}" for key, value in values if not isinstance(value, Table)]
    return f"{rule.name}: {', '.join(shown)}"


def _sentence(open_keys: tuple[str, ...], candidates: Mapping[str, tuple[Value, ...]]) -> str:
    values = [f"plan.{key} to {' or '.join(map(json.dumps, values))}" for key, values in candidates.items()]
    return f"set {', or '.join([*open_keys, *values])}"


def fix_of(rule: Rule, plan: Plan) -> str:
    """Fix of a broken rule: its candidates that break no further rule, and after which no broken rule concerns the same key.

    If every candidate breaks a further rule, the fix names the candidates after which another key must be set too.
    """
    before = {other.name for other in broken_rules(plan)}
    for allowed in (before, {other.name for other in RULES}):
        found = {}
        for key, values in rule.candidates.items():
            valid = []
            for value in values:
                still_broken = broken_rules(_changed(plan, key, value))
                if all(other.name in allowed and key not in other.candidates for other in still_broken):
                    valid.append(value)
            if valid:
                found[key] = tuple(valid)
        if found:
            return _sentence(rule.open_keys, found)
    return rule.fix


def broken_rules(plan: Plan) -> list[Rule]:
    """Rules that a plan breaks; param_dtype = "auto" counts as without native bf16, which breaks no fewer rules."""
    concrete = plan.with_dtypes(native_bf16=False)
    return [rule for rule in RULES if rule.broken(concrete)]


def _changed(plan: Plan, key: str, value: Value) -> Plan:
    """Copy of a plan with another value of a key."""
    table, _, name = key.partition(".")
    return plan.model_copy(update={table: getattr(plan, table).model_copy(update={name: value})})


BY_BLOCKS_OR_COST = "stages are cut either by given numbers of blocks or by cost"
SCALE = "fp16 gradients below 6e-8 become zero unless the loss is scaled up before backward"
SPLIT = "the upper half of an fp32 value is a bf16 value; no other two dtypes are related like that"
FP8 = "FP8 matmuls round from, and return, bf16 or fp32"
GRIDS = "grids are computed in fp32, and backward rounds the weights again, from the dtype of forward"
WHOLE = "whole experts move between ranks, with their optimizer state, but without compression errors of earlier steps"

RULES: tuple[Rule, ...] = (
    Rule(
        "recompute of blocks together with parts of blocks",
        ("memory.recompute",),
        lambda plan: "block" in plan.memory.recompute and len(plan.memory.recompute) > 1,
        "recomputing a block already includes all its parts",
        'set plan.memory.recompute to ["block"], or to parts of a block',
    ),
    Rule(
        "recompute of mlp together with activation",
        ("memory.recompute",),
        lambda plan: {"mlp", "activation"} <= set(plan.memory.recompute),
        "recomputing mlp already includes its activation function",
        'remove "mlp" or "activation" from plan.memory.recompute',
    ),
    needs("memory.recompute_interval", "memory.recompute"),
    Rule(
        "offload of blocks together with parts of blocks",
        ("memory.offload",),
        lambda plan: "block" in plan.memory.offload and len(plan.memory.offload) > 1,
        '"block" already includes attention and mlp',
        'set plan.memory.offload to ["block"], or to parts of a block',
    ),
    Rule(
        "offload of recomputed activations",
        ("memory.offload", "memory.recompute"),
        lambda plan: bool(
            {"attention", "mlp"}
            & set(plan.memory.offload)
            & ({"attention", "mlp"} if "block" in plan.memory.recompute else set(plan.memory.recompute))
        ),
        'a recomputed part saves no activations; only offload of "block" includes the saved input of a recomputed block',
        'remove the part from plan.memory.offload or from plan.memory.recompute, or set plan.memory.offload = ["block"]',
    ),
    needs("memory.offload_to", "memory.offload"),
    needs("memory.offload_bytes", "memory.offload"),
    needs("memory.offload_prefetch", "memory.offload"),
    needs("memory.optimizer_bytes", "memory.optimizer_device"),
    excludes("memory.parameters_device", "parallel.zero = 0", "without ZeRO, all weights are in use for a whole step"),
    excludes("memory.parameters_device", "comm.compression", "errors of compression, 8 bytes a weight, are in memory"),
    Rule(
        "length of optimizer_bytes is neither 1 nor pp",
        ("memory.optimizer_bytes", "parallel.pp"),
        lambda plan: len(plan.memory.optimizer_bytes) not in (0, 1, plan.parallel.pp),
        "optimizer_bytes has one value for all ranks, or one value per pp rank",
        "give plan.memory.optimizer_bytes one value, or as many values as plan.parallel.pp",
    ),
    needs("pipeline.virtual_stages != auto | 1", "parallel.pp > 1"),
    excludes("pipeline.stage_blocks", "pipeline.block_costs", BY_BLOCKS_OR_COST),
    excludes("pipeline.stage_blocks", "pipeline.embedding_cost", BY_BLOCKS_OR_COST),
    excludes("pipeline.stage_blocks", "pipeline.head_cost", BY_BLOCKS_OR_COST),
    Rule(
        "cp_ulysses does not divide cp",
        ("parallel.cp_ulysses", "parallel.cp"),
        lambda plan: plan.parallel.cp % plan.parallel.cp_ulysses > 0,
        "the cp ranks form a grid: cp = cp_ulysses x ring",
        "set plan.parallel.cp_ulysses to a divisor of plan.parallel.cp",
    ),
    needs("comm.overlap_chunks != auto | 1", "parallel.tp > 1"),
    needs("comm.expert_overlap = joint", "parallel.ep > 1"),
    Rule(
        "joint experts in a pipeline without joint slots",
        ("comm.expert_overlap", "pipeline.schedule", "parallel.pp"),
        lambda plan: (
            plan.comm.expert_overlap == "joint"
            and plan.parallel.pp > 1
            and plan.pipeline.schedule not in JOINT_SCHEDULES
            and not plan.pipeline.schedule.endswith(".csv")
        ),
        "in a pipeline, the schedule says which forward and backward run together",
        'set plan.pipeline.schedule to "dualpipev" or "interleaved-overlap", or leave plan.comm.expert_overlap at auto',
        {"comm.expert_overlap": ("auto",), "pipeline.schedule": JOINT_SCHEDULES},
    ),
    needs("comm.expert_compression", "parallel.ep > 1"),
    needs("parallel.expert_balance", "parallel.ep > 1"),
    needs(
        "parallel.etp > 1",
        "parallel.ep > 1",
        "experts are split only where there are more ranks than experts; ep, up to the number of experts, sends fewer bytes",
    ),
    excludes("parallel.etp > 1", "parallel.expert_balance = replicate", "a replica is a complete expert on one rank"),
    needs("parallel.expert_slots", "parallel.expert_balance"),
    needs("parallel.expert_relocate_every", "parallel.ep > 1"),
    excludes("parallel.expert_relocate_every", "parallel.etp > 1", WHOLE),
    excludes("parallel.expert_relocate_every", "comm.compression", WHOLE),
    needs("parallel.expert_drop", "parallel.expert_capacity"),
    excludes(
        "parallel.rebalance",
        "parallel.pp > 1",
        "the time of a data rank is that of its slowest stage, and stages keep their blocks during a run",
    ),
    excludes(
        "parallel.rebalance",
        "parallel.ep > 1",
        "experts compute tokens of all ranks, so that the time of a data rank does not follow its rows",
    ),
    needs("precision.param_dtype = fp16", "precision.loss_scale", SCALE),
    needs("precision.backward = fp16", "precision.loss_scale", SCALE),
    needs(
        "precision.backward = fp16",
        "precision.param_dtype = bf16",
        "an fp16 forward has an fp16 backward anyway, and an fp32 forward would lose precision",
    ),
    needs("precision.weights", "precision.param_dtype = bf16", SPLIT),
    needs("precision.weights", "precision.update = fp32", SPLIT),
    needs(
        "precision.optimizer_state_dtype",
        "precision.update = fp32",
        "the state is unpacked into fp32 for each update, and packed from fp32 after it",
    ),
    Rule(
        "param_dtype wider than update",
        ("precision.param_dtype", "precision.update"),
        lambda plan: BYTES[plan.precision.param_dtype] > BYTES[plan.precision.update],
        "forward weights are cast from master weights; a wider dtype adds bytes and no information",
        "set plan.precision.update at least as wide as plan.precision.param_dtype",
        {"precision.update": ("bf16", "fp32", "fp64"), "precision.param_dtype": ("bf16", "fp32")},
    ),
    Rule(
        "zero = 0 with a reduce_dtype other than update",
        ("parallel.zero", "precision.reduce_dtype", "precision.update"),
        lambda plan: plan.parallel.zero == 0 and plan.precision.reduce_dtype != plan.precision.update,
        "replicated gradients are reduced in the buffers that accumulate them, in the dtype of update",
        "set plan.precision.reduce_dtype to plan.precision.update, or use zero = 1",
        {"precision.reduce_dtype": ("fp32", "bf16", "fp64"), "parallel.zero": (1,)},
    ),
    excludes("comm.compression", "precision.reduce_dtype = fp64", "messages and their errors are computed in fp32"),
    excludes(
        "parallel.cp > 1",
        "compute.attention = sdpa | eager | flex",
        "context parallelism splits attention by itself, document by document",
    ),
    excludes("precision.matmul", "precision.param_dtype = fp16 | fp64", FP8),
    excludes("precision.matmul", "precision.backward = fp16", FP8),
    Rule(
        "FP8 matmuls with overlapped matmuls of tp",
        ("precision.matmul", "comm.overlap_chunks", "parallel.tp"),
        lambda plan: plan.precision.matmul != "forward" and plan.parallel.tp > 1 and plan.comm.overlap_chunks != 1,
        "matmuls that overlap with their collective are computed in chunks, in the dtype of forward",
        'set plan.comm.overlap_chunks = 1, or plan.precision.matmul = "forward"',
        {"comm.overlap_chunks": (1,), "precision.matmul": ("forward",)},
    ),
    excludes(
        "precision.quantize",
        "precision.matmul",
        "FP8 matmuls round the weights once more, so that what is exported is not what was trained",
    ),
    Rule(
        "quantized weights with overlapped matmuls of tp",
        ("precision.quantize", "comm.overlap_chunks", "parallel.tp"),
        lambda plan: plan.precision.quantize != "none" and plan.parallel.tp > 1 and plan.comm.overlap_chunks != 1,
        "matmuls that overlap with their collective are computed in chunks, with the exact weights",
        'set plan.comm.overlap_chunks = 1, or plan.precision.quantize = "none"',
        {"comm.overlap_chunks": (1,), "precision.quantize": ("none",)},
    ),
    excludes(
        "precision.quantize",
        "precision.weights = split",
        "the weights that are exported are a cast, which rounds ties to even, as split_even does",
    ),
    Rule(
        "quantized inputs beside weights that are not quantized, or as the other kind of number",
        ("precision.quantize_inputs", "precision.quantize"),
        lambda plan: (
            plan.precision.quantize_inputs != "none"
            and (plan.precision.quantize, plan.precision.quantize_inputs) not in QUANTIZED_PAIRS
        ),
        "a server multiplies integers by integers, and floating-point numbers by floating-point numbers",
        'set plan.precision.quantize = plan.precision.quantize_inputs, or plan.precision.quantize_inputs = "none"',
        {"precision.quantize": ("int8", "fp8"), "precision.quantize_inputs": ("none",)},
    ),
    excludes("precision.quantize", "precision.frozen_weights", "weights that are rounded for training move"),
    excludes("precision.quantize", "precision.param_dtype = fp64", GRIDS),
    excludes("precision.quantize", "precision.backward = fp16", GRIDS),
    needs("precision.emulate_fp8", "precision.matmul"),
    Rule(
        "compiled blocks with recompute or offload of parts of blocks",
        ("compute.compile", "memory.recompute", "memory.offload"),
        lambda plan: (
            plan.compute.compile == "blocks" and bool({*plan.memory.recompute, *plan.memory.offload} - {"block"})
        ),
        "a block is compiled as a whole, and torch.compile chooses what is saved inside of it",
        'set plan.memory.recompute and plan.memory.offload to ["block"] or [], or leave plan.compute.compile = "off"',
        {"compute.compile": ("off",)},
    ),
    excludes(
        "compute.compile = blocks",
        "precision.backward = fp16",
        "gradients of an fp16 backward declare another dtype than they store, which compiled code does not take",
    ),
    Rule(
        "compiled blocks with operators of blocks by name",
        ("compute.compile", "compute.kernels"),
        lambda plan: (
            plan.compute.compile == "blocks"
            and not {"triton", "grouped"}.isdisjoint(
                plan.compute.kernels.model_dump(exclude=set(OUTSIDE_OF_BLOCKS)).values()
            )
        ),
        "compiled blocks fuse norms, activations and experts with the operators beside them",
        'leave "triton" and "grouped" out of plan.compute.kernels, or set plan.compute.compile = "off"',
        {"compute.compile": ("off",)},
    ),
    Rule(
        "an attention kernel by name that the attention of the plan does not use",
        ("compute.kernels", "compute.attention", "parallel.cp"),
        lambda plan: (
            plan.compute.kernels.attention not in ("auto", "reference")
            and (
                plan.compute.attention in ("eager", "flex")
                or (plan.parallel.cp > 1 and plan.compute.kernels.attention in ("efficient", "cudnn", "math"))
            )
        ),
        "eager and flex do not call SDPA, and context parallelism computes documents, by flash kernels",
        "leave plan.compute.kernels.attention out",
        {"compute.attention": ("auto",), "parallel.cp": (1,)},
    ),
    needs("comm.compress_scope", "comm.compression"),
    needs("comm.error_feedback", "comm.compression"),
)
