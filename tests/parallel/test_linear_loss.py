"""The loss inside of the head: which models, what it saves, and logits for those who ask for them."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.lab.families import family
from tests.lab.parity import SETTINGS, packed_batches, plan_for
from tests.lab.plans import resolved
from tests.lab.pool import run_ranks
from weft.anatomy.build import build_on_meta
from weft.anatomy.shrink import memo_of
from weft.anatomy.transformers import read_anatomy
from weft.checkpoint.loading import materialize
from weft.checkpoint.model_config import read_config
from weft.compute.cross_entropy import LogitTransform
from weft.device.detect import detect
from weft.errors import PlanError
from weft.job import Model
from weft.memory.live_bytes import LiveBytes
from weft.parallel.data.distributed_optimizer import DistributedOptimizer
from weft.parallel.loss.head_loss import choose_linear_loss, find_transform
from weft.parallel.parallelize import parallelize
from weft.parallel.runtime import runtime
from weft.plan import Compute, Kernels, Plan, Precision
from weft.topology.mesh import build_mesh
from weft.training.forward_backward import forward, token_loss
from weft.training.optimizer import build_optimizer
from weft.training.step import train_step

TRANSFORMS = {
    "llama": ({}, LogitTransform()),
    "gemma2": ({}, LogitTransform(softcap=30.0)),
    "cohere": ({"logit_scale": 0.25}, LogitTransform(0.25)),
    "granite": ({"logits_scaling": 8.0}, LogitTransform(0.125)),
    "nanochat": ({}, LogitTransform(softcap=15.0)),
    "gptj": ({}, LogitTransform()),
    "gpt2": ({}, LogitTransform()),
}


def meta_model(name: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **changes))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_a_model_does_after_its_head_is_found(name: str) -> None:
    changes, expected = TRANSFORMS[name]
    model = meta_model(name, **changes)
    assert find_transform(model, read_anatomy(model), Plan()) == (expected, "")


def test_models_whose_loss_needs_logits() -> None:
    model = meta_model("llama")
    anatomy = read_anatomy(model)
    plan = Plan(precision=Precision(param_dtype="bf16", backward="fp16", loss_scale="dynamic"))
    assert find_transform(model, anatomy, plan)[0] is None
    model.set_submodule(anatomy.head, torch.nn.Sequential(torch.nn.Linear(4096, 32000, device="meta")), strict=True)
    chunked = Plan(compute=Compute(kernels=Kernels(linear_cross_entropy="chunked")))
    assert choose_linear_loss(model, anatomy, Plan()) is None
    with pytest.raises(
        PlanError, match="linear_cross_entropy = chunked for llama: the head is a Sequential"
    ) as refusal:
        choose_linear_loss(model, anatomy, chunked)
    assert 'set linear_cross_entropy to "auto" or "reference"' in str(refusal.value)


def test_a_model_that_changes_its_logits_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiment compares losses: a scale that the configuration does not know is not overlooked."""
    model = meta_model("llama")
    kind = type(model)
    original = kind.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(kind, "forward", scaled)
    memo_of(model).clear()
    transform, reason = find_transform(model, read_anatomy(model), Plan())
    assert transform is None
    assert "not those of its head" in reason
    memo_of(model).clear()


def halve_logits(module: Any, args: Any, output: Any) -> Any:
    output.logits = output.logits / 2
    return output


def losses_and_peaks(rank: int, world_size: int, compute: Compute, axes: dict[str, Any]) -> dict[str, Any]:
    config = {**family("llama"), "vocab_size": 4096, "num_hidden_layers": 1}
    plan = resolved(plan_for("fp32", **axes).model_copy(update={"compute": compute}), world_size)
    mesh = build_mesh(plan, "cpu", world_size)
    model = parallelize(build_on_meta(read_config(Model(config=config)), torch.float32), plan, mesh)
    materialize(model, Model(config=config), torch.device("cpu"))
    model.train()
    optimizer = DistributedOptimizer(build_optimizer(model, SETTINGS), model, detect())
    (batch, *_) = packed_batches(4096, rows=8, seq_len=256)
    first = train_step(model, optimizer, [batch], 1.0)
    with LiveBytes() as live:
        optimizer.track(live)
        second = train_step(model, optimizer, [batch], 1.0)
    in_head = runtime(model).linear_loss is not None
    with torch.no_grad():
        logits = forward(model, batch).output.logits
        empty = forward(model, batch, loss_only=True)
        loss = token_loss(model, empty)
        head = model.get_output_embeddings()
        changed = []
        for module, change in ((head, lambda *args: args[2] * 2), (model, halve_logits)):
            hook = module.register_forward_hook(change)
            changed.append(token_loss(model, forward(model, batch, loss_only=True)).item())
            hook.remove()
    return {
        "changed": changed,
        "losses": (first.loss, second.loss, loss.item()),
        "peak": live.at_peak["activations"],
        "in head": in_head,
        "logits": tuple(logits.shape),
        "empty": tuple(empty.output.logits.shape),
    }


@pytest.mark.must("parity: loss without logits", case="{'zero': 3}")
@pytest.mark.parametrize("axes", [{"zero": 3}, {"tp": 2}], ids=str)
def test_no_logits_are_kept_but_for_those_who_ask(axes: dict[str, Any]) -> None:
    world_size = 2 if "tp" in axes else 1
    plain = run_ranks(world_size, losses_and_peaks, Compute(kernels=Kernels(linear_cross_entropy="reference")), axes)[0]
    found = run_ranks(world_size, losses_and_peaks, Compute(), axes)[0]
    assert (plain["in head"], found["in head"]) == (False, True)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert found["changed"] == pytest.approx(plain["changed"], rel=1e-6)  # hooks of the user see and change the logits
    assert abs(found["changed"][0] - found["losses"][2]) > 1
    assert found["logits"] == plain["logits"] == plain["empty"]
    assert found["empty"] == (*plain["empty"][:2], 1)
    logits = 4 * 8 * 256 * 4096 // world_size
    # The reference keeps the log-softmax of the logits, and makes their gradient; a chunk is a quarter of each.
    assert found["peak"] < plain["peak"] - 0.9 * logits
