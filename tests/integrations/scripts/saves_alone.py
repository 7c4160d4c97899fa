"""A user's script whose main process evaluates and saves alone, as with plain data parallelism: knows nothing of Weft.

saves_alone.py OUT BATCH [evaluate] [resume]
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def main(out: Path, batch: int) -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, rng_types=["torch"])  # exchanged in each epoch
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    rows = [{"input_ids": (ids := (torch.arange(12) * (i % 7 + 1)) % 97), "labels": ids} for i in range(16)]
    loader = DataLoader(rows, batch_size=batch, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    resumed = "resume" in sys.argv
    if resumed:
        accelerator.load_state(str(out / "state"))
    result: dict[str, list[float]] = {"losses": [], "held_out": []}
    for _ in range(1 if resumed else 2):
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            result["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.is_main_process:  # the others begin the next epoch, or leave the script
            if "evaluate" in sys.argv:
                model.eval()
                with torch.no_grad():
                    for row in rows[:3]:
                        held_out = {name: values[None] for name, values in row.items()}
                        result["held_out"].append(model(**held_out).loss.item())
                model.train()
            if not (out / "state").exists():
                accelerator.save_state(str(out / "state"))
    if accelerator.is_main_process:
        (out / "result.json").write_text(json.dumps(result))
        accelerator.unwrap_model(model).save_pretrained(out / "final")


main(Path(sys.argv[1]), int(sys.argv[2]))
