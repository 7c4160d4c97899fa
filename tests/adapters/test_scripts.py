"""Adapters of PEFT in scripts that train whole layers, or tokens of a tied embedding, beside them: saved as PEFT alone does."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.integrations.scripts_in_pool import plain, under
from tests.lab.adapters import WIDE, round_weights
from tests.lab.families import family
from tests.lab.pool import RankError
from weft.plan import Parallel, Plan, Precision

SCRIPT = """
import json, sys, torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

table, settings, out, batch = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**table)), LoraConfig(task_type="CAUSAL_LM", r=4, **settings))
rows = torch.randint(3, 96, (8, 12), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=batch))
for ids in loader:
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
accelerator.unwrap_model(model).save_pretrained(out, state_dict=weights, is_main_process=accelerator.is_main_process)
"""
TABLE = {key: value for key, value in family("llama").items() if key != "model_type"} | {"tie_word_embeddings": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "embedding, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "adapter of the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [5, 6]},
    "norm": {"modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", SETTINGS)
def test_parts_that_are_trained_beside_adapters_are_saved(kind: str, zero: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = json.dumps(TABLE), json.dumps(SETTINGS[kind])
    plain(str(script), *arguments, tmp_path / "plain", 4)
    plan = Plan(parallel=Parallel(zero=zero), precision=Precision(param_dtype="fp32"))
    under(plan, 2, str(script), *arguments, tmp_path / "found", 2)
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("found", "plain"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    logits = []
    for name in ("found", "plain"):
        torch.manual_seed(0)
        model = peft.PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**TABLE)), str(tmp_path / name))
        logits.append(model(torch.arange(3, 13)[None]).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def test_adapters_in_the_same_memory_are_refused(tmp_path: Path) -> None:
    """PEFT makes those of a tied head as transposed views of those of the embedding: sharded, they would not stay equal."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    with pytest.raises(RankError, match=r"are two parameters in the same memory(.|\n)*leave out ensure_weight_tying"):
        under(Plan(), 2, str(script), json.dumps(TABLE), json.dumps(settings), tmp_path / "found", 2)


@pytest.mark.parametrize("zero", [0, 3])
def test_frozen_weights_of_a_script_are_packed(zero: int, tmp_path: Path) -> None:
    """The adapters are those of the plain script on rounded weights."""
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.replace("LlamaForCausalLM(LlamaConfig(**table))", "LlamaForCausalLM.from_pretrained(table)")
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TABLE, **WIDE}))
    model.save_pretrained(tmp_path / "exact")
    round_weights(model)
    model.save_pretrained(tmp_path / "rounded")
    settings = json.dumps({"target_modules": "all-linear"})
    plain(str(script), json.dumps(str(tmp_path / "rounded")), settings, tmp_path / "plain", 4)
    precision = Precision(param_dtype="fp32", frozen_weights="nf4")
    plan = Plan(parallel=Parallel(zero=zero), precision=precision)
    under(plan, 2, str(script), json.dumps(str(tmp_path / "exact")), settings, tmp_path / "found", 2)
    found, expected = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("found", "plain"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
