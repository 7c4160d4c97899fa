"""States of a step of a custom loop, without ranks."""

import pytest
import torch

from weft.errors import ModelError
from weft.training.own_step import FOLLOWING, OwnStep, StepGradients, StepState


def in_state(state: StepState) -> OwnStep:
    step = OwnStep()
    step.state = state
    return step


def backward(step: OwnStep) -> None:
    step.check_backward()
    step.go(StepState.BACKWARD)
    step.gradients.add(torch.ones(()), torch.ones((), dtype=torch.float64), is_counted=True)
    step.finish_backward()


def test_a_step_of_two_micro_batches() -> None:
    step, states = OwnStep(), []
    for last in (False, True):
        step.check_enter()
        step.enter(last)
        states.append((step.state, step.has_several))
        backward(step)
        states.append((step.state, step.is_complete))
        step.leave()
        states.append((step.state, step.is_complete))
    assert states == [
        (StepState.FORWARD, True),
        (StepState.BACKWARD, False),
        (StepState.IDLE, False),
        (StepState.FORWARD, True),
        (StepState.REDUCED, True),
        (StepState.COMPLETE, True),
    ]
    step.check_complete("step")
    step.leave()  # once more, of an outer accumulate
    assert step.state is StepState.COMPLETE


def test_a_micro_batch_without_backward_leaves_the_step_as_it_was() -> None:
    step = OwnStep()
    step.enter(last=True)
    step.leave()
    assert (step.state, step.is_begun) == (StepState.IDLE, False)


@pytest.mark.parametrize("state", StepState)
@pytest.mark.parametrize("following", StepState)
def test_a_wrong_transition_names_both_states(state: StepState, following: StepState) -> None:
    step = in_state(state)
    if following in FOLLOWING[state]:
        step.go(following)
        assert step.state is following
    else:
        with pytest.raises(AssertionError, match=f"goes from {state.name} to {following.name}"):
            step.go(following)
        assert step.state is state


@pytest.mark.parametrize("state", StepState)
def test_what_a_loop_may_call_in_each_state(state: StepState) -> None:
    refused = []
    checks = (OwnStep.check_enter, OwnStep.check_backward, lambda step: step.check_complete("step"))
    for check in checks:
        try:
            check(in_state(state))
        except ModelError as error:
            refused.append(error.what)
    outside = ["run.backward outside of run.accumulate"]
    second = ["a second run.backward in run.accumulate"]
    after, early = ["run.accumulate after the last micro-batch of a step"], ["run.step without the gradients of a step"]
    assert (
        refused
        == {
            StepState.IDLE: outside + early,
            StepState.FORWARD: early,
            StepState.BACKWARD: second + early,
            StepState.REDUCED: after + second,
            StepState.COMPLETE: after + outside,
        }[state]
    )


def test_micro_batches_are_averaged_by_their_weights() -> None:
    gradients = StepGradients()
    losses, weights = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 1.0], dtype=torch.float64)
    factors = [gradients.add(*pair, is_counted=True).item() for pair in zip(losses, weights, strict=True)]
    assert factors == [1.0, pytest.approx(1 / 3)]
    assert (gradients.loss(), gradients.share()) == (1.75, 0.75)
    empty = StepGradients()
    empty.add(torch.zeros(()), torch.zeros((), dtype=torch.float64), is_counted=True)
    assert (empty.loss(), empty.share()) == (0.0, 1.0)
