"""Effects of the tables optimizer and train, and of the key out, on a run of `weft train`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import ObservedRun, observe
from weft.job import Job, Optimizer
from weft.parallel.weights import to_local
from weft.training.metrics import Evaluation, StepMetrics, read_evaluations
from weft.training.session import Session


def run(folder: Path, ranks: int = 1, fault: Any = None, probe: Any = None, **tables: Any) -> ObservedRun:
    return observe(Job.load(write_job(folder, **tables)), ranks, fault=fault, probe=probe)


# Steps, rows and forwards

DROPOUT = {**family("gpt2"), "vocab_size": 300, "embd_pdrop": 0.5}


def record_forwards(session: Session) -> None:
    """Record the rows of each forward, the elements that dropout keeps, and the updates between the forwards."""
    seen: list[tuple[str, Any]] = []
    session.model.__dict__["seen"] = seen

    def see_rows(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(("train" if module.training else "evaluate", kwargs["input_ids"].tolist()))

    def see_dropout(module: nn.Module, args: Any, output: Tensor) -> None:
        if module.training:
            seen.append(("kept", (output != 0).tolist()))

    session.model.register_forward_pre_hook(see_rows, with_kwargs=True)
    session.model.get_submodule("transformer.drop").register_forward_hook(see_dropout)
    session.optimizer.inner.register_step_post_hook(lambda *_: seen.append(("update", None)))


def recorded(session: Session) -> list[tuple[str, Any]]:
    return session.model.__dict__["seen"]


def forwards_of_steps(seen: list[tuple[str, Any]]) -> list[list[Any]]:
    """Rows of each training forward, by step."""
    steps: list[list[Any]] = [[]]
    for kind, value in seen:
        if kind == "train":
            steps[-1].append(value)
        elif kind == "update":
            steps.append([])
    return steps[:-1]  # without forwards after the last update, which measure memory


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    """Run of two steps of four rows."""
    folder = tmp_path_factory.mktemp("plain")
    return run(folder, fault=record_forwards, probe=recorded, model={"config": DROPOUT})


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    """The same run with other steps, rows, seed, evaluations and run folder."""
    folder = tmp_path_factory.mktemp("changed")
    train = {"steps": 3, "global_batch_size": 8, "micro_batch_size": 4, "seed": 5}
    train |= {"evaluate_every": 2, "evaluate_rows": 4}
    path = write_job(folder, model={"config": DROPOUT}, train=train)
    job = Job.load(path, [f"out={folder / 'elsewhere'}"])
    return observe(job, 1, fault=record_forwards, probe=recorded)


@pytest.mark.effect("train.steps", "rows of metrics.jsonl")
def test_a_run_has_its_number_of_steps(plain: ObservedRun, changed: ObservedRun) -> None:
    assert [row.step for row in plain.metrics] == [1, 2]
    assert [row.step for row in changed.metrics] == [1, 2, 3]


@pytest.mark.effect("train.global_batch_size", "rows in the forwards of a step")
@pytest.mark.effect("train.micro_batch_size", "rows of each forward of a step: at most four")
def test_a_step_reads_its_rows_in_micro_batches(plain: ObservedRun, changed: ObservedRun) -> None:
    rows = [[[len(rows) for rows in step] for step in forwards_of_steps(each.facts[0])] for each in (plain, changed)]
    assert rows[0] == [[4], [4]]
    assert rows[1] == [[4, 4]] * 3


@pytest.mark.effect("train.seed", "order of the rows, and elements that dropout keeps of a row in the first step")
def test_another_seed_has_other_rows_and_another_dropout(plain: ObservedRun, changed: ObservedRun) -> None:
    seen = [each.facts[0] for each in (plain, changed)]
    first, other = (forwards_of_steps(each)[0][0] for each in seen)
    assert first != other
    kept = [next(value for kind, value in each if kind == "kept") for each in seen]
    i, j = next((i, j) for i, row in enumerate(first) for j, same in enumerate(other) if row == same)
    assert 0.4 < (torch.tensor(kept[0][i]) == torch.tensor(kept[1][j])).float().mean() < 0.6


@pytest.mark.effect("train.evaluate_every", "steps of evaluations.jsonl: the last alone, or also steps 0 and 2")
@pytest.mark.effect("train.evaluate_rows", "rows in the forwards of an evaluation: seven, filled up to eight, or four")
def test_evaluations_are_at_their_steps_with_their_rows(plain: ObservedRun, changed: ObservedRun) -> None:
    assert [evaluation.step for evaluation in read_evaluations(plain.folder / "evaluations.jsonl")] == [2]
    assert [evaluation.step for evaluation in read_evaluations(changed.folder / "evaluations.jsonl")] == [0, 2, 3]
    rows = [sum(len(value) for kind, value in each.facts[0] if kind == "evaluate") for each in (plain, changed)]
    assert rows == [8, 3 * 4]


@pytest.mark.effect("out", "folder with the metrics, weights and report of the run")
def test_all_output_is_in_the_run_folder(plain: ObservedRun, changed: ObservedRun) -> None:
    for found, name in ((plain, "run"), (changed, "elsewhere")):
        assert found.folder.name == name
        assert {"metrics.jsonl", "export", "run.json", "job.toml"} <= {path.name for path in found.folder.iterdir()}
        assert {path.name for path in found.folder.parent.iterdir()} == {"text", "cache", "job.toml", name}


# Optimizer


def keep_weights(session: Session) -> None:
    """Keep the weights before the first update."""
    weights = {name: to_local(p.detach()).clone() for name, p in session.model.named_parameters()}
    session.model.__dict__["before"] = weights


def update_of(session: Session) -> dict[str, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Each weight before and after the update, and its states."""
    found = {}
    for name, p in session.model.named_parameters():
        states = {key: to_local(value).clone() for key, value in session.optimizer.state[p].items()}
        found[name] = session.model.__dict__["before"][name], to_local(p.detach()).clone(), states
    return found


