"""Training of plain Transformers from a DCP folder, in a process without Weft.

    python tests/lab/plain_dcp.py FOLDER TASK.json OUT.safetensors

The task names the configuration, the dtype, the settings of AdamW, and tokens and targets of each step. The output has the loss
of each step, and the weights after the last one.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM


def make_optimizer(model: Any, weight_decay: float, **settings: Any) -> torch.optim.Optimizer:
    """AdamW in which matrices decay, and vectors and biases do not."""
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim >= 2 and "bias" not in name.rpartition(".")[2]].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return torch.optim.AdamW([{"params": groups[key], "weight_decay": decays[key]} for key in groups], **settings)


def load(folder: Path, model: Any, optimizer: torch.optim.Optimizer, *, flat: bool) -> int:
    """Load weights and optimizer state; returns the step.

    Args:
        flat: as torchtitan, with names of parameters in the settings; False: with numbers of groups, the default of torch.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {**weights, "optimizer": states, "train_state": {"step": 0, "ntokens_seen": 0}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        torch_dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, {key: state[key] for key in weights})
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return state["train_state"]["step"]


def main(folder: Path, task: dict[str, Any], out: Path) -> None:
    """Load the folder and train."""
    torch.manual_seed(5)
    config = AutoConfig.for_model(**task["config"])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, task["dtype"])).train()
    optimizer = make_optimizer(model, **task["settings"])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # adds a setting to each group
    assert load(folder, model, optimizer, flat=task["flat"]) == task["step"]
    losses = []
    for tokens, targets in task["batches"]:
        wanted = torch.tensor(targets)
        logits = model(input_ids=torch.tensor(tokens), use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="sum") / (wanted != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = {name: value.detach().clone() for name, value in model.named_parameters()}
    save_file({**found, "losses": torch.tensor(losses, dtype=torch.float64)}, out)
    assert not any(name.partition(".")[0] == "weft" for name in sys.modules)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
