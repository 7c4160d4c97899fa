"""Effects of the tables adapter, task and distillation on a run of `weft train`: modules, batches, outputs of a rank."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.lab.adapters import start_folder
from tests.lab.families import family
from tests.lab.jobs import write_job
from tests.lab.runs import observe
from tests.lab.task_jobs import MODELS, counted_words, task_job
from weft.compat import find_hook
from weft.errors import DataError, JobError
from weft.job import Data, Job
from weft.parallel.runtime import runtime
from weft.precision.dtypes import DTYPES
from weft.training.session import Session

SEQ_LEN, ROWS = 16, 8
NO_CHANGE = {"lr": 1e-30, "weight_decay": 0.0}
"""Optimizer whose steps are too small for float32: the export of a run has the weights of its start."""


@dataclass
class Calls:
    """Inputs and outputs of modules in training, by module; a forward pre-hook of the model, so that a probe finds it."""

    inputs: dict[str, list[Any]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Leave the arguments unchanged."""

    def keep(self, name: str, module: nn.Module) -> None:
        """Keep the calls of a module under a name."""

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            self.inputs.setdefault(name, []).append(args[0].detach().clone() if args else kwargs)
            found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
            self.outputs.setdefault(name, []).append(None if found is None else found.detach().clone())

        module.register_forward_hook(hook, with_kwargs=True)


def calls_of(session: Session) -> Calls:
    """Calls that a fault has kept in the rank of a session."""
    found = find_hook(session.model, Calls)
    assert found is not None
    return found


def rows_table(folder: Path, **data: Any) -> dict[str, Any]:
    """Data table of ready rows of random tokens."""
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(3, 96, (ROWS, SEQ_LEN + 1)))
    return {"source": "tokens", "path": str(folder / "rows.npy"), "seq_len": SEQ_LEN, "held_out": 0.0, **data}


# Adapters


LAYER = "model.layers.0.self_attn.q_proj"


def keep_calls_of_adapter(session: Session) -> None:
    found, layer = Calls(), session.model.get_submodule(LAYER)
    session.model.register_forward_pre_hook(found)
    found.keep("layer", layer)
    for name in ("base_layer", "lora_A.default", "lora_B.default"):
        found.keep(name, layer.get_submodule(name))


