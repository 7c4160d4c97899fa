"""Effects of the table plan.pipeline, and of plan.parallel.pp, on a run of `weft train`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.effects.watch import SEEN, unwatch, watch
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import ObservedRun, observe
from weft.job import Job
from weft.parallel.pipeline.stage import Stage
from weft.parallel.runtime import runtime
from weft.training.session import Session

BLOCKS = 6
TABLE = """0F0,0F1,0F2,0F3,0B1,0B0,0B3,0B2
1F1,1F0,1B1,1B0,1F3,1F2,1B3,1B2
"""
"""Schedule of two stages and four micro-batches that no name has."""
ACTIONS = {
    "1f1b": "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
    "gpipe": "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n",
    "zb-h1": "0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3\n",
    "own.csv": TABLE,
}
"""Actions of each rank, by schedule."""
SETTINGS: dict[str, dict[str, Any]] = {  # beside the schedule
    "1f1b": {},
    "gpipe": {"stage_blocks": [4, 2]},
    "zb-h1": {"block_costs": [3.0, 1.0, 1.0, 1.0, 1.0, 1.0]},
    "own.csv": {"embedding_cost": 4.0, "head_cost": 2.0},
    "interleaved": {"virtual_stages": 3},
}
Run = Callable[[str], ObservedRun]


def note_actions(session: Session) -> None:
    """Note the actions of the stages of this rank, in the notation of schedules."""

    def note(kind: str) -> Callable[..., None]:
        def see(stage: Stage, micro_batch: int, *_: Any, full_backward: bool = True, **__: Any) -> None:
            if torch.is_grad_enabled():  # not in evaluations
                SEEN.append(f"{stage.stage_index}{kind if full_backward else 'I'}{micro_batch}")

        return see

    watch(Stage, "forward_one_chunk", note("F"))
    watch(Stage, "backward_one_chunk", note("B"))
    watch(Stage, "backward_weight_one_chunk", note("W"))


def facts_of(session: Session) -> dict[str, Any]:
    """Actions, blocks with parameters, and stages of this rank."""
    pipeline = runtime(session.model).pipeline
    held = {name.split("layers.")[1].split(".")[0] for name, _ in session.model.named_parameters() if "layers." in name}
    assert pipeline is not None
    return {"actions": unwatch(), "blocks": sorted(map(int, held)), "own": list(pipeline.stage_io.own)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Function that trains one step of four micro-batches on two ranks of pp, with one of `SETTINGS`; each runs once."""
    found: dict[str, ObservedRun] = {}

    def trained(name: str) -> ObservedRun:
        if name not in found:
            folder, settings = tmp_path_factory.mktemp("run"), SETTINGS[name]
            (folder / "own.csv").write_text(TABLE)
            settings = {"schedule": str(folder / "own.csv") if name == "own.csv" else name, **settings}
            config = {**family("llama"), "vocab_size": 300, "num_hidden_layers": BLOCKS}
            parallel = {"parallel": {"pp": 2, "zero": 0}}
            plan = {**parallel, "pipeline": settings, "precision": {"param_dtype": "fp32"}}
            train = {"steps": 1, "global_batch_size": 4, "micro_batch_size": 1}
            job = write_job(folder, model={"config": config}, plan=plan, train=train)
            found[name] = observe(Job.load(job), 2, fault=note_actions, probe=facts_of)
        return found[name]

    return trained


@pytest.mark.effect(
    "plan.parallel.pp", "blocks whose parameters a rank has: half of them; bytes of activations along pp"
)
def test_a_pipeline_gives_each_rank_half_of_the_blocks(run: Run) -> None:
    split = run("1f1b")
    assert [facts["blocks"] for facts in split.facts] == [[0, 1, 2], [3, 4, 5]]
    activations = 4 * 4 * 32 * 32  # bytes of the hidden states of four rows
    assert (split.metrics[0].comm or {})["pp"]["send_bytes"] >= activations


@pytest.mark.effect(
    "plan.pipeline.schedule", "order of the forwards and backwards of each rank, of names and of a file"
)
@pytest.mark.parametrize("name", ACTIONS)
def test_ranks_run_the_actions_of_the_schedule_in_its_order(name: str, run: Run) -> None:
    for facts, line in zip(run(name).facts, ACTIONS[name].splitlines(), strict=True):
        expected = line.split(",")
        assert facts["actions"][: len(expected)] == expected


@pytest.mark.effect("plan.pipeline.virtual_stages", "stages and blocks of each rank: three, of every second stage")
def test_virtual_stages_are_stages_of_a_rank(run: Run) -> None:
    assert [facts["own"] for facts in run("interleaved").facts] == [[0, 2, 4], [1, 3, 5]]
    assert [facts["blocks"] for facts in run("interleaved").facts] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.effect("plan.pipeline.stage_blocks", "blocks whose parameters a rank has: four and two")
@pytest.mark.effect(
    "plan.pipeline.block_costs", "blocks whose parameters a rank has: two, one of them expensive, and four"
)
@pytest.mark.effect("plan.pipeline.embedding_cost", "blocks whose parameters a rank has: fewer beside the embedding")
@pytest.mark.effect(
    "plan.pipeline.head_cost", "blocks whose parameters a rank has: more than without the cost of the head"
)
@pytest.mark.parametrize(("name", "first"), [("gpipe", 4), ("zb-h1", 2), ("own.csv", 2)])
def test_blocks_are_divided_by_number_or_by_cost(name: str, first: int, run: Run) -> None:
    """With the costs of the third run, the first rank would have one block without head_cost, four without embedding_cost."""
    assert [facts["blocks"] for facts in run(name).facts] == [[*range(first)], [*range(first, BLOCKS)]]
