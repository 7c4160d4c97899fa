"""Your own training loop on several ranks: torchrun --nproc-per-node 2 examples/own_loop.py"""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.plan import Precision

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
else:  # started with plain python: one rank
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights on every rank
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
plan = weft.Plan(precision=Precision(forward="fp32"))  # by default, weights and optimizer are sharded over all ranks
mesh = weft.build_mesh(plan, "cpu", ranks)
model = weft.parallelize(LlamaForCausalLM(config), plan, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

rows = (torch.arange(32) * torch.arange(1, 9)[:, None]) % 256  # eight rows that count by one, by two, ...
mine = rows.chunk(ranks)[rank]
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
