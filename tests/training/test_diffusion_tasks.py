"""Diffusion with the noise of a DDPMScheduler: batches, losses of one process, samples, bad input."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from torch import Tensor

from tests.lab.runs import train_in_the_pool
from tests.lab.task_jobs import task_job
from tests.training.test_record_tasks import FP32, PLANS, losses_of, train_alone
from weft.anatomy.classes import auto_class
from weft.checkpoint.convert import to_huggingface
from weft.checkpoint.model_config import read_config
from weft.data import open_rows, prepare
from weft.data.images import scaled
from weft.data.noise import make_scheduler
from weft.errors import JobError
from weft.job import Task
from weft.observe.report import write_report
from weft.training.task_samples import GAP, draw

SCHEDULERS: dict[str, dict[str, Any]] = {
    "noise": {},
    "velocity": {"prediction_type": "v_prediction", "beta_schedule": "squaredcos_cap_v2"},
    "image": {"prediction_type": "sample", "num_train_timesteps": 40},
}


def ddpm(name: str) -> dict[str, Any]:
    return {"noise": "ddpm", "scheduler": SCHEDULERS[name]}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_noise_is_that_of_diffusers(name: str, tmp_path: Path) -> None:
    """Noisy images, timesteps and targets, from the random numbers of each position: noise, then a uniform level."""
    job = task_job("diffusion", tmp_path, task=ddpm(name))
    config = auto_class("diffusion", read_config(job.model, "diffusion")).from_config(job.model.config).config
    prepared = prepare(job.data, model_folder=None, log=lambda text: None, task=job.task)
    rows = open_rows(job, prepared, config, held_out=False)
    batch = rows.collate(range(4), 4)
    scheduler = DDPMScheduler(**SCHEDULERS[name])
    images, noise, steps = [], [], []
    for position in range(4):
        example = rows.example(position)
        images.append(scaled(example.record["image"], 8, 1))
        noise.append(torch.randn(1, 8, 8, generator=example.generator))
        steps.append(int(torch.rand((), generator=example.generator) * scheduler.config.num_train_timesteps))
    image, added, timesteps = torch.stack(images), torch.stack(noise), torch.tensor(steps)
    wanted = {"noise": added, "velocity": scheduler.get_velocity(image, added, timesteps), "image": image}[name]
    torch.testing.assert_close(batch.inputs["hidden_states"], scheduler.add_noise(image, added, timesteps))
    assert torch.equal(batch.inputs["timestep"], timesteps)
    assert batch.predicted is not None
    torch.testing.assert_close(batch.predicted, wanted)


@pytest.mark.parametrize("name", ["noise", "velocity"])
def test_ddpm_trains_as_one_process(name: str, tmp_path: Path) -> None:
    """On one rank in one micro-batch, with the classes that DiT leaves out; and under ZeRO 3 as under ZeRO 0."""
    job = task_job("diffusion", tmp_path, task=ddpm(name), train={"micro_batch_size": 6})
    losses, weights = train_alone(job)
    out, _ = train_in_the_pool(job, 1)
    assert losses_of(out) == pytest.approx(losses, rel=1e-5)
    model = auto_class("diffusion", read_config(job.model, "diffusion")).from_pretrained(out / "export")
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(weight, weights[key], rtol=1e-4, atol=2e-5, msg=key)
    found = []
    for plan in PLANS.values():
        out, _ = train_in_the_pool(task_job("diffusion", tmp_path, task=ddpm(name), plan={**FP32, **plan}), 2)
        found.append(losses_of(out))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_exports_have_the_scheduler(tmp_path: Path) -> None:
    """The exports of a run and of a checkpoint have the scheduler; the report says how to use it."""
    out, _ = train_in_the_pool(task_job("diffusion", tmp_path, task=ddpm("velocity"), checkpoint={"every": 3}), 1)
    to_huggingface(out / "step-00000003", tmp_path / "exported", run=out)
    for folder in (out / "export", tmp_path / "exported"):
        scheduler = DDPMScheduler.from_pretrained(folder)
        assert scheduler.config.prediction_type == "v_prediction"
        assert scheduler.config.beta_schedule == "squaredcos_cap_v2"
    page = write_report(out).read_text()
    assert "DDPMScheduler" in page
    assert "data:image/png;base64," in page
    assert "50 steps" in json.loads((out / "run.json").read_text())["sample"]


@pytest.mark.parametrize("name", ["flow", *SCHEDULERS])
def test_samples_of_a_perfect_model(name: str, tmp_path: Path) -> None:
    """A model that knows the image is drawn along its predictions to this image."""
    image = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    task = Task(kind="diffusion", **({} if name == "flow" else ddpm(name)))
    scheduler = make_scheduler(task)

    def perfect(hidden_states: Tensor, timestep: Tensor) -> Any:
        if scheduler is None:
            return SimpleNamespace(sample=(hidden_states - image) / (timestep[0] / 1000))
        kept = scheduler.alphas_cumprod[timestep[0]]
        noise = (hidden_states - kept.sqrt() * image) / (1 - kept).sqrt()
        velocity = kept.sqrt() * noise - (1 - kept).sqrt() * image
        found = {"noise": noise, "velocity": velocity, "image": image.expand_as(hidden_states)}[name]
        return SimpleNamespace(sample=found)

    perfect.config = SimpleNamespace(sample_size=8, in_channels=1)  # type: ignore[attr-defined]
    said = draw(perfect, tmp_path / "sample.png", scheduler, columns=2, rows=1)
    assert f"{40 if name == 'image' else 50} steps" in said
    picture = np.asarray(Image.open(tmp_path / "sample.png").convert("L")).astype(int)
    wanted = np.kron(((image[0] + 1) * 127.5).round().numpy(), np.ones((6, 6)))
    for begin in (0, 48 + GAP):
        assert abs(picture[:, begin : begin + 48] - wanted).max() <= 1


@pytest.mark.parametrize(
    ("name", "task", "problem"),
    [
        ("diffusion", {"scheduler": {"beta_end": 0.01}}, 'with task.noise = "flow"'),
        ("diffusion", {"noise": "ddpm", "scheduler": {"beta_start_": 0.1}}, "beta_start_ is no key of task.scheduler"),
        ("diffusion", {"noise": "ddpm", "scheduler": {"beta_schedule": "steep"}}, "steep is not implemented"),
        ("diffusion", {"noise": "ddpm", "scheduler": {"prediction_type": "score"}}, "KeyError: 'score'"),
        ("diffusion", {"noise": "ddpm", "scheduler": {"variance_type": "learned"}}, "task.scheduler.variance_type"),
        ("seq2seq", {"noise": "ddpm"}, "task.noise = 'ddpm' with task.kind = 'seq2seq'"),
        ("masked", {"scheduler": {"beta_end": 0.01}}, "task.scheduler"),
    ],
)
def test_bad_noise_is_refused(name: str, task: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        train_in_the_pool(task_job(name, tmp_path, task=task), 2)
    assert problem in str(caught.value)
    assert not (tmp_path / "run").exists()
