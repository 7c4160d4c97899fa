"""One layer of experts on two ranks: what each message and each pass over the rows costs, beside the plain form.

    python benchmarks/moe_dispatch.py            # a minute or two
    python benchmarks/moe_dispatch.py --quick    # a smoke run

Forward and backward over gloo, in float32, in four forms, each with one change more than the one before:

    plain             messages of rows and of router weights; Transformers' experts, which sort rows again and multiply them by
                      router weights; zeros, index_put and a sum on the way back
    weights at home   router weights stay on the rank of their token
    one gather back   copies are gathered by the inverse order and summed in one operator (`weft.compute.experts.unpermute`)
    Weft              the forward of `weft.parallel.expert`, with Weft's operator for the experts

Passes: bytes of tensors of at least a row for each copy that operators read and write, without matmuls and messages, divided by
the bytes of such a tensor. An operator counts as one pass over its inputs and outputs. All forms must have equal results.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from peers.figures import ratios, spread
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from weft.comm.collectives import start_all_to_all
from weft.compute.experts import experts_forward
from weft.device.detect import detect
from weft.parallel.expert import run_experts, split_experts
from weft.parallel.expert_dispatch import Channel, Route, combine, dispatch

RANKS, EXPERTS, TOP_K, HIDDEN, WIDTH = 2, 16, 4, 512, 256
MATMULS = ("mm", "bmm", "addmm", "_grouped_mm", "baddbmm")


class Traffic(TorchDispatchMode):
    """Bytes of large tensors that operators read and write, and messages of rows or weights, of one rank."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.moved, self.messages, self.sent = least, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name.startswith("alltoall"):
            floats = [tensor for tensor in inputs if tensor.is_floating_point()]
            self.messages += bool(floats)
            self.sent += floats[-1].nbytes if floats else 0
        elif not func.is_view and name not in MATMULS and not name.startswith("empty"):
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in (*inputs, *outputs) if tensor.nbytes >= self.least)
        return out


def plain_combine(outputs: Tensor, weights: Tensor | None, route: Route) -> Tensor:
    """Rows back to their tokens by zeros, index_put and a sum over the copies of a token."""
    rows = start_all_to_all(outputs, route.channel.group, route.input_splits, route.output_splits)()
    copies = rows.new_zeros(len(route.order), rows.shape[1]).index_put((route.order,), rows)
    copies = copies.view(-1, route.top_k, rows.shape[1])
    return (copies if weights is None else copies * weights[..., None]).sum(1)


def forward_of(form: str, experts: Any, group: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Forward of an experts module with the experts of one rank."""
    channel, local_forward = Channel(group), experts.forward

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, local, route = dispatch(hidden, index, EXPERTS, channel)
        if form == "plain":
            own = weights.flatten()[route.order, None]
            received = start_all_to_all(own, group, route.output_splits, route.input_splits)()
            return plain_combine(local_forward(rows, local, received), None, route)
        outputs = run_experts(local_forward, rows, local)
        return (plain_combine if form == "weights at home" else combine)(outputs, weights, route)

    return forward


def build(form: str, rank: int, group: Any) -> tuple[Any, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Experts of a rank, the same in all forms, and their forward."""
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    experts: Any = Qwen3MoeExperts(config)
    for key, parameter in list(experts.named_parameters()):
        full = 0.02 * torch.randn_like(parameter)
        setattr(experts, key, torch.nn.Parameter(full.chunk(RANKS)[rank].clone()))
    if form == "Weft":
        experts.forward = partial(with_operator, experts)
        split_experts(experts, group)
        return experts, experts.forward
    experts.num_experts = EXPERTS // RANKS
    return experts, forward_of(form, experts, group)


def with_operator(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module by Weft's operator."""
    return experts_forward(experts, hidden_states, top_k_index, top_k_weights)


FORMS = ("plain", "weights at home", "one gather back", "Weft")


def measure(rank: int, tokens: int, repeats: int, port: int) -> None:
    """Measure all forms in turn; rank 0 prints."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    group: Any = dist.group.WORLD
    systems = {form: build(form, rank, group) for form in FORMS}
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, requires_grad=True)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    index = scores.topk(TOP_K).indices
    weights = scores.gather(1, index).softmax(1).requires_grad_()

    def step(form: str) -> list[Tensor]:
        """Output and gradients of one form."""
        experts, forward = systems[form]
        leaves = [hidden, weights, *experts.parameters()]
        for leaf in leaves:
            leaf.grad = None
        out = forward(hidden, index, weights)
        out.square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    copy_bytes = tokens * TOP_K * HIDDEN * 4
    expected, counted = step("plain"), {}
    for form in FORMS:
        for one, reference in zip(step(form), expected, strict=True):
            torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-5 * float(reference.abs().max()))
        with Traffic(int(0.9 * copy_bytes)) as counted[form]:
            step(form)
    core: dict[str, list[float]] = {form: [] for form in FORMS}
    wall: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(repeats):
        for form in FORMS:
            dist.barrier()
            begin, began = time.perf_counter(), time.process_time()
            step(form)
            taken = torch.tensor([time.perf_counter() - begin, time.process_time() - began], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            wall[form].append(taken[0].item())
            core[form].append(taken[1].item())
    if rank == 0:
        title = f"{detect().name}: {tokens:,} tokens a rank, {TOP_K} of {EXPERTS} experts {HIDDEN} x {WIDTH}, float32"
        columns = ("form", "passes", "messages", "MB sent", "core ms", "plain / form", "ms", "plain / form")
        table = Table(*columns, title=title)
        for form, traffic in counted.items():
            table.add_row(
                form,
                f"{traffic.moved / copy_bytes:.1f}",
                str(traffic.messages),
                f"{traffic.sent / 1e6:.2f}",
                f"{1e3 * median(core[form]):.0f}",
                spread(ratios(core["plain"], core[form]), ".2f"),
                f"{1e3 * median(wall[form]):.0f}",
                spread(ratios(wall["plain"], wall[form]), ".2f"),
            )
        Console(width=140).print(table)
    dist.destroy_process_group()


def main(quick: Annotated[bool, typer.Option(help="Few tokens and repeats.")] = False) -> None:
    """Print passes, messages, bytes and seconds of each form."""
    spawn(measure, (256 if quick else 1024, 2 if quick else 9, 29500 + os.getpid() % 1000), nprocs=RANKS)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