@pytest.mark.effect("optimizer.lr", "weights after one update of AdamW, computed by its formula from the states")
@pytest.mark.effect("optimizer.betas", "moments after one update: (1 - beta) times the gradient, and times its square")
@pytest.mark.effect("optimizer.eps", "weights after one update, whose gradients are smaller than eps")
@pytest.mark.effect("optimizer.weight_decay", "weights after one update: matrices decay, vectors do not")
@pytest.mark.effect("optimizer.clip_norm", "norm of the gradient in the first moment after one update")
def test_an_update_has_the_settings_of_the_job(tmp_path: Path) -> None:
    lr, betas, eps, decay, norm = 0.02, (0.5, 0.75), 1e-3, 0.4, 0.01
    optimizer = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay, "clip_norm": norm, "warmup_steps": 1}
    found = run(tmp_path, fault=keep_weights, probe=update_of, train={"steps": 1}, optimizer=optimizer)
    gradients = {name: states["exp_avg"] / (1 - betas[0]) for name, (_, _, states) in found.facts[0].items()}
    assert torch.cat([g.flatten() for g in gradients.values()]).norm().item() == pytest.approx(norm, rel=1e-4)
    assert found.metrics[0].grad_norm > 100 * norm
    for name, (before, after, states) in found.facts[0].items():
        gradient = gradients[name]
        assert gradient.abs().max() > 0
        torch.testing.assert_close(states["exp_avg_sq"], (1 - betas[1]) * gradient**2, rtol=1e-5, atol=1e-15)
        kept = 1 - lr * decay if before.ndim > 1 else 1.0
        torch.testing.assert_close(after, before * kept - lr * gradient / (gradient.abs() + eps), rtol=0, atol=1e-6)


def prune_and_follow_rates(session: Session) -> None:
    """Set half of each matrix of the blocks to zero; record the learning rate of each update."""
    for module in session.model.model.layers.modules():
        if isinstance(module, nn.Linear):
            weight = to_local(module.weight.detach())
            weight[::2, ::2] = weight[1::2, 1::2] = 0
    rates: list[float] = []
    session.model.__dict__["rates"] = rates
    inner = session.optimizer.inner
    inner.register_step_pre_hook(lambda *_: rates.extend({group["lr"] for group in inner.param_groups}))


def zeros_rates_and_states(session: Session) -> tuple[list[float], list[float], list[set[str]]]:
    """Fraction of zeros in each matrix of the blocks, learning rates, and names of the states with a tensor."""
    layers = session.model.model.layers
    zeros = [(to_local(m.weight) == 0).float().mean().item() for m in layers.modules() if isinstance(m, nn.Linear)]
    states = [{key for key, value in s.items() if value is not None} for s in session.optimizer.state.values()]
    return zeros, session.model.__dict__["rates"], states


POLYNOMIAL = {"schedule": "polynomial", "power": 3.0, "floor": 0.5, "warmup_steps": 2}


