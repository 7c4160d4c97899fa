"""Parts of a model that a loop calls, without the forward of the model, gather their weights and reduce their gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import weft
from tests.lab.families import family
from tests.lab.loops import Loop, check_loop, train_on_rank
from tests.lab.parity import plan_for
from tests.lab.pool import RankError, run_ranks


def llama(tied: bool) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**family("llama"), "tie_word_embeddings": tied}))


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(kind: str, model: Any, step: int, rank: int) -> Tensor:
    ids = ids_of(step, rank)
    if kind == "body and head":
        logits = model.lm_head(model.model(input_ids=ids).last_hidden_state)
    elif kind == "embedding":
        logits = model(inputs_embeds=model.get_input_embeddings()(ids) * 1.01).logits
    else:  # the whole model, and its head once more
        output = model(input_ids=ids, output_hidden_states=True)
        logits = output.logits + model.lm_head(output.hidden_states[1])
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied head"])
@pytest.mark.parametrize("kind", ["body and head", "embedding", "head again"])
def test_parts_of_a_model_train_as_in_one_process(kind: str, tied: bool, zero: int) -> None:
    check_loop(Loop(partial(llama, tied), partial(loss, kind)), plan_for("fp32", zero=zero), tolerance=1e-5)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"tp": 2, "sp": False, "zero": 0}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["body and head", "embedding"])
def test_parts_are_refused_where_ranks_share_rows(kind: str, parallel: dict[str, Any]) -> None:
    with pytest.raises(RankError, match=r"PlanError: a call of model.embed_tokens alone under tp = "):
        run_ranks(2, train_on_rank, Loop(partial(llama, False), partial(loss, kind)), plan_for("fp32", **parallel))


def layer_of_a_block(model: Any, step: int, rank: int) -> Tensor:
    return model.model.layers[0].mlp(torch.ones(1, 32)).square().mean()


def test_a_layer_of_a_block_alone_is_explained() -> None:
    with pytest.raises(RankError, match=r"ModelError: an operation on a full tensor and on a shard of this rank"):
        run_ranks(2, train_on_rank, Loop(partial(llama, False), layer_of_a_block), plan_for("fp32", zero=2))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, initializer_factor=3.0, decoder_start_token_id=0)
    ).eval()


def generate(rank: int, ranks: int, zero: int) -> Tensor:
    run = weft.prepare(t5(), optimizer=torch.optim.AdamW, plan=plan_for("fp32", zero=zero))
    with torch.no_grad():
        return run.model.generate(ids_of(0, 0), max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_an_encoder_decoder_generates(zero: int) -> None:
    expected = t5().generate(ids_of(0, 0), max_new_tokens=6, do_sample=False)
    assert len(set(expected.flatten().tolist())) > 2
    for found in run_ranks(2, generate, zero):
        assert torch.equal(found, expected)
