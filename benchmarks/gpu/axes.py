"""The local code paths of tensor, context and expert parallelism on one accelerator: right, and how fast beside plain forms.

    python benchmarks/gpu/axes.py            # about two minutes on an H200

Checks, on the device: attention with log-sum-exp and its backward (`weft.compute.attention`) against the plain form in
float32 and against SDPA for speed; blocks of a packed causal row put together from partial results; the experts' grouped
matmul against a loop; the vocabulary-parallel loss, cut in two pieces, against cross entropy. Prints error and speed.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.compute.attention import PLAIN, primitive
from weft.device.device import detect
from weft.parallel.context import ContextParallel, attend
from weft.parallel.expert import mixture_of_experts

REPEATS = 9


def milliseconds(run: Callable[[], object], synchronize: Callable[[], None]) -> tuple[float, float, float]:
    """Median, smallest and largest time of a call."""
    times = []
    for _ in range(REPEATS + 2):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:]), min(times[2:]), max(times[2:])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def attention(place: torch.device) -> dict[str, float]:
    """Largest relative errors of the device's primitive against the plain one in float32."""
    generator = torch.Generator(place).manual_seed(0)
    q, k, v, g = (torch.randn(2, h, 512, 64, device=place, generator=generator) for h in (8, 2, 2, 8))
    found = primitive(place.type)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        for causal in (True, False):
            low = [x.to(dtype) for x in (q, k, v, g)]
            wide = [x.float() for x in low]
            out, lse = found.forward(*low[:3], None, causal, 0.125)
            expected, expected_lse = PLAIN.forward(*wide[:3], None, causal, 0.125)
            gradients = found.backward(low[3], *low[:3], out, lse, None, causal, 0.125)
            references = PLAIN.backward(wide[3], *wide[:3], expected, expected_lse, None, causal, 0.125)
            name = f"attention {str(dtype).removeprefix('torch.')}{' causal' if causal else ''}"
            errors[f"{name}: out, lse"] = max(relative(out, expected), relative(lse, expected_lse))
            pairs = zip(gradients, references, strict=True)
            errors[f"{name}: gradients"] = max(relative(a, b) for a, b in pairs)
    return errors


def packed_attention(place: torch.device, synchronize: Callable[[], None]) -> tuple[float, str]:
    """`attend` on packed rows against SDPA with a mask: error and times."""
    generator = torch.Generator(place).manual_seed(1)
    q, k, v = (torch.randn(2, 16, 4096, 64, device=place, generator=generator, dtype=torch.bfloat16) for _ in range(3))
    documents = (torch.arange(4096) // 300).expand(2, -1)
    alone = ContextParallel(None, None, 1, 1, 0)
    tokens = torch.arange(4096, device=place)
    same = (tokens // 300)[:, None] == (tokens // 300)[None]
    mask = same & (tokens[:, None] >= tokens[None])

    def ours() -> Tensor:
        return attend(q, k, v, documents, alone, scale=0.125)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.125)

    error = relative(ours(), theirs())
    times = [milliseconds(run, synchronize) for run in (ours, theirs)]
    return error, "  ".join(
        f"{name} {t[0]:.2f} ms ({t[1]:.2f}-{t[2]:.2f})" for name, t in zip(("attend", "SDPA"), times, strict=True)
    )


def experts(place: torch.device, synchronize: Callable[[], None]) -> tuple[float, str]:
    """Transformers' grouped matmul, which runs on the rows that `dispatch` brings, against a loop over experts."""
    from transformers import AutoConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = AutoConfig.for_model("mixtral", hidden_size=1024, intermediate_size=2048, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    module = MixtralExperts(config).to(place, torch.bfloat16)
    torch.nn.init.normal_(module.gate_up_proj, std=0.02)
    torch.nn.init.normal_(module.down_proj, std=0.02)
    hidden = torch.randn(4096, 1024, device=place, dtype=torch.bfloat16)
    index, weights = torch.randint(8, (4096, 1), device=place), torch.ones(4096, 1, device=place, dtype=torch.bfloat16)

    def one(number: int) -> Callable[[Tensor], Tensor]:
        def run(rows: Tensor) -> Tensor:
            gate, up = F.linear(rows, module.gate_up_proj[number]).chunk(2, -1)
            return F.linear(module.act_fn(gate) * up, module.down_proj[number])

        return run

    def loop() -> Tensor:
        return mixture_of_experts(hidden, index, weights, [one(number) for number in range(8)])

    def grouped() -> Tensor:
        return module(hidden, index, weights)

    with torch.no_grad():
        error = relative(grouped(), loop())
        times = [milliseconds(run, synchronize) for run in (grouped, loop)]
    return error, "  ".join(f"{name} {t[0]:.2f} ms" for name, t in zip(("grouped", "loop"), times, strict=True))


def loss(place: torch.device) -> float:
    """What two ranks of a split vocabulary compute, put together by hand, against cross entropy."""
    logits = torch.randn(2048, 32000, device=place)
    targets = torch.randint(32000, (2048,), device=place)
    parts = logits.chunk(2, -1)
    largest = torch.stack([part.amax(-1) for part in parts]).amax(0)
    total = torch.stack([(part - largest[:, None]).exp().sum(-1) for part in parts]).sum(0)
    target = logits.gather(-1, targets[:, None])[:, 0]
    return relative((total.log() + largest - target).sum(), F.cross_entropy(logits, targets, reduction="sum"))


def main() -> None:
    """Print a line for each check."""
    device = detect()
    device.use(0)
    place = device.torch_device(0)
    print(f"{device.name}, torch {torch.__version__}")
    for name, error in attention(place).items():
        print(f"{name:45} error {error:.1e}")
    error, times = packed_attention(place, device.synchronize)
    print(f"{'packed rows, bf16':45} error {error:.1e}  {times}")
    error, times = experts(place, device.synchronize)
    print(f"{'experts, bf16':45} error {error:.1e}  {times}")
    print(f"{'loss of a split vocabulary, float32':45} error {loss(place):.1e}")


if __name__ == "__main__":
    main()