@pytest.fixture(scope="module")
def sgd(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    """Run of SGD with momentum and another schedule, on pruned matrices."""
    options = {"name": "torch.optim:SGD", "options": {"momentum": 0.9}, "lr": 0.1, "keep_zeros": True, **POLYNOMIAL}
    folder = tmp_path_factory.mktemp("sgd")
    faults = {"fault": prune_and_follow_rates, "probe": zeros_rates_and_states}
    return run(folder, **faults, train={"steps": 4}, optimizer=options)


@pytest.mark.effect("optimizer.schedule", "learning rates of the updates")
@pytest.mark.effect("optimizer.power", "learning rate in the middle of a polynomial decay")
@pytest.mark.effect("optimizer.floor", "learning rate of the last update")
@pytest.mark.effect("optimizer.warmup_steps", "learning rate of the first update: half the peak with 2 steps")
def test_updates_follow_the_schedule(sgd: ObservedRun) -> None:
    _, rates, _ = sgd.facts[0]
    assert rates == pytest.approx([0.05, 0.1, 0.1 * (0.5 + 0.5 * 0.5**3), 0.05])


@pytest.mark.effect("optimizer.options", "momentum buffers of SGD, which has none without the option")
def test_options_reach_the_optimizer(sgd: ObservedRun) -> None:
    _, _, states = sgd.facts[0]
    assert states
    assert all(names == {"momentum_buffer"} for names in states)


@pytest.mark.effect("optimizer.keep_zeros", "zeros of pruned matrices after four updates; the update alone fills them")
def test_pruned_matrices_keep_their_zeros(sgd: ObservedRun, tmp_path: Path) -> None:
    assert sgd.facts[0][0] == [0.5] * 14
    faults = {"fault": prune_and_follow_rates, "probe": zeros_rates_and_states}
    filled = run(tmp_path, **faults, train={"steps": 1}, optimizer={"name": "torch.optim:SGD"})
    assert all(share < 0.1 for share in filled.facts[0][0])


def states_of_matrices(session: Session) -> tuple[str, dict[str, set[str]]]:
    """Class of the optimizer, and names of its states for a matrix of a block and for the embedding."""
    names = {}
    for name, p in session.model.named_parameters():
        if name.endswith(("layers.0.self_attn.q_proj.weight", "embed_tokens.weight")):
            names[name.split(".")[-2]] = {key for key in session.optimizer.state[p] if key != "step"}
    return type(session.optimizer.inner).__name__, names


OPTIMIZERS = {
    "muon": ("Muon", {"q_proj": {"momentum_buffer"}, "embed_tokens": {"exp_avg", "exp_avg_sq"}}),
    "adafactor": ("Adafactor", {"q_proj": {"row_var", "col_var"}, "embed_tokens": {"row_var", "col_var"}}),
    "lion": ("Lion", {"q_proj": {"exp_avg"}, "embed_tokens": {"exp_avg"}}),
}


@pytest.mark.effect("optimizer.name", "class of the optimizer and names of its states")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_named_optimizer_has_its_states(name: str, tmp_path: Path) -> None:
    found = run(tmp_path, probe=states_of_matrices, train={"steps": 1}, optimizer={"name": name})
    assert found.facts[0] == OPTIMIZERS[name]


@pytest.mark.effect("optimizer.name", "onebit-adam: bytes of a step, which become signs after the freeze")
@pytest.mark.effect("optimizer.freeze_steps", "bytes of the steps: of gradients up to step 2, then of signs")
def test_messages_are_signs_after_the_freeze(tmp_path: Path) -> None:
    optimizer = {"name": "onebit-adam", "freeze_steps": 2, "warmup_steps": 1}
    plan = {"parallel": {"zero": 0}, "comm": {"compression": "1-bit"}, "precision": {"param_dtype": "fp32"}}
    found = run(tmp_path, 2, train={"steps": 3}, optimizer=optimizer, plan=plan)
    first, second, frozen = (row.comm_bytes for row in found.metrics)
    assert first == second
    assert 0 < frozen < first / 10


# Functions of the user


def seven(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss of 7 for each target."""
    assert logits.shape == (*targets.shape, 300)
    return 0 * logits.float().sum() + 7 * (targets != -100).sum()


def halves(step: int, steps: int, settings: Optimizer) -> float:
    return settings.lr * 0.5**step


class Follow:
    """Callback that writes each event to a file beside the run folder."""

    def __init__(self, job: Job):
        self.file = Path(job.out).parent / "events.jsonl"

    def write(self, event: str, value: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps([event, value]) + "\n")

    def on_step(self, metrics: StepMetrics) -> None:
        self.write("step", metrics.loss)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.write("evaluation", evaluation.held_out_loss)

    def on_checkpoint(self, folder: Path) -> None:
        self.write("checkpoint", folder.name)

    def on_end(self, folder: Path) -> None:
        self.write("end", folder.name)


def last_rates(session: Session) -> set[float]:
    """Learning rates of the last update."""
    return {group["lr"] for group in session.optimizer.inner.param_groups}


@pytest.fixture(scope="module")
def own_functions(tmp_path_factory: pytest.TempPathFactory) -> ObservedRun:
    """Run with a loss, a schedule and a callback of this module."""
    train = {"loss": f"{__name__}:seven", "callbacks": [f"{__name__}:Follow"]}
    optimizer = {"schedule": f"{__name__}:halves", "lr": 0.5}
    tables = {"train": train, "optimizer": optimizer, "checkpoint": {"every": 2}}
    return run(tmp_path_factory.mktemp("own"), probe=last_rates, **tables)


@pytest.mark.effect("train.loss", "losses of the steps and the evaluation, which are a constant of the own function")
def test_losses_are_those_of_the_own_function(own_functions: ObservedRun) -> None:
    assert own_functions.losses == [7.0, 7.0]
    assert [row.grad_norm for row in own_functions.metrics] == [0.0, 0.0]
    evaluations = read_evaluations(own_functions.folder / "evaluations.jsonl")
    assert [evaluation.held_out_loss for evaluation in evaluations] == [7.0]


@pytest.mark.effect("train.callbacks", "events that the callback wrote to a file")
def test_the_callback_sees_every_event(own_functions: ObservedRun) -> None:
    lines = (own_functions.folder.parent / "events.jsonl").read_text().splitlines()
    assert sorted(json.loads(line) for line in lines) == [
        ["checkpoint", "step-00000002"],
        ["end", "run"],
        ["evaluation", 7.0],
        ["step", 7.0],
        ["step", 7.0],
    ]


@pytest.mark.effect("optimizer.schedule", "learning rate of the last update, of a function of the user")
def test_rates_are_those_of_the_own_function(own_functions: ObservedRun) -> None:
    assert [row.learning_rate for row in own_functions.metrics] == [0.25, 0.125]
    assert own_functions.facts == [{0.125}]


# Routers


def biases_of_routers(session: Session) -> dict[str, Tensor]:
    """Correction biases of the routers."""
    return {name: bias for name, bias in session.model.named_buffers() if name.endswith("e_score_correction_bias")}


@pytest.mark.effect("train.router_bias_rate", "correction biases after one step, which are plus or minus the rate")
@pytest.mark.effect("train.router_z_loss", "gradient norm, which a large factor dominates, and z-loss of the step")
def test_a_step_moves_biases_and_trains_on_the_z_loss(tmp_path: Path) -> None:
    config = {**family("deepseek_v3"), "first_k_dense_replace": 0, "vocab_size": 300}
    train = {"steps": 1, "router_bias_rate": 0.05, "router_z_loss": 1e6}
    found = run(tmp_path, probe=biases_of_routers, model={"config": config}, train=train)
    assert len(found.facts[0]) == 2
    for bias in found.facts[0].values():
        assert {round(value, 6) for value in bias.tolist()} <= {-0.05, 0.0, 0.05}
        assert bias.abs().max() > 0
    (row,) = found.metrics
    assert row.router_z_loss is not None
    assert row.grad_norm > 1000


# Profile


@pytest.mark.effect("train.profile_steps", "steps in the record of the profile")
@pytest.mark.effect("train.profile_ranks", "files in profile/: those of rank 1 alone")
@pytest.mark.effect("train.profile_only", "last step, two after the profile; no evaluation and no export")
def test_a_profile_is_of_its_steps_and_ranks_and_ends_the_run(tmp_path: Path) -> None:
    train = {"steps": 50, "profile_steps": "4-5", "profile_ranks": [1], "profile_only": True}
    found = run(tmp_path, 2, train=train)
    assert {path.name for path in (found.folder / "profile").iterdir()} == {"rank-1.json", "rank-1.trace.json"}
    record = json.loads((found.folder / "profile" / "rank-1.json").read_text())
    assert [step for step, _, _ in record["steps"]] == [4, 5]
    assert [row.step for row in found.metrics] == list(range(1, 8))
    assert not (found.folder / "export").exists()
    assert not (found.folder / "evaluations.jsonl").exists()
