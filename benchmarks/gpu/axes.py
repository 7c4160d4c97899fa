"""Local code of tensor, context and expert parallelism on one accelerator: correctness, and speed beside plain code.

    python benchmarks/gpu/axes.py            # about two minutes on an H200

Checks on the device: attention with log-sum-exp and its backward (`weft.compute.varlen_attention`) against matmuls in
float32, and against SDPA for speed; the experts' grouped matmul against a loop; the vocabulary-parallel loss in two parts
against cross entropy. Prints error and speed.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.lab.experts import mixture_of_experts
from torch import Tensor

from weft.compute.varlen_attention import choose_kernel
from weft.compute.varlen_blocks import PLAIN_BLOCKS
from weft.device.detect import detect
from weft.parallel.sequence.attention_plan import plan_attention
from weft.parallel.sequence.context import attend
from weft.parallel.sequence.context_grid import ContextParallel

REPEATS = 9


def milliseconds(run: Callable[[], object], synchronize: Callable[[], None]) -> tuple[float, float, float]:
    """Median, smallest and largest milliseconds of a call."""
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


def attention(torch_device: torch.device) -> dict[str, float]:
    """Largest relative errors of the device's attention kernel against matmuls in float32."""
    generator = torch.Generator(torch_device).manual_seed(0)
    q, k, v, g = (torch.randn(1024, h, 64, device=torch_device, generator=generator) for h in (8, 2, 2, 8))
    documents = (torch.arange(512) // 300).expand(2, -1)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        kernel, _ = choose_kernel(torch_device.type, dtype, 64, 64)
        for window in (None, 64):
            ((call,),) = plan_attention(documents, 2, 512, 1, 0, window, torch_device)
            low = [x.to(dtype) for x in (q, k, v, g)]
            wide = [x.float() for x in low]
            out, lse = kernel.forward(*low[:3], call.sequences, 0.125)
            expected, expected_lse = PLAIN_BLOCKS.forward(*wide[:3], call.sequences, 0.125)
            gradients = kernel.backward(low[3], *low[:3], out, lse, call.sequences, 0.125)
            references = PLAIN_BLOCKS.backward(wide[3], *wide[:3], expected, expected_lse, call.sequences, 0.125)
            name = f"attention {str(dtype).removeprefix('torch.')}{' window' if window else ''}"
            errors[f"{name}: out, lse"] = max(relative(out, expected), relative(lse, expected_lse))
            pairs = zip(gradients, references, strict=True)
            errors[f"{name}: gradients"] = max(relative(a, b) for a, b in pairs)
    return errors


def packed_attention(torch_device: torch.device, synchronize: Callable[[], None]) -> tuple[float, str]:
    """Error and times of `attend` on packed rows against SDPA with a mask."""
    generator = torch.Generator(torch_device).manual_seed(1)
    q, k, v = (
        torch.randn(2, 16, 4096, 64, device=torch_device, generator=generator, dtype=torch.bfloat16) for _ in range(3)
    )
    documents = (torch.arange(4096) // 300).expand(2, -1)
    single = ContextParallel(None, None, 1, 1, 0)
    tokens = torch.arange(4096, device=torch_device)
    same = (tokens // 300)[:, None] == (tokens // 300)[None]
    mask = same & (tokens[:, None] >= tokens[None])

    def weft_attention() -> Tensor:
        return attend(q, k, v, documents, single, scale=0.125)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=0.125)

    error = relative(weft_attention(), sdpa())
    times = [milliseconds(run, synchronize) for run in (weft_attention, sdpa)]
    return error, "  ".join(
        f"{name} {t[0]:.2f} ms ({t[1]:.2f}-{t[2]:.2f})" for name, t in zip(("attend", "SDPA"), times, strict=True)
    )


def experts(torch_device: torch.device, synchronize: Callable[[], None]) -> tuple[float, str]:
    """Error and times of Transformers' grouped matmul, used after dispatch, against a loop over experts."""
    from transformers import AutoConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = AutoConfig.for_model("mixtral", hidden_size=1024, intermediate_size=2048, num_local_experts=8)
    config._experts_implementation = "grouped_mm"
    module = MixtralExperts(config).to(torch_device, torch.bfloat16)
    torch.nn.init.normal_(module.gate_up_proj, std=0.02)
    torch.nn.init.normal_(module.down_proj, std=0.02)
    hidden = torch.randn(4096, 1024, device=torch_device, dtype=torch.bfloat16)
    index, weights = (
        torch.randint(8, (4096, 1), device=torch_device),
        torch.ones(4096, 1, device=torch_device, dtype=torch.bfloat16),
    )

    def expert(expert_index: int) -> Callable[[Tensor], Tensor]:
        def run(rows: Tensor) -> Tensor:
            gate, up = F.linear(rows, module.gate_up_proj[expert_index]).chunk(2, -1)
            return F.linear(module.act_fn(gate) * up, module.down_proj[expert_index])

        return run

    def loop() -> Tensor:
        return mixture_of_experts(hidden, index, weights, [expert(expert_index) for expert_index in range(8)])

    def grouped() -> Tensor:
        return module(hidden, index, weights)

    with torch.no_grad():
        error = relative(grouped(), loop())
        times = [milliseconds(run, synchronize) for run in (grouped, loop)]
    return error, "  ".join(f"{name} {t[0]:.2f} ms" for name, t in zip(("grouped", "loop"), times, strict=True))


def loss(torch_device: torch.device) -> float:
    """Error of the loss over a vocabulary split in two, merged by hand, against cross entropy."""
    logits = torch.randn(2048, 32000, device=torch_device)
    targets = torch.randint(32000, (2048,), device=torch_device)
    parts = logits.chunk(2, -1)
    largest = torch.stack([part.amax(-1) for part in parts]).amax(0)
    total = torch.stack([(part - largest[:, None]).exp().sum(-1) for part in parts]).sum(0)
    target = logits.gather(-1, targets[:, None])[:, 0]
    return relative((total.log() + largest - target).sum(), F.cross_entropy(logits, targets, reduction="sum"))


def main() -> None:
    """Run all checks, and print a line for each."""
    device = detect()
    device.use(0)
    torch_device = device.torch_device(0)
    print(f"{device.name}, torch {torch.__version__}")
    for name, error in attention(torch_device).items():
        print(f"{name:45} error {error:.1e}")
    error, times = packed_attention(torch_device, device.synchronize)
    print(f"{'packed rows, bf16':45} error {error:.1e}  {times}")
    error, times = experts(torch_device, device.synchronize)
    print(f"{'experts, bf16':45} error {error:.1e}  {times}")
    print(f"{'loss of a split vocabulary, float32':45} error {loss(torch_device):.1e}")


if __name__ == "__main__":
    main()
