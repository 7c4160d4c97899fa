"""`weft.prepare`: losses, norms, weights and evaluations of a custom loop equal one process under every plan."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import weft
from tests.lab.families import family
from tests.lab.parity import compare, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.checkpoint.huggingface import gather_weights
from weft.errors import CheckpointError, JobError, ModelError, PlanError, WeftError
from weft.job import read_plan
from weft.memory.storages import local_part
from weft.plan import Memory, Parallel, Plan, Precision

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, {"zero": 0}),
    "zero 1": (2, {"zero": 1}),
    "zero 2": (2, {"zero": 2}),
    "zero 3": (2, {"zero": 3}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2 x cp2": (4, {"tp": 2, "cp": 2}),
    "replicas": (4, {"zero": 3, "dp_replicate": 2}),
}
MODEL = {**family("llama"), "vocab_size": 97}  # tp does not divide the vocabulary
STEPS, ROWS = 3, 8
LR = 1e-2


class Trace(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def untouched(frozen: bool = False) -> Any:
    """Model; with `frozen`, only its second block and its norms are trained."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**MODEL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = not frozen or "layers.1." in name or "norm" in name
    return model


def batches() -> list[dict[str, Tensor]]:
    """A batch for each step: rows of very unequal numbers of targets, and right padding."""
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        ids = torch.randint(3, 97, (ROWS, 14), generator=generator)
        labels, mask = ids.clone(), torch.ones_like(ids)
        for row in range(ROWS):
            kept = 3 + 5 * row % 11
            labels[row, kept:] = -100
            mask[row, min(kept + 2, 14) :] = 0
        found.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return found


