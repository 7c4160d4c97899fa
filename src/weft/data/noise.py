"""Noise of diffusion: straight lines between image and noise, or a DDPMScheduler of Diffusers."""

import inspect
from typing import Any

import torch
from torch import Tensor

from weft.errors import JobError, nearest
from weft.job import Task
from weft.own_code import import_extra


def make_scheduler(task: Task) -> Any:
    """DDPMScheduler of Diffusers of a task; None for flow matching.

    Raises:
        JobError: an argument in `task.scheduler` is unknown or refused.
    """
    given, where = task.scheduler, "task.scheduler"
    if task.noise == "flow":
        if given:
            raise JobError(
                f'{where} = {given} with task.noise = "flow"',
                where=where,
                rule="flow matching adds noise along straight lines, without a scheduler",
                fix=f'set task.noise = "ddpm", or remove {where}',
            )
        return None
    library = import_extra("diffusers", "tasks", "task.noise", "the scheduler is that of Diffusers")
    known = list(inspect.signature(library.DDPMScheduler).parameters)
    for name in given:
        if name not in known:
            rule = "keys are the arguments of DDPMScheduler of Diffusers"
            raise JobError(f"{name} is no key of {where}", where=where, rule=rule, fix=nearest(name, known))
    if str(given.get("variance_type", "")).startswith("learned"):
        raise JobError(
            f"{where}.variance_type = {given['variance_type']!r}",
            where=where,
            rule="the loss is the squared error of the prediction, which does not train a variance",
            fix=f"remove {where}.variance_type",
        )
    try:
        scheduler = library.DDPMScheduler(**given)
        blank = torch.zeros(1, 1, 1, 1)
        _targets(scheduler, blank, blank, torch.zeros(1, dtype=torch.int64))
    except Exception as error:  # the library raises many types of exceptions
        raise JobError(
            f"{where} = {given} is refused: {type(error).__name__}: {error}",
            where=where,
            rule='arguments have values that DDPMScheduler knows, such as prediction_type = "v_prediction"',
            fix="correct the value",
        ) from None
    return scheduler


def add_noise(task: Task, scheduler: Any, image: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy image, what the model predicts of it, and its timestep.

    Of flow matching (Liu et al., 2022; Lipman et al., 2022) at level t in (0, 1): (1 - t) image + t noise, noise - image, and
    1000 t, as in FlowMatchEulerDiscreteScheduler of Diffusers.

    Args:
        scheduler: result of `make_scheduler`.
        image: float32 [channels, height, width].
        generator: random numbers of the row.
    """
    noise = torch.randn(image.shape, generator=generator)
    if (task.timesteps or ("uniform" if scheduler else "logit_normal")) == "uniform":
        level = torch.rand((), generator=generator)
    else:
        level = torch.randn((), generator=generator).sigmoid()
    if scheduler is None:
        return (1 - level) * image + level * noise, noise - image, level * 1000
    count = scheduler.config.num_train_timesteps
    step = (level * count).long().clamp(max=count - 1)
    noisy = scheduler.add_noise(image[None], noise[None], step[None])[0]
    return noisy, _targets(scheduler, image[None], noise[None], step[None])[0], step


def _targets(scheduler: Any, image: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    kind = scheduler.config.prediction_type
    if kind == "v_prediction":  # Salimans and Ho, 2022
        return scheduler.get_velocity(image, noise, step)
    return {"epsilon": noise, "sample": image}[kind]
