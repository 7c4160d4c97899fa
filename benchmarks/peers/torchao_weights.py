"""Loss of a model whose linear layers in blocks torchao has rounded, as JSON.

    python benchmarks/peers/torchao_weights.py FOLDER ROWS.safetensors FORMAT     # int8, int4-64 (groups of 64), fp8

torchao is no dependency of Weft: pip install --no-deps --target SITE torchao, and SITE in PYTHONPATH.
"""

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torchao.quantization import (  # type: ignore[import-not-found,unused-ignore]
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from transformers import AutoModelForCausalLM

folder, file, form = sys.argv[1:]
kind, _, group = form.partition("-")
config: Any = {
    "int8": Int8WeightOnlyConfig,
    "fp8": Float8WeightOnlyConfig,
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(int(group))),
}[kind]()
model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and ".layers." in name)
rows, total = load_file(file)["rows"], 0.0
with torch.no_grad():
    for row in rows.split(1):
        logits = model(row[:, :-1], use_cache=False).logits
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"))
print(json.dumps({"loss": total / rows[:, 1:].numel()}))