def part_of(batch: dict[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    return {name: tensor[part::parts] for name, tensor in batch.items()}


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Custom loss: cross entropy and z-loss, summed over rows of equal weight."""
    losses = []
    for row, targets in zip(logits[:, :-1], labels[:, 1:], strict=True):
        kept = targets != -100  # logits of padding depend on the layout
        losses.append(F.cross_entropy(row, targets) + 1e-2 * row[kept].logsumexp(-1).square().mean())
    return torch.stack(losses).mean()


def reference(own_loss: bool = False, frozen: bool = False) -> Trace:
    """PyTorch alone, in one process, with all rows at once."""
    model = untouched(frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for batch in batches():
        if own_loss:
            loss = z_loss(
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
            )
        else:
            loss = model(**batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trace(losses, norms, model.state_dict())


def prepared(plan: Plan, frozen: bool = False) -> weft.Run:
    return weft.prepare(untouched(frozen), optimizer=lambda own: torch.optim.AdamW(own, lr=LR), plan=plan)


def own_loop(rank: int, ranks: int, plan: Plan, micro_batches: int, own_loss: bool = False) -> Trace:
    run, losses, norms = prepared(plan), [], []
    for batch in batches():
        own = part_of(batch, run.data_rank, run.data_ranks)
        for index in range(micro_batches):
            micro = part_of(own, index, micro_batches)
            with run.accumulate(last=index == micro_batches - 1):
                if own_loss:
                    out = run.model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
                    run.backward(z_loss(run.gather_logits(out, 14), micro["labels"]))
                else:
                    run.backward(run.model(**micro).loss)
        losses.append(run.loss)
        norms.append(run.clip_grad_norm_(0.5))
        assert not run.step().skipped
    return Trace(losses, norms, gather_weights(run.model))


def check(found: Trace, expected: Trace, *, with_losses: bool = True) -> None:
    if with_losses:
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    for name, weight in found.weights.items():
        compare(name, weight, expected.weights[name], 1e-4, at_least=LR)  # norms compute in float32


@pytest.mark.must("parity: own loop", case="tp2-2")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loop_equals_one_process_with_unequal_targets(layout: str, micro_batches: int) -> None:
    ranks, parallel = LAYOUTS[layout]
    expected = reference()
    for found in run_ranks(ranks, own_loop, plan_for("fp64", **parallel), micro_batches):
        check(found, expected)


@pytest.mark.parametrize("layout", ["zero 2", "tp2", "cp2", "tp2 x cp2"])
def test_a_loss_of_ones_own_on_gathered_logits(layout: str) -> None:
    """Every rank computes the mean over its own rows, all with the same number of rows."""
    ranks, parallel = LAYOUTS[layout]
    plan = plan_for("fp64", **parallel)
    data_ranks = resolved(plan, ranks).parallel.data_ranks
    found = run_ranks(ranks, own_loop, plan, 1, True)[0]
    check(found, reference(own_loss=True), with_losses=data_ranks == 1)


def by_batch(rank: int, ranks: int, plan: Plan) -> tuple[Trace, float]:
    run, losses, norms = prepared(plan), [], []
    for batch in batches():
        losses.append(run.train_batch(part_of(batch, run.data_rank, run.data_ranks), micro_batch_size=2))
        norms.append(run.clip_grad_norm_(0.5))
        run.step()
    held_out = run.evaluate([part_of(batches()[0], run.data_rank, run.data_ranks)], micro_batch_size=2)
    return Trace(losses, norms, gather_weights(run.model)), held_out


@pytest.mark.parametrize("layout", ["pp2", "pp2 x tp2", "zero 3", "cp2"])
def test_train_batch_and_evaluate_equal_one_process(layout: str) -> None:
    more: dict[str, Any] = {"pp2": (2, {"pp": 2}), "pp2 x tp2": (4, {"pp": 2, "tp": 2})}
    ranks, parallel = {**LAYOUTS, **more}[layout]
    expected = reference()
    model = untouched().eval()
    model.load_state_dict(expected.weights)
    with torch.no_grad():
        evaluated = model(**batches()[0]).loss.item()
    for found, held_out in run_ranks(ranks, by_batch, plan_for("fp64", **parallel)):
        assert held_out == pytest.approx(evaluated, rel=1e-5)
        check(found, expected)


def half(rank: int, ranks: int, plan: Plan, folder: Path, resumed: bool, frozen: bool) -> Trace:
    """Two steps and a checkpoint, or the third step after it. The rate is set by the loop, once."""
    run, losses, norms = prepared(plan, frozen), [], []
    if not resumed:
        run.optimizer.inner.param_groups[0]["lr"] = LR
    if resumed:
        for parameter in run.model.parameters():
            torch.nn.init.zeros_(parameter)
        run.optimizer.inner.param_groups[0]["lr"] = 0.0
        run.evaluate([part_of(batches()[0], run.data_rank, run.data_ranks)])  # gathers weights
        assert run.load(folder / "step-2") == {"seen": 16}
        assert run.optimizer.inner.param_groups[0]["lr"] == LR
        assert run.steps == 2
    for batch in batches()[2:] if resumed else batches()[:2]:
        losses.append(run.train_batch(part_of(batch, run.data_rank, run.data_ranks)))
        norms.append(run.clip_grad_norm_(0.5))
        run.step()
    if not resumed:
        run.save(folder / "step-2", extra={"seen": 16})
        run.finish()
    run.export(folder / "export")
    return Trace(losses, norms, gather_weights(run.model))


@pytest.mark.must("composition: own loop", case="{'pp': 2}-{'zero': 1}-False")
@pytest.mark.parametrize(
    ("first", "second", "frozen"),
    [
        ({"zero": 3}, {"tp": 2}, False),
        ({"pp": 2}, {"zero": 1}, False),
        ({"zero": 2}, {"tp": 2}, True),
        ({"zero": 3}, {"zero": 1}, True),
    ],
    ids=str,
)
def test_a_checkpoint_continues_under_another_plan(first: Any, second: Any, frozen: bool, tmp_path: Path) -> None:
    expected = reference(frozen=frozen)
    run_ranks(2, half, plan_for("fp64", **first), tmp_path, False, frozen)
    found = run_ranks(2, half, plan_for("fp64", **second), tmp_path, True, frozen)[0]
    check(found, Trace(expected.losses[2:], expected.norms[2:], expected.weights))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64).state_dict()
    for name, weight in found.weights.items():
        assert torch.equal(weight, exported[name]), name


def with_techniques(rank: int, ranks: int) -> list[Any]:
    """fp16 with a dynamic loss scale that overflows at first, states of 8 bits, recompute and offload."""
    plan = Plan(
        parallel=Parallel(zero=2),
        precision=Precision(param_dtype="fp16", loss_scale="dynamic", optimizer_state_dtype="int8"),
        memory=Memory(recompute=("attention",), offload=("mlp",)),
    )
    torch.manual_seed(0)
    wide = {**MODEL, "hidden_size": 64, "intermediate_size": 256}  # states of few elements are not quantized
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**wide), dtype=torch.float32)
    run = weft.prepare(model, optimizer=lambda own: torch.optim.AdamW(own, lr=LR), plan=plan)
    batch, seen = part_of(batches()[0], rank, ranks), []
    for step in range(4):
        with run.accumulate():
            loss = run.backward(run.model(**batch).loss * (1e30 if step == 0 else 1.0))
        update = run.step()
        seen.append((update.skipped, math.isfinite(update.grad_norm), float(loss)))
    states = [
        type(local_part(value)).__name__
        for state in run.optimizer.state.values()
        for value in state.values()
        if value.ndim
    ]
    return [seen, run.optimizer.loss_scale.value, "BlockState" in states]


def test_nothing_of_the_plan_is_ignored() -> None:
    for seen, scale, quantized in run_ranks(2, with_techniques):
        assert [skipped for skipped, _, _ in seen] == [True, False, False, False]
        assert [finite for _, finite, _ in seen] == [False, True, True, True]
        assert seen[3][2] < seen[1][2]
        assert scale == 2.0**15
        assert quantized


def refused(rank: int, ranks: int, what: str, folder: Path) -> str:
    def attempt(action: Callable[[], Any]) -> str:
        with pytest.raises((PlanError, ModelError, CheckpointError)) as error:
            action()
        return str(error.value)

    if what == "mesh":
        mesh = weft.build_mesh(plan_for("fp32", tp=2), "cpu", ranks)
        make = lambda own: torch.optim.AdamW(own)  # noqa: E731
        return attempt(lambda: weft.prepare(untouched(), optimizer=make, plan=plan_for("fp32"), mesh=mesh))
    if what in ("weights", "wide", "foreign", "no optimizer", "routers"):
        model = untouched()
        make: Any = {"foreign": lambda _: torch.optim.AdamW(untouched().parameters()), "no optimizer": list}.get(
            what, torch.optim.AdamW
        )
        plan = plan_for("fp32" if what == "wide" else "fp64")
        weights = "folder" if what == "weights" else None
        if what == "routers":
            torch.manual_seed(0)
            table = {**family("mixtral"), "output_router_logits": True}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table), dtype=torch.float64)
            run = weft.prepare(model, optimizer=make, plan=plan)
            return attempt(lambda: run.accumulate().__enter__())
        return attempt(lambda: weft.prepare(model, optimizer=make, plan=plan, weights=weights))
    if what == "meta":
        with torch.device("meta"):
            model = untouched()
        return attempt(lambda: weft.prepare(model, optimizer=torch.optim.AdamW))
    run = prepared(plan_for("fp64", pp=2) if what == "pipeline" else plan_for("fp64"))
    if what == "pipeline":
        return attempt(lambda: run.accumulate().__enter__())
    if what == "step":
        return attempt(run.step)
    if what == "twice":
        own = part_of(batches()[0], run.data_rank, run.data_ranks)
        run.train_batch(own)
        return attempt(lambda: run.train_batch(own))
    if what == "clip":
        return attempt(lambda: run.clip_grad_norm_(1.0))
    if what == "second":
        own = part_of(batches()[0], run.data_rank, run.data_ranks)
        with run.accumulate():
            run.backward(run.model(**own).loss)
        return attempt(lambda: run.accumulate().__enter__())
    if what == "outside":
        return attempt(lambda: run.backward(torch.zeros(())))
    if what == "items":
        with run.accumulate():
            loss = run.model(**part_of(batches()[0], rank, ranks)).loss
            return attempt(lambda: run.backward(loss, items=rank + 1))
    if what == "no items":
        with run.accumulate():
            return attempt(lambda: run.backward(torch.zeros((), requires_grad=True), items=0))
    if what == "forward before":
        loss = run.model(**part_of(batches()[0], rank, ranks)).loss
        with run.accumulate(last=False):
            return attempt(lambda: run.backward(loss))
    if what == "some labels":
        own = part_of(batches()[0], rank, ranks)
        with run.accumulate(last=False):
            run.backward(run.model(**own).loss)
        with run.accumulate():
            return attempt(lambda: run.backward(run.model(own["input_ids"]).logits.mean()))
    if what == "no input_ids":
        return attempt(lambda: run.train_batch({"ids": torch.ones(2, 4)} if rank else batches()[0]))
    if what == "uneven rows":
        rows = torch.ones(2 + 2 * rank, 4, dtype=torch.int64)
        return attempt(lambda: run.train_batch({"input_ids": rows}, micro_batch_size=2 + 2 * rank))
    if what == "two losses":
        with run.accumulate():
            run.backward(run.model(**part_of(batches()[0], rank, ranks)).loss)
            return attempt(lambda: run.backward(torch.zeros((), requires_grad=True)))
    if what == "base model":
        if rank == 0:
            untouched().save_pretrained(folder / "base")
        dist.barrier()
        return attempt(lambda: run.export(folder / "base"))
    if what == "export":
        (folder / "runs" / "step-00000001").mkdir(parents=True, exist_ok=True)
        return attempt(lambda: run.export(folder / "runs"))
    if what in ("export to a store", "save to a store"):
        action = run.export if what.startswith("export") else run.save
        return attempt(lambda: action("s3://bucket/step-1"))
    if what == "batches":
        return attempt(lambda: run.evaluate([]))
    if what == "counts":
        own = part_of(batches()[0], rank, 4)
        return attempt(lambda: run.train_batch({key: value[: rank + 1] for key, value in own.items()}))
    if what == "kind":
        run.train_batch(part_of(batches()[0], rank, ranks))
        run.step()
        run.save(folder / "step-1")
        run.finish()
        other = weft.prepare(untouched(), optimizer=lambda own: torch.optim.SGD(own, lr=0.1), plan=plan_for("fp64"))
        return attempt(lambda: other.load(folder / "step-1"))
    if what == "name":
        return attempt(lambda: run.save(folder / "last"))
    if what == "different extra":
        return attempt(lambda: run.save(folder / "step-1", extra={"rank": rank}))
    if what == "one rank":
        rows = torch.ones(2 - rank, 4, dtype=torch.int64)
        return attempt(lambda: run.train_batch({"input_ids": rows}, micro_batch_size=2))
    if what == "extra":
        return attempt(lambda: run.save(folder / "step-1", extra={"rows": {1, 2}}))
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64)}
    if what == "left":
        batch["attention_mask"] = torch.tensor([[0, 1, 1, 1]] * 2)
    return attempt(lambda: run.train_batch(batch, micro_batch_size=1 if what == "left" else 3))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mesh", "the plan has 2 ranks along dp_shard"),
        ("meta", "has no weights"),
        ("pipeline", r"run\.train_batch"),
        ("step", "without the gradients of a step"),
        ("twice", "with the gradients of an earlier batch"),
        ("clip", "run.clip_grad_norm_ without the gradients of a step"),
        ("second", "after the last micro-batch of a step"),
        ("outside", "run.backward outside of run.accumulate"),
        ("items", "items that differ between ranks, after a forward with labels"),
        ("no items", "items adds up to 0"),
        ("forward before", "a loss whose forward ran before run.accumulate"),
        ("some labels", "some have labels or items and others have neither"),
        ("no input_ids", "a batch of ids"),
        ("uneven rows", "between 2 and 4 rows on the ranks"),
        ("export", "other files than an export"),
        ("export to a store", "s3://bucket/step-1 is on an object store"),
        ("save to a store", "s3://bucket/step-1 is on an object store"),
        ("base model", "other files than an export"),
        ("two losses", "a second run.backward in run.accumulate"),
        ("different extra", "extra differs between the ranks"),
        ("one rank", "1 rows in micro-batches of 2"),
        ("batches", "at least one"),
        ("counts", "between 1 and 2 micro-batches on the ranks"),
        ("kind", "the checkpoint is not of SGD: its optimizer has the settings betas, this one momentum"),
        ("weights", "that has weights"),
        ("wide", "float64, and plan.precision.update is torch.float32"),
        ("foreign", "parameters that are not those that its function was given"),
        ("no optimizer", "the optimizer function returned list"),
        ("routers", "output_router_logits"),
        ("name", "a checkpoint named last"),
        ("extra", "extra cannot be saved"),
        ("left", "padding_side"),
        ("rows", "2 rows in micro-batches of 3"),
    ],
)
def test_what_cannot_be_done_is_refused_on_every_rank(what: str, said: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, refused, what, tmp_path)
    assert first == second
    assert said.replace("\\", "") in first


def gathered_twice(rank: int, ranks: int, plan: Plan) -> list[float]:
    """Losses of two steps with an evaluation between backward and step, and the loss property of each moment."""
    run, batch, seen = prepared(plan), None, []
    for batch in batches()[:2]:
        own = part_of(batch, run.data_rank, run.data_ranks)
        with run.accumulate():
            run.backward(run.model(**own).loss)
        run.clip_grad_norm_(0.5)
        run.evaluate([own])
        run.step()
        seen.append(run.loss)
    return seen


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_evaluation_between_backward_and_step_changes_nothing(zero: int) -> None:
    for found in run_ranks(2, gathered_twice, plan_for("fp64", zero=zero)):
        assert found == pytest.approx(reference().losses[:2], rel=1e-5)


def half_precision(rank: int, ranks: int) -> list[str]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL), dtype=torch.bfloat16)
    run = weft.prepare(model, optimizer=torch.optim.AdamW, plan=plan_for("fp32"))
    return sorted({str(parameter.dtype) for parameter in run.model.parameters()})


def test_weights_are_updated_in_the_dtype_of_the_plan() -> None:
    assert run_ranks(2, half_precision) == [["torch.float32"]] * 2


@pytest.mark.parametrize(
    ("text", "said"), [("[parallel]\nzerro = 2\n", "did you mean"), ("[precision]\nloss_scale = nan\n", "loss_scale")]
)
def test_a_plan_file_is_checked(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(JobError, match=said):
        read_plan(tmp_path / "plan.toml")
    (tmp_path / "plan.toml").write_text('[parallel]\ntp = 2\n[comm]\ncompression = "1-bit"\n')
    assert read_plan(tmp_path / "plan.toml").parallel.tp == 2


def by_name(rank: int, ranks: int, plan: Plan, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights after two steps, and after a checkpoint of the first step and a second step in another run."""
    settings = weft.Optimizer(name="muon", lr=LR, options={"momentum": 0.9})
    run, again = (weft.prepare(untouched(), optimizer=settings, plan=plan) for _ in range(2))
    assert type(run.optimizer.inner).__name__ == "Muon"
    assert {group["momentum"] for group in run.optimizer.inner.param_groups} == {0.9}
    own = [part_of(batch, run.data_rank, run.data_ranks) for batch in batches()[:2]]
    for step, batch in enumerate(own):
        with run.accumulate():
            run.backward(run.model(**batch).loss)
        run.step()
        if step == 0:
            weft.save(run, folder / "step-1", extra={"seen": 1})
    run.finish()
    assert weft.load(again, folder / "step-1") == {"seen": 1}
    with again.accumulate():
        again.backward(again.model(**own[1]).loss)
    again.step()
    weft.export(run.model, folder / "export")
    return gather_weights(run.model), gather_weights(again.model)


def test_an_optimizer_by_name_with_functions_to_save_load_and_export(tmp_path: Path) -> None:
    first, second = run_ranks(2, by_name, plan_for("fp64", zero=3), tmp_path)[0]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert torch.equal(weight, exported[name]), name


def save_after_load(rank: int, ranks: int, plan: Plan, folder: Path) -> None:
    """Save after a load, and compare with the states of the optimizer at that time."""
    run = prepared(plan)
    own = [part_of(batch, run.data_rank, run.data_ranks) for batch in batches()[:2]]

    def step(number: int) -> None:
        with run.accumulate():
            run.backward(run.model(**own[number]).loss)
        run.step()

    step(0)
    run.save(folder / "step-1")
    run.load(folder / "step-1")
    step(1)
    run.save(folder / "step-2")
    run.finish()
    states = [
        {key: local_part(value).clone() for key, value in state.items()} for state in run.optimizer.state.values()
    ]
    run.load(folder / "step-2")
    for before, state in zip(states, run.optimizer.state.values(), strict=True):
        for key, value in before.items():
            assert torch.equal(local_part(state[key]), value), key


def test_a_checkpoint_after_a_load_has_the_new_states(tmp_path: Path) -> None:
    run_ranks(2, save_after_load, plan_for("fp64", zero=3), tmp_path)


def groups_of_stages(rank: int, ranks: int, plan: Plan, folder: Path) -> None:
    """Save and load groups that two stages have in different orders; each stage gets its own settings back."""
    run, again = (weft.prepare(untouched(), optimizer=weft.Optimizer(name="muon", lr=LR), plan=plan) for _ in range(2))
    own = part_of(batches()[0], run.data_rank, run.data_ranks)
    run.train_batch(own)
    run.step()
    kinds = [
        [(group["orthogonalize"], group["weight_decay"]) for group in r.optimizer.inner.param_groups]
        for r in (run, again)
    ]
    for group in run.optimizer.inner.param_groups:
        group["lr"] = 0.5 if group["orthogonalize"] else 0.25
    run.save(folder / "step-1")
    run.finish()
    again.load(folder / "step-1")
    groups = again.optimizer.inner.param_groups
    assert [(group["orthogonalize"], group["weight_decay"]) for group in groups] == kinds[0] == kinds[1]
    assert [group["lr"] for group in groups] == [0.5 if group["orthogonalize"] else 0.25 for group in groups]
    again.train_batch(own)
    assert not again.step().skipped


def test_settings_of_parameter_groups_follow_their_parameters(tmp_path: Path) -> None:
    run_ranks(2, groups_of_stages, plan_for("fp64", pp=2), tmp_path)


def uneven_items(rank: int, ranks: int, plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """A token mean of rows with very unequal numbers of tokens, by `items` of each rank."""
    run = prepared(plan)
    for batch in batches()[:2]:
        own = part_of(batch, run.data_rank, run.data_ranks)
        for index in range(2):
            micro = part_of(own, index, 2)
            with run.accumulate(last=index == 1):
                logits = run.model(micro["input_ids"], attention_mask=micro["attention_mask"]).logits
                logits = run.gather_logits(logits, 14)
                targets = micro["labels"][:, 1:]
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())
                run.backward(loss, items=(targets != -100).sum())
        norm = run.clip_grad_norm_(0.5)
        run.step()
    return norm, gather_weights(run.model)


@pytest.mark.parametrize("layout", ["zero 0", "zero 3", "tp2 x cp2"])
def test_items_of_each_rank_give_the_mean_over_all_elements(layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    norm, weights = run_ranks(ranks, uneven_items, plan_for("fp64", **parallel))[0]
    model = untouched()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for batch in batches()[:2]:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert norm == pytest.approx(expected.item(), rel=1e-6)  # norms of Llama compute in float32
    for name, weight in model.state_dict().items():
        compare(name, weights[name], weight, 1e-4, at_least=LR)


def failing_batches(rank: int, ranks: int) -> str:
    """Error of an evaluation whose loader fails on one rank."""

    def loader() -> Any:
        yield batches()[0]
        if rank == 1:
            raise OSError("the disk is gone")

    with pytest.raises((OSError, WeftError)) as error:
        prepared(plan_for("fp64")).evaluate(loader())
    return f"{type(error.value).__name__}: {error.value}"


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(2, failing_batches)
    assert second == "OSError: the disk is gone"
    assert first.startswith("WeftError: OSError: the disk is gone")
    assert "rank 1" in first


def dropout_of_seed(rank: int, ranks: int, seed: int) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**MODEL, "model_type": "gpt2", "resid_pdrop": 0.5})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    torch.manual_seed(seed)
    run = weft.prepare(model, optimizer=lambda own: torch.optim.SGD(own, lr=0.1), plan=plan_for("fp64"))
    return run.train_batch({"input_ids": torch.arange(16).view(2, 8)})


def test_dropout_depends_on_the_seed_of_the_program() -> None:
    same, again, other = (run_ranks(2, dropout_of_seed, seed)[0] for seed in (1, 1, 257))
    assert same == again != other


def other_size(rank: int, ranks: int, folder: Path) -> tuple[str, bool]:
    """Error of a checkpoint of a model with more blocks, and whether the optimizer keeps its states."""
    run = prepared(plan_for("fp64"))
    own = part_of(batches()[0], run.data_rank, run.data_ranks)
    run.train_batch(own)
    run.step()
    run.save(folder / "step-1")
    run.finish()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**MODEL, "num_hidden_layers": MODEL["num_hidden_layers"] - 1})
    smaller = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    other = weft.prepare(smaller, optimizer=lambda own: torch.optim.AdamW(own, lr=LR), plan=plan_for("fp64"))
    other.train_batch(own)
    other.step()
    before = [local_part(state["exp_avg"]).clone() for state in other.optimizer.state.values()]
    with pytest.raises(CheckpointError) as error:
        other.load(folder / "step-1")
    after = [local_part(state["exp_avg"]) for state in other.optimizer.state.values()]
    return str(error.value), len(before) == len(after) and all(map(torch.equal, before, after))


