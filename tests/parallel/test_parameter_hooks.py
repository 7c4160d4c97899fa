"""Hooks of `parameter.register_hook` get full gradients under ZeRO, or are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import weft
from tests.lab.families import family
from tests.lab.loops import Loop, check_loop, train_on_rank
from tests.lab.parity import plan_for
from tests.lab.pool import RankError, run_ranks
from weft.plan import Parallel, Plan, Precision

NEW = 90  # rows from here on are trained


def hooked(removed: bool = False) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**family("llama"), "tie_word_embeddings": True}))
    weight = model.get_input_embeddings().weight
    mask = torch.zeros(len(weight), 1)
    mask[NEW:] = 1
    handles = [weight.register_hook(lambda gradient: gradient * mask), weight.register_hook(lambda gradient: None)]
    model.lm_head.weight.register_hook(lambda gradient: gradient * 0.5)  # the same weight
    if removed:
        handles[0].remove()
    return model


def loss(outside: bool, model: Any, step: int, rank: int) -> Tensor:
    ids = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(10 * step + rank))
    given = {"inputs_embeds": model.get_input_embeddings()(ids)} if outside else {"input_ids": ids}
    return nn.functional.cross_entropy(model(**given).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.must("hooks on parameters run under ZeRO", case="2")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_rows_that_a_hook_freezes_stay(zero: int) -> None:
    found = check_loop(Loop(hooked, partial(loss, False), decay=0.0), plan_for("fp32", zero=zero), tolerance=1e-5)
    before, after = hooked().lm_head.weight.detach(), found[0].weights["model.embed_tokens.weight"]
    assert torch.equal(after[:NEW], before[:NEW])
    assert not torch.equal(after[NEW:], before[NEW:])


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_hooks_run_where_a_layer_is_called_alone(zero: int) -> None:
    found = check_loop(Loop(untied, partial(loss, True), decay=0.0), plan_for("fp32", zero=zero), tolerance=1e-5)
    before = untied().get_input_embeddings().weight.detach()
    assert torch.equal(found[0].weights["model.embed_tokens.weight"][:NEW], before[:NEW])


def untied() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family("llama")))
    weight = model.get_input_embeddings().weight
    mask = torch.zeros(len(weight), 1)
    mask[NEW:] = 1
    weight.register_hook(lambda gradient: gradient * mask)
    return model


def test_a_removed_hook_does_not_run() -> None:
    found = run_ranks(2, train_on_rank, Loop(partial(hooked, True), partial(loss, False)), plan_for("fp32", zero=2))
    before = hooked().lm_head.weight.detach()
    assert not torch.equal(found[0].weights["model.embed_tokens.weight"][:NEW], before[:NEW])


def test_hooks_get_the_dtype_of_the_parameter() -> None:
    plan = Plan(parallel=Parallel(zero=2), precision=Precision(param_dtype="bf16"))
    found = run_ranks(2, train_on_rank, Loop(hooked, partial(loss, False), decay=0.0), plan)
    before, after = hooked().lm_head.weight.detach(), found[0].weights["model.embed_tokens.weight"]
    assert torch.equal(after[:NEW], before[:NEW])
    assert not torch.equal(after[NEW:], before[NEW:])


def with_hook_after_accumulation() -> Any:
    model = hooked()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


@pytest.mark.parametrize(
    ("make", "plan", "named"),
    [
        (hooked, plan_for("fp32", tp=2), "whose ranks of tp or ep hold parts of it"),
        (with_hook_after_accumulation, plan_for("fp32", zero=0), "after its gradient is accumulated"),
    ],
    ids=["tp", "after accumulation"],
)
def test_hooks_that_would_see_another_gradient_are_refused(make: Any, plan: Plan, named: str) -> None:
    with pytest.raises(RankError, match=f"a hook on the parameter model.embed_tokens.weight, {named}"):
        run_ranks(2, train_on_rank, Loop(make, partial(loss, False)), plan)


def hook_on_a_shard(rank: int, ranks: int) -> None:
    run = weft.prepare(hooked(), optimizer=torch.optim.AdamW, plan=plan_for("fp32", zero=3))
    run.model.model.norm.weight.register_hook(lambda gradient: gradient * 0)
    with run.accumulate():
        run.backward(loss(False, run.model, 0, rank))
    run.step()


def test_a_hook_on_a_shard_is_refused() -> None:
    with pytest.raises(RankError, match=r"a hook on model.norm.weight, which is a shard of this rank"):
        run_ranks(2, hook_on_a_shard)
