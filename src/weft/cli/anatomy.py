"""weft anatomy"""

from pathlib import Path
from typing import Annotated

import typer

ROW = 4096
"""Most tokens of the row whose attention is timed on a device that has several kernels."""


def anatomy(
    config: Annotated[Path, typer.Argument(help="A Hugging Face config.json, a folder with one, or a job.toml.")],
) -> None:
    """Print the structure and the operators of a model.

    Needs no weights.
    """
    from weft.job import Job, Model
    from weft.training.inputs import check_config

    if config.suffix == ".toml":
        source = Job.load(config).model
    else:
        source = Model(path=str(config)) if config.is_dir() else Model(config=str(config))
    check_config(source)

    import torch  # after the checks above, because importing torch and Transformers takes seconds
    from rich.console import Console
    from rich.table import Table

    from weft.anatomy.build import build_on_meta
    from weft.anatomy.transformers import read_anatomy
    from weft.checkpoint.model_config import read_config
    from weft.compute.attention_choice import candidates, choose_attention, time_attention
    from weft.device.detect import detect
    from weft.parallel.choices import choose
    from weft.parallel.operators import explain_operators
    from weft.parallel.sequence.varlen import attention_shape, kernel_of
    from weft.plan import Plan, resolve_plan

    model = build_on_meta(read_config(source), torch.float32)
    found = read_anatomy(model)
    table = Table("role", "module", "count", title=f"{found.family}, {len(found.blocks)} blocks")
    for role, pattern, count in found.table():
        table.add_row(role, pattern, str(count))
    console = Console()
    console.print(table)
    console.print(f"{found.parameters:,} parameters, {found.active_parameters:,} active for one token", highlight=False)
    device = detect()
    operators = Table("operator", "implementation", "", title=f"operators on {device.type}, with a plan of one rank")
    plan = resolve_plan(Plan(), 1, native_bf16=device.supports("bf16"))
    choices = choose(model, plan, device.type, device, anatomy=found)
    for row in explain_operators(model, choices, device.type):
        operators.add_row(*row)
    if len(names := candidates(device)) > 1 and choices.attention != "context":
        kernel = kernel_of(model, plan, device.type)[0] if choices.attention == "documents" else None
        length = min(found.max_positions or ROW, ROW)
        shape = attention_shape(model, plan, ((length,),), kernel)
        timings = time_attention(shape, ["reference", *names], device, device.torch_device(0))
        text = choose_attention(timings.rows, timings.documents).text(timings)
        operators.add_row("attention kernel", f"one row of {length} tokens", text)
    console.print(operators)
