"""Cost of the profiler of `weft profile`: processor time of plain and of profiled steps, in turns, in one process.

python benchmarks/profile_cost.py
"""

import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weft.device.detect import detect

ROUNDS, STEPS, WARM_UP = 6, 4, 3
CONFIG = {"vocab_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG))
    optimizer, rows = torch.optim.AdamW(model.parameters()), torch.randint(2048, (2, 256))

    def step() -> float:
        start = time.process_time()
        for _ in range(2):
            model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - start

    for _ in range(WARM_UP):
        step()
    plain, profiled = list[float](), list[float]()
    for _ in range(ROUNDS):
        plain += [step() for _ in range(STEPS)]
        profiler = detect().profiler()
        profiler.start()
        profiled += [step() for _ in range(STEPS)]
        profiler.stop()
    middle = [statistics.median(times) for times in (plain, profiled)]
    ratios = statistics.quantiles([b / a for a, b in zip(plain, profiled, strict=True)], n=4)
    print(f"plain {middle[0] * 1e3:.0f} ms, profiled {middle[1] * 1e3:.0f} ms, ratio {middle[1] / middle[0]:.3f}")
    print(f"quartiles of the ratio of {len(plain)} pairs: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")


if __name__ == "__main__":
    main()
