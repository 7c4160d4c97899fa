"""Your own training loop: `python own_loop.py` on one rank, `torchrun --nproc-per-node 2 own_loop.py` on two."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.device.device import detect
from weft.launch.launcher import connect, rank_main
from weft.topology.mesh import data_rank

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = [f"{n} plus {n} is {2 * n}. " * (1 + n % 4) for n in range(64)]  # rows of unequal lengths


def main() -> None:
    """Train a small Llama on eight batches of eight texts."""
    hardware = detect()
    rank, ranks, local_rank = connect(hardware)  # set by torchrun; plain python is one rank
    device = hardware.torch_device(local_rank)
    plan = weft.Plan().resolve(ranks)  # ZeRO-3 over all ranks; tp, cp, ep are keys of plan.parallel
    mesh = weft.build_mesh(plan, hardware.type, ranks)

    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES)).to(device)
    weft.parallelize(model, plan, mesh)  # in place: class, forward and parameter names stay
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(8):
        texts = TEXTS[8 * step : 8 * step + 8][data_rank(mesh) :: plan.parallel.data_ranks]  # rows of this rank
        rows = pad_sequence([torch.tensor(list(text.encode())) for text in texts], batch_first=True).to(device)
        labels = rows.masked_fill(rows == 0, -100)  # no loss on padding
        loss = model(input_ids=rows, attention_mask=(rows > 0).long(), labels=labels).loss  # mean over all targets
        loss.backward()
        weft.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}")
    torch.distributed.destroy_process_group()


rank_main(main)  # reports an error to the launcher and exits
