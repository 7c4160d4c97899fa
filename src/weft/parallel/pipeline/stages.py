"""Stages of a plan: whether a model can be cut into them, and the cut for one rank."""

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy
from weft.comm.lanes import Lanes
from weft.errors import PlanError, Refusal, raise_if_refused
from weft.parallel.pipeline.balance import reason_against_pp, split_blocks
from weft.parallel.pipeline.partition import StageIO, install_stage_switch, partition_model, trace_block_chain
from weft.parallel.pipeline.plan_schedule import load_schedule, runs_jointly, splits_backward, stage_ranks
from weft.parallel.pipeline.probe import Shapes
from weft.parallel.pipeline.runtime import PipelineRuntime
from weft.parallel.pipeline.taint import BlockChain
from weft.parallel.pipeline.weight_gradients import WeightGradientQueue
from weft.parallel.sequence.stacks import has_outer_weights, sequence_stacks
from weft.plan import ResolvedPlan
from weft.precision.dtypes import DTYPES

if TYPE_CHECKING:
    from weft.parallel.build import Build


def find_stages(
    model: PreTrainedModel, anatomy: Anatomy, plan: ResolvedPlan, num_micro_batches: int | None = None
) -> tuple[BlockChain | None, Shapes]:
    """Chain of blocks, and shapes of what stages exchange; (None, ()) without pipeline parallelism.

    Needs neither weights nor ranks. Arguments as of `check_axes`.

    Raises:
        PlanError: the model or the schedule does not fit the number of stages.
    """
    p, num_blocks = plan.parallel, len(anatomy.chained_blocks)
    if p.pp == 1:
        return None, ()
    raise_if_refused(reason_against_pp(num_blocks, plan))
    stages = split_blocks(num_blocks, len(stage_ranks(plan)), plan.pipeline)
    raise_if_refused(_reason_against_features(model, anatomy, len(stages[0])))
    raise_if_refused(_reason_against_deferring(plan))
    if num_micro_batches is not None:
        load_schedule(plan, num_micro_batches)
    chain, shapes = trace_block_chain(model, anatomy, DTYPES[plan.precision.param_dtype])
    is_text = anatomy.is_decoder and sequence_stacks(model, anatomy, p.tp) is None
    splits_rows = (p.tp > 1 and p.sp) or p.cp > 1
    if splits_rows and not (is_text and len(chain.values) == num_blocks):
        raise PlanError(
            f"{'context' if p.cp > 1 else 'sequence'} parallelism in the stages of a {type(model).__name__}",
            where=f"plan.parallel.{'cp' if p.cp > 1 else 'sp'}, plan.parallel.pp",
            rule="stages exchange whole sequences, except those of decoders of text that exchange hidden states alone",
            fix=f"set plan.parallel.{'cp = 1' if p.cp > 1 else 'sp = false'} or plan.parallel.pp = 1",
        )
    return chain, shapes


def _reason_against_features(model: PreTrainedModel, anatomy: Anatomy, first: int) -> Refusal | None:
    """Reason against a first stage of `first` blocks: later stages would use features of images, which the first one computes.

    The trial forward has no images, so it cannot see them.
    """
    if model.config.is_encoder_decoder or not anatomy.has_roles:
        return None
    vision = getattr(model.config, "vision_config", None)
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    if levels > first:
        return Refusal(
            f"features of images after {levels} blocks of a {type(model).__name__}, of which the first stage has {first}",
            where="plan.parallel.pp, plan.pipeline.stage_blocks",
            rule="the stage with the vision tower has the blocks after which deepstack_visual_indexes adds features",
            fix=f"set plan.pipeline.stage_blocks such that the first stage has {levels} blocks or more",
        )
    if has_outer_weights(model, anatomy) and any(block.cross_attention for block in anatomy.blocks):
        return Refusal(
            f"stages of a {type(model).__name__}, whose blocks attend to features of images",
            where="plan.parallel.pp",
            rule="the features of images belong to the first stage",
            fix="set plan.parallel.pp = 1",
        )
    return None


def _reason_against_deferring(plan: ResolvedPlan) -> Refusal | None:
    """Reason against a schedule that defers weight gradients: a technique computes both parts of a backward together."""
    at_once = {
        "plan.compute.compile": plan.compute.compile != "off",
        "plan.precision.matmul": plan.precision.matmul != "forward",
    }
    for key in (key for key, is_set in at_once.items() if is_set and splits_backward(plan)):
        return Refusal(
            f"{key} with the schedule {plan.pipeline.schedule}",
            where=key,
            rule="this schedule defers weight gradients, which compiled blocks and FP8 matmuls compute at once",
            fix=f'leave {key} out, or set plan.pipeline.schedule to "1f1b" or "interleaved"',
        )
    return None


def cut_for_rank(
    model: PreTrainedModel, anatomy: Anatomy, chain: BlockChain, plan: ResolvedPlan, rank: int
) -> tuple[Anatomy, StageIO]:
    """Remove the blocks of other pipeline stages; returns the anatomy of the remaining blocks, and their stage I/O."""
    ranks = stage_ranks(plan)
    stages = split_blocks(len(anatomy.chained_blocks), len(ranks), plan.pipeline)
    own = tuple(stage for stage, owner in enumerate(ranks) if owner == rank)
    return partition_model(model, anatomy, chain, stages, own)


def cut_stages(build: "Build") -> None:
    """Step of `parallelize`: remove the blocks of other stages; first, so that later steps see those of this rank only."""
    build.begin("cut_stages")
    model, plan, choices = build.model, build.plan, build.choices
    build.queue = WeightGradientQueue() if choices.splits_backward else None
    build.lanes = build.runtime.lanes = Lanes() if runs_jointly(plan) else None
    if choices.chain is None:
        build.anatomy, build.stage_io = build.full_anatomy, None
    else:
        stage = build.mesh.get_local_rank("pp")
        build.anatomy, build.stage_io = cut_for_rank(model, build.full_anatomy, choices.chain, plan, stage)


def run_stages(build: "Build") -> None:
    """Step of `parallelize`: the stages of this rank, which run with the reducer, the queue and the lanes of other steps."""
    build.begin("run_stages", "shard_weights", "prefetch_weights")
    if build.stage_io is None:
        return
    runtime = build.runtime
    install_stage_switch(build.model, build.full_anatomy, build.stage_io)
    runtime.pipeline = PipelineRuntime(
        build.model,
        build.full_anatomy,
        build.stage_io,
        build.choices.shapes,
        build.plan,
        build.mesh,
        build.queue,
        runtime.router_stats,
        runtime.gradient_reducer,
        build.lanes,
    )
