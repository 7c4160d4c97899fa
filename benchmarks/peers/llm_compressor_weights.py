"""Loss of a model whose linear layers in blocks llm-compressor has rounded with GPTQ, as JSON.

    python benchmarks/peers/llm_compressor_weights.py FOLDER ROWS.safetensors FORMAT     # int8, int4-64 (groups of 64), fp8

ROWS has calibration rows and held-out rows. llm-compressor is no dependency of Weft, and pins other versions than Weft allows:
install it in a separate environment.
"""

import json
import sys
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot  # type: ignore[import-not-found,unused-ignore]
from llmcompressor.modifiers.quantization import GPTQModifier  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

folder, file, form = sys.argv[1:]
kind, _, group = form.partition("-")
weights: dict[str, Any] = {
    "int8": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": int(group or 0)},
}[kind]
scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, **weights))
tensors = load_file(file)
calibration = tensors["calibration"]
model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
oneshot(
    model=model,
    dataset=Dataset.from_dict(
        {"input_ids": calibration.tolist(), "attention_mask": torch.ones_like(calibration).tolist()}
    ),
    recipe=GPTQModifier(config_groups={"blocks": scheme}, ignore=["lm_head"]),
    max_seq_length=calibration.shape[1],
    num_calibration_samples=len(calibration),
)
total, rows = 0.0, tensors["rows"]
with torch.no_grad():
    for row in rows.split(1):
        logits = model(row[:, :-1], use_cache=False).logits
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"))
print(json.dumps({"loss": total / rows[:, 1:].numel()}))