def test_a_checkpoint_with_further_weights_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(2, other_size, tmp_path)
    assert first == second
    assert "weights that the model does not have, such as model.layers." in first[0]
    assert first[1]


class Rebinding(torch.optim.Optimizer):
    """Momentum that binds a new tensor in each update."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            state["m"] = 0.9 * state.get("m", torch.zeros_like(parameter)) + parameter.grad
            parameter.sub_(LR * state["m"])


def rebinding_states(rank: int, ranks: int, folder: Path) -> None:
    run = weft.prepare(untouched(), optimizer=Rebinding, plan=plan_for("fp64"))
    own = part_of(batches()[0], run.data_rank, run.data_ranks)
    for step in (1, 2):
        run.train_batch(own)
        run.step()
        run.save(folder / f"step-{step}")
    run.finish()
    other = weft.prepare(untouched(), optimizer=Rebinding, plan=plan_for("fp64"))
    other.load(folder / "step-2")
    for now, then in zip(other.optimizer.state.values(), run.optimizer.state.values(), strict=True):
        assert torch.equal(local_part(now["m"]), local_part(then["m"]))


def test_states_that_are_bound_anew_are_saved(tmp_path: Path) -> None:
    run_ranks(2, rebinding_states, tmp_path)


def slow_second_moment(rank: int, ranks: int) -> str:
    plan = plan_for("fp32")
    plan = plan.model_copy(update={"precision": plan.precision.model_copy(update={"optimizer_state_dtype": "bf16"})})
    with pytest.raises(PlanError) as error:
        weft.prepare(untouched().float(), optimizer=lambda own: torch.optim.AdamW(own, lr=LR), plan=plan)
    return str(error.value)


def test_bf16_states_with_slow_decay_are_refused() -> None:
    assert "the second moment would never decrease" in run_ranks(1, slow_second_moment)[0]


def other_loss_scale(rank: int, ranks: int, folder: Path) -> tuple[float, float]:
    """Loss scales after loading a checkpoint of a run without loss scale, and of a run whose scale has moved."""
    found = []
    for name, setting in (("none", "none"), ("dynamic", "dynamic")):
        plan = plan_for("fp64")
        change = {"precision": plan.precision.model_copy(update={"loss_scale": setting})}
        run = prepared(plan.model_copy(update=change))
        run.train_batch(part_of(batches()[0], run.data_rank, run.data_ranks))
        run.step()
        run.optimizer.loss_scale = replace(run.optimizer.loss_scale, value=8.0)
        run.save(folder / name / "step-1")
        run.finish()
        change = {"precision": plan.precision.model_copy(update={"loss_scale": "dynamic"})}
        other = prepared(plan.model_copy(update=change))
        other.load(folder / name / "step-1")
        found.append(other.optimizer.loss_scale.value)
    return found[0], found[1]


def test_the_plan_decides_about_the_kind_of_loss_scale(tmp_path: Path) -> None:
    assert run_ranks(2, other_loss_scale, tmp_path)[0] == (2.0**16, 8.0)


def fractional_items(rank: int, ranks: int) -> None:
    """Average two micro-batches with weights below one, and with the same weights above one."""
    norms = []
    for scale in (1, 100):
        run = prepared(plan_for("fp64", zero=0))
        for index, weight in enumerate((0.25, 0.75)):
            with run.accumulate(last=index == 1):
                run.backward(run.model(**part_of(batches()[0], index, 2)).loss, items=torch.tensor(weight * scale))
        norms.append((run.loss, run.clip_grad_norm_(1.0)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


def test_items_below_one() -> None:
    run_ranks(1, fractional_items)


def evaluate_in_eval_mode(rank: int, ranks: int) -> None:
    run = prepared(plan_for("fp64", zero=0))
    block = run.model.model.layers[0].eval()
    run.evaluate(batches()[:1])
    assert not block.training
    assert run.model.training


def test_an_evaluation_keeps_the_mode_of_each_module() -> None:
    run_ranks(1, evaluate_in_eval_mode)


def forward_dtype(rank: int, ranks: int, dtype: torch.dtype) -> tuple[str, str, str]:
    run = weft.prepare(untouched().to(dtype), optimizer=torch.optim.AdamW, plan=Plan(parallel=Parallel(zero=2)))
    plan = run.plan.precision
    return plan.param_dtype, plan.update, str(plan.loss_scale)


@pytest.mark.parametrize(
    ("dtype", "chosen", "scale"),
    [(torch.float32, "fp32", "none"), (torch.bfloat16, "bf16", "none"), (torch.float16, "fp16", "dynamic")],
    ids=str,
)
def test_forward_has_the_dtype_of_the_model(dtype: torch.dtype, chosen: str, scale: str) -> None:
    assert run_ranks(2, forward_dtype, dtype) == [(chosen, "fp32", scale)] * 2
