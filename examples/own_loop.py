"""Your own training loop on several ranks: torchrun --nproc-per-node 2 examples/own_loop.py"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.cluster.device import detect
from weft.cluster.launch import connect, rank_main
from weft.plan import Precision


def main() -> None:
    """Train a small Llama to count."""
    device = detect()
    rank, ranks, local_rank = connect(device)  # what torchrun set; plain python is one rank
    place = device.torch_device(local_rank)

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    plan = weft.Plan(precision=Precision(forward="fp32"))  # weights and optimizer are sharded over all ranks
    mesh = weft.build_mesh(plan, device.type, ranks)
    with place:
        model = LlamaForCausalLM(config)
    weft.parallelize(model, plan, mesh)  # in place: the class, the forward and the names stay
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    rows = (torch.arange(32) * torch.arange(1, 9)[:, None]) % 256  # eight rows that count by one, by two, ...
    mine = rows.chunk(ranks)[rank].to(place)
    for step in range(1, 21):
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:2}  loss {mean.item():.4f}")
    dist.destroy_process_group()


rank_main(main)  # ends the rank without the abort that gloo's threads cause now and then
