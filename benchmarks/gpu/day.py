"""Measurements on one accelerator, in stages of known length: 600 seconds with the stages of the default.

    python benchmarks/gpu/day.py                          # the default, without options
    python benchmarks/gpu/day.py --stages parity,waits    # any stages, also those that the default leaves out
    python benchmarks/gpu/day.py --small                  # small models, also without an accelerator

Each row is printed and written to the JSON file of --out as soon as it is measured. A stage that passes its seconds is cut and
keeps its rows; one that fails prints its error; the next one starts. All stages run in one process, which compiles each shape
once. The seconds are estimates for an H100 or H200: no stage was timed alone.

MFU = tokens/s x (6 N + 6 layers seq_len width) / published peak FLOP/s. N is the number of parameters of matmuls (the tied head
counts, the embedding does not), the second term is causal attention; see src/weft/anatomy/flops.py. In packed rows it is
attention inside of documents: the work that is done.
"""

import torch.distributed as dist
from bench import Bench
from communication_stages import chunks, codecs
from kernel_stages import attention, ceilings, fp8_casts, fp8_grouped, kernels, matmuls, ring
from run_stages import killed_run, loop, memory, snapshot
from speed_stages import baselines, compiled, dropout, experts, fp8, fp8_experts, fp8_losses, speed
from stages import Stage, parse, require_accelerator, run_stages
from step_stages import parity, profile, profile_experts, waits
from update_stage import updates

from weft.device.detect import detect
from weft.launch.rank_entry import connect

START_SECONDS = 25
"""Imports, and the connection of the rank: estimated too."""
LIMIT_SECONDS = 600

STAGES = {
    stage.run.__name__: stage
    for stage in (
        Stage(ceilings, 25, "rates of matmul and copy, power and clock: the ceiling of all others"),
        Stage(attention, 40, "attention by documents beside SDPA: which kernel for which shape"),
        Stage(kernels, 15, "Triton kernels, device and host time apart"),
        Stage(updates, 35, "the update in one kernel, by format of weights and moments: first run on a card"),
        Stage(loop, 75, "`weft train` beside its train_step: compiled regions, waits of the host"),
        Stage(profile, 45, "where the time of a step with compiled blocks goes"),
        Stage(matmuls, 10, "bf16 and FP8 matmuls alone"),
        Stage(fp8, 60, "FP8 beside bf16 in compiled blocks: goal 70 % of MFU"),
        Stage(
            baselines,
            150,
            "Weft beside FSDP2, Transformers and Liger with the most rows that fit: goals 1.25, 1.10, 1.05",
        ),
        Stage(experts, 35, "experts beside Transformers in bf16 weights"),
        Stage(dropout, 30, "cost of dropout whose masks depend on positions"),
        Stage(memory, 45, "memory beside its prediction, by memory option"),
        Stage(
            fp8_casts, 30, "rounding to FP8: time, and bits that differ from those of torch: first run on a card", False
        ),
        Stage(fp8_grouped, 15, "grouped FP8 matmuls of experts: first run on a card", False),
        Stage(fp8_experts, 40, "FP8 of experts and linear layers beside bf16", False),
        Stage(fp8_losses, 60, "losses with FP8 beside those of bf16", False),
        Stage(parity, 60, "float32 training equals that of the CPU", False),
        Stage(waits, 30, "waits of the host in train_step, by line", False),
        Stage(ring, 40, "attention of an emulated ring: error and cost of its steps", False),
        Stage(snapshot, 60, "time for which a snapshot blocks training", False),
        Stage(killed_run, 120, "a killed `weft train` resumes with the same losses", False),
        Stage(profile_experts, 30, "where the time of a step with experts goes", False),
        Stage(compiled, 180, "compiled blocks beside torch.compile of the whole model", False),
        Stage(speed, 120, "what each operator of Weft gains", False),
        Stage(codecs, 45, "cost of compressed messages without their links", False),
        Stage(chunks, 20, "cost of matmuls in chunks", False),
    )
}
"""In the order of value. Stages outside the default are not in its 600 seconds."""


def main() -> None:
    arguments = parse(STAGES, __doc__ or "", "runs/day.json")
    device = detect()
    require_accelerator(device, arguments.small)
    _, _, local_rank = connect(device)
    bench = Bench(device, device.torch_device(local_rank), arguments.small)
    failed = run_stages(STAGES, arguments.stages, bench, arguments.out, timed=not arguments.small)
    dist.destroy_process_group()
    raise SystemExit(f"stages failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