def trained_parameters(session: Session) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that the optimizer of a rank updates."""
    updated = {id(p) for group in session.optimizer.inner.param_groups for p in group["params"]}
    return {name: tuple(p.shape) for name, p in session.model.named_parameters() if id(p) in updated}


def adapter_facts(session: Session) -> dict[str, Any]:
    found = calls_of(session)
    out, base, last = (found.outputs[name][0] for name in ("layer", "base_layer", "lora_B.default"))
    dropped = (found.inputs["lora_A.default"][0] == 0).float().mean().item()
    return {"trained": trained_parameters(session), "added": out - base, "last": last, "dropped": dropped}


def adapter_job(folder: Path, **adapter: Any) -> Job:
    tables: dict[str, Any] = {"model": {"config": family("llama")}, "optimizer": NO_CHANGE, "train": {"steps": 1}}
    return Job.load(write_job(folder, data=rows_table(folder), adapter=adapter, **tables))


@pytest.mark.effect("adapter.kind", "parameters of the optimizer: A and B of each target alone")
@pytest.mark.effect("adapter.targets", "parameters of the optimizer: adapters of the named layers alone")
@pytest.mark.effect("adapter.r", "shapes of A and B: 4 rows and columns")
@pytest.mark.effect("adapter.alpha", "what a layer adds to its base layer, divided by the output of B: alpha / r")
@pytest.mark.effect("adapter.dropout", "zeros in the input of A: a quarter")
@pytest.mark.effect("adapter.path", "exported adapter after steps of size zero: that of the folder")
def test_lora_on_two_projections(tmp_path: Path) -> None:
    folder = start_folder(tmp_path / "start", family("llama"), "lora", ["q_proj", "v_proj"], r=4)
    targets = ["q_proj", "v_proj"]
    job = adapter_job(tmp_path, kind="lora", targets=targets, r=4, alpha=8.0, dropout=0.25, path=str(folder))
    run = observe(job, 1, fault=keep_calls_of_adapter, probe=adapter_facts)
    facts = run.facts[0]
    columns = {"q_proj": 32, "v_proj": 16}
    assert facts["trained"] == {
        f"model.layers.{block}.self_attn.{name}.lora_{part}.default.weight": shape
        for block in range(2)
        for name in targets
        for part, shape in (("A", (4, 32)), ("B", (columns[name], 4)))
    }
    torch.testing.assert_close(facts["added"], 2.0 * facts["last"], rtol=1e-4, atol=1e-6)
    assert facts["last"].abs().max() > 1e-3
    assert facts["dropped"] == pytest.approx(0.25, abs=0.05)
    start, export = (load_file(path / "adapter_model.safetensors") for path in (folder, run.folder / "export"))
    assert start.keys() == export.keys()
    for name, weight in start.items():
        torch.testing.assert_close(export[name], weight, rtol=0, atol=1e-20, msg=name)


@pytest.mark.effect("adapter.kind", "dora: also a trained norm of each target")
@pytest.mark.effect("adapter.base", "digest in job.toml of the run; a job with another digest is refused at start")
def test_dora_and_the_digest_of_its_base(tmp_path: Path) -> None:
    job = adapter_job(tmp_path, kind="dora", targets=["q_proj"])
    run = observe(job, 1, probe=trained_parameters)
    parts = {name.removeprefix(f"{LAYER}.") for name in run.facts[0] if name.startswith(LAYER)}
    assert parts == {"lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"}
    digest = Job.load(run.folder / "job.toml").adapter.base
    assert len(digest) == 32
    other = adapter_job(tmp_path, kind="dora", targets=["q_proj"], base="0" * 32)
    with pytest.raises(JobError, match="belongs to a model with digest 000000000000"):
        observe(other, 1)
    assert Job.load(run.folder / "job.toml").adapter.base == digest  # the refused run has left the folder alone


# Tasks


def class_of_model(session: Session) -> str:
    return type(session.model).__name__


@pytest.mark.effect("task.kind", "masked: class of the model of a rank, one with a head for hidden tokens")
@pytest.mark.effect("task.mask_fraction", "target tokens of the steps: half of the tokens of their rows")
def test_a_masked_model_predicts_half_of_its_tokens(tmp_path: Path) -> None:
    job = task_job("masked", tmp_path, task={"mask_fraction": 0.5}, data={"held_out": 0.0})
    run = observe(job, 1, probe=class_of_model)
    assert run.facts == ["BertForMaskedLM"]
    targets = sum(row.tokens for row in run.metrics)
    assert targets / (3 * 6 * 16) == pytest.approx(0.5, abs=0.1)  # rows of three steps


def renamed_words(data: Data) -> Iterator[dict[str, Any]]:
    """Sentences under another name, and a class from their number of words."""
    for record in counted_words(data):
        yield {"words of it": record["text"], "label": record["label"]}


def classifier_facts(session: Session) -> tuple[str, tuple[int, ...], Any]:
    """Class of the model, shape of its classifier, and the first record of the rank."""
    return class_of_model(session), tuple(session.model.classifier.weight.shape), session.train_rows.read(0)


@pytest.mark.effect("task.kind", "classification: class of the model of a rank, one with a classifier")
@pytest.mark.effect(
    "task.fields", "text of a record in a rank: that of the named field; without the name, it is refused"
)
@pytest.mark.effect(
    "task.classes", "rows of the classifier of a rank and of the export: three, instead of five in the folder"
)
def test_a_classifier_of_other_fields_and_classes(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**{**MODELS["text classification"], "num_labels": 5})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "base")
    source = {"source": f"{__name__}:renamed_words", "held_out": 0.0}
    task = {"classes": 3, "fields": {"text": "words of it"}}
    job = task_job("text classification", tmp_path, data=source, task=task, train={"steps": 1})
    job = job.model_copy(
        update={"model": job.model.model_copy(update={"path": str(tmp_path / "base"), "config": None})}
    )
    with pytest.raises(DataError, match="the records have the fields words of it, label"):
        observe(job.model_copy(update={"task": job.task.model_copy(update={"fields": {}})}), 1)
    run = observe(job, 1, probe=classifier_facts)
    name, shape, record = run.facts[0]
    assert (name, shape) == ("BertForSequenceClassification", (3, 32))
    assert record["text"] in {found["text"] for found in counted_words(None)}
    assert load_file(run.folder / "export" / "model.safetensors")["classifier.weight"].shape == (3, 32)


def keep_timesteps(session: Session) -> None:
    found = Calls()
    session.model.register_forward_pre_hook(found)
    found.keep("model", session.model)


def timesteps(session: Session) -> tuple[Tensor, Tensor]:
    """Timesteps that the model got in the steps of a rank, and those of logit-normal levels of the same rows."""
    rows = session.job.train.steps * session.job.train.global_batch_size
    expected = []
    for position in range(rows):
        generator = session.train_rows.example(position).generator
        torch.randn(1, 8, 8, generator=generator)  # noise of the image
        expected.append(int(torch.randn((), generator=generator).sigmoid() * 40))
    return torch.cat([found["timestep"] for found in calls_of(session).inputs["model"]])[:rows], torch.tensor(expected)


@pytest.mark.effect("task.kind", "diffusion: arguments of the model of a rank: timesteps")
@pytest.mark.effect("task.noise", "ddpm: timesteps that the model gets are whole numbers; the export has a scheduler")
@pytest.mark.effect("task.scheduler", "timesteps that the model gets: below the 40 of the scheduler, which is exported")
@pytest.mark.effect("task.timesteps", "logit_normal: timesteps that the model gets are those of normal random numbers")
def test_noise_of_a_scheduler_in_the_middle_of_its_timesteps(tmp_path: Path) -> None:
    task = {"noise": "ddpm", "scheduler": {"num_train_timesteps": 40}, "timesteps": "logit_normal"}
    train = {"steps": 2, "global_batch_size": 20, "micro_batch_size": 20}
    job = task_job("diffusion", tmp_path, task=task, train=train, data={"held_out": 0.0})
    run = observe(job, 1, fault=keep_timesteps, probe=timesteps)
    found, expected = run.facts[0]
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    scheduler = json.loads((run.folder / "export" / "scheduler_config.json").read_text())
    assert scheduler["num_train_timesteps"] == 40


# Distillation


TEMPERATURE, WEIGHT, HIDDEN = 4.0, 0.5, 0.25


def keep_calls_of_both(session: Session) -> None:
    found, teacher = Calls(), runtime(session.model).teacher
    assert teacher is not None
    session.model.register_forward_pre_hook(found)
    for name, model in (("student", session.model), ("teacher", teacher.model)):
        found.keep(name, model)
        found.keep(f"{name} head", model.get_output_embeddings())


@dataclass
class Taught:
    """Facts of a rank about its teacher."""

    forwards: int
    """Forwards of the teacher."""
    dtypes: set[torch.dtype]
    """Dtypes of the weights of the teacher."""
    elements: int
    """Elements of the teacher in the memory of this rank."""
    logits: list[Tensor]
    """Logits of student and teacher, in the first step."""
    hidden: list[Tensor]
    """Inputs of the output layers of student and teacher, in the first step."""


def taught(session: Session) -> Taught:
    found, teacher = calls_of(session), runtime(session.model).teacher
    assert teacher is not None
    weights, rows = list(teacher.model.parameters()), slice(2)  # micro-batches of the step; measurements have others
    return Taught(
        len(found.outputs["teacher"]),
        {p.dtype for p in weights},
        sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in weights),
        [torch.cat(found.outputs[name][rows]).double() for name in ("student", "teacher")],
        [torch.cat(found.inputs[f"{name} head"][rows]).double() for name in ("student", "teacher")],
    )


def distillation_loss(facts: list[Taught], targets: Tensor, temperature: float, weight: float, hidden: float) -> float:
    """Loss of a step, from what both models computed on all ranks."""
    student, teacher = (torch.cat([rank.logits[index] for rank in facts]).flatten(0, 1) for index in (0, 1))
    own, known = (torch.cat([rank.hidden[index] for rank in facts]).flatten(0, 1) for index in (0, 1))
    first, second = (F.log_softmax(logits / temperature, -1) for logits in (student, teacher))
    divergence = temperature**2 * F.kl_div(first, second, reduction="batchmean", log_target=True)
    error = ((own - known).square().sum(-1) / known.square().sum(-1)).mean()
    entropy = F.cross_entropy(student, targets.flatten())
    return (weight * divergence + (1 - weight) * entropy + hidden * error).item()


@pytest.mark.effect("distillation.teacher", "forwards of the teacher in a rank: one for each of two micro-batches")
@pytest.mark.effect("distillation.temperature", "loss: that of the logits of both models at this temperature, not at 1")
@pytest.mark.effect("distillation.weight", "loss: half the divergence and half the cross entropy of the logits")
@pytest.mark.effect(
    "distillation.hidden_states", "loss: with a quarter of the error of the hidden states of both models"
)
@pytest.mark.effect(
    "distillation.shard_teacher", "elements of the teacher in each of two ranks: all with false, about half with true"
)
@pytest.mark.effect("distillation.param_dtype", "dtype of the weights of the teacher, beside a student in float32")
@pytest.mark.parametrize(("dtype", "sharded"), [("bf16", False), ("fp16", True)])
def test_a_teacher_of_two_ranks(dtype: str, sharded: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    table = {**family("llama"), "initializer_range": 0.2}
    teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table))
    teacher.save_pretrained(tmp_path / "teacher")
    distillation = {
        "teacher": str(tmp_path / "teacher"),
        "temperature": TEMPERATURE,
        "weight": WEIGHT,
        "hidden_states": HIDDEN,
        "shard_teacher": sharded,
        "param_dtype": dtype,
    }
    path = write_job(
        tmp_path,
        model={"config": family("llama")},
        data=rows_table(tmp_path, shuffle=False),
        train={"steps": 1, "global_batch_size": 4, "micro_batch_size": 1, "loss": "weft:distillation"},
        distillation=distillation,
    )
    run = observe(Job.load(path), 2, fault=keep_calls_of_both, probe=taught)
    elements = sum(p.numel() for p in teacher.parameters())
    for facts in run.facts:
        assert facts.forwards == 2
        assert facts.dtypes == {DTYPES[dtype]}
        # The group of the last norm and the head is gathered from a forward to the next.
        assert elements / 2 <= facts.elements < 0.6 * elements if sharded else facts.elements == elements
    targets = torch.from_numpy(np.load(tmp_path / "rows.npy"))[:4, 1:]
    settings = {"temperature": TEMPERATURE, "weight": WEIGHT, "hidden": HIDDEN}
    assert run.losses[0] == pytest.approx(distillation_loss(run.facts, targets, **settings), rel=1e-5)
    for name, default in (("temperature", 1.0), ("weight", 1.0), ("hidden", 0.0)):
        other = distillation_loss(run.facts, targets, **{**settings, name: default})
        assert not math.isclose(run.losses[0], other, rel_tol=1e-3), name
