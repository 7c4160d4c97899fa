"""Your own training loop: `python own_loop.py` on one rank, `torchrun --nproc-per-node 2 own_loop.py` on two."""

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import weft

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXTS = [f"{n} plus {n} is {2 * n}. " * (1 + n % 4) for n in range(64)]  # rows of unequal lengths


def main() -> None:
    """Train a small Llama on eight batches of eight texts."""
    weft.init()  # joins the ranks of torchrun, srun or mpirun; plain python is one rank
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **SIZES))
    # ZeRO-3 over all ranks; plan="plan.toml" for any other plan
    run = weft.prepare(model, optimizer=lambda shards: torch.optim.AdamW(shards, lr=3e-3))

    for step in range(8):
        texts = TEXTS[8 * step : 8 * step + 8][run.data_rank :: run.data_ranks]  # rows of this rank
        tokens = [torch.tensor(list(text.encode()), device=run.torch_device) for text in texts]
        rows = pad_sequence(tokens, batch_first=True)
        labels = rows.masked_fill(rows == 0, -100)  # no loss on padding
        with run.accumulate():
            loss = run.backward(run.model(input_ids=rows, attention_mask=(rows > 0).long(), labels=labels).loss)
        run.clip_grad_norm_(1.0)
        run.step()
        if run.rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}")  # the mean over the targets of all ranks
    torch.distributed.destroy_process_group()


main()
