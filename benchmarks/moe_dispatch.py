"""One layer of experts on two ranks: what each message and each pass over the rows costs, beside the plain form and peers.

    python benchmarks/moe_dispatch.py                          # a few minutes
    python benchmarks/moe_dispatch.py --quick                  # a smoke run
    python benchmarks/moe_dispatch.py --torchtitan FOLDER      # torchtitan too, which is installed in a folder

Forward and backward over gloo, in float32, in five forms, each with one change more than the one before:

    plain             messages of rows and of router weights; Transformers' experts, which sort rows again and multiply them by
                      router weights; zeros, index_put and a sum on the way back
    weights at home   router weights stay on the rank of their token
    one gather back   copies are gathered by the inverse order and summed in one operator (`weft.compute.experts.unpermute`)
    operator          the forward of `weft.parallel.experts.path`, with Weft's operator for the experts
    Weft              weight gradients are computed while the gradients of rows travel back (`experts/late_gradients.py`)

and in other systems (`peers.experts`): Transformers' experts in one process that has the tokens of both ranks, Transformers'
own expert parallelism, and the dispatchers of torchtitan and of Megatron-Core around the same matmuls.

Passes: bytes of tensors of at least a row for each copy that operators read and write, without matmuls and messages, divided by
the bytes of such a tensor. An operator counts as one pass over its inputs and outputs. Output and all gradients of each system
must be those of the one process.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from peers.experts import (
    Builder,
    Forward,
    Layer,
    Shape,
    Weights,
    build_megatron,
    build_module,
    build_one_process,
    build_torchtitan,
    build_transformers,
    draw_weights,
)
from peers.figures import ratios, spread
from rich.console import Console
from rich.table import Table
from tests.lab.experts import split_experts
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.utils.logging import disable_progress_bar

from weft.comm.collectives import start_all_to_all
from weft.compute.experts import experts_forward
from weft.device.detect import detect
from weft.parallel.experts.dispatch import Channel, Route, combine, dispatch
from weft.parallel.experts.path import run_experts

RANKS, SHAPE = 2, Shape(experts=16, top_k=4, hidden=512, width=256)
MATMULS = ("mm", "bmm", "addmm", "_grouped_mm", "baddbmm")
MESSAGES = ("alltoall", "all_to_all", "allgather", "_allgather", "all_gather", "allreduce", "all_reduce")
TOLERANCE = 1e-4
"""Largest difference of an output or gradient, relative to its largest element."""


class Traffic(TorchDispatchMode):
    """Bytes of large tensors that operators read and write, and messages of one rank."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.moved, self.messages, self.counts, self.sent = least, 0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name.startswith(MESSAGES):
            floats = [tensor for tensor in inputs if tensor.is_floating_point()]
            self.messages += bool(floats)
            self.counts += not floats
            self.sent += floats[-1].nbytes if floats else 0
        elif not func.is_view and name not in MATMULS and not name.startswith("empty"):
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in (*inputs, *outputs) if tensor.nbytes >= self.least)
        return out


def plain_combine(outputs: Tensor, weights: Tensor | None, route: Route) -> Tensor:
    """Rows back to their tokens by zeros, index_put and a sum over the copies of a token."""
    rows = start_all_to_all(outputs, route.channel.group, route.input_splits, route.output_splits)()
    copies = rows.new_zeros(len(route.order), rows.shape[1]).index_put((route.order,), rows)
    copies = copies.view(-1, route.position.shape[1], rows.shape[1])
    return (copies if weights is None else copies * weights[..., None]).sum(1)


def forward_of(form: str, experts: Any, group: Any) -> Forward:
    """Forward of an experts module with the experts of one rank."""
    channel, local_forward = Channel(group), experts.forward

    def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows, local, route = dispatch(hidden, index, weights, SHAPE.experts, channel)
        if form == "plain":
            own = weights.flatten()[route.order, None]
            received = start_all_to_all(own, group, route.output_splits, route.input_splits)()
            return plain_combine(local_forward(rows, local, received), None, route)
        outputs = run_experts(local_forward, rows, local)
        return (plain_combine if form == "weights at home" else combine)(outputs, weights, route)

    return forward


def build(form: str, shape: Shape, weights: Weights) -> Layer:
    """Layer of a form of Weft on this rank."""
    group: Any = dist.group.WORLD
    experts = build_module(shape, Weights(*(value.chunk(RANKS)[dist.get_rank()] for value in weights)))
    if form in ("operator", "Weft"):
        if form == "operator":
            experts.forward = partial(with_operator, experts)
        split_experts(experts, (Channel(group),), is_late=form == "Weft")
        return Layer(list(experts.parameters()), experts.forward)
    experts.num_experts = shape.experts // RANKS
    return Layer(list(experts.parameters()), forward_of(form, experts, group))


def with_operator(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of an experts module by Weft's operator."""
    return experts_forward(experts, hidden_states, top_k_index, top_k_weights)


FORMS: dict[str, Builder] = {
    form: partial(build, form) for form in ("plain", "weights at home", "one gather back", "operator", "Weft")
}
ONE_PROCESS = "Transformers, one process"
PEERS: dict[str, Builder] = {
    ONE_PROCESS: build_one_process,
    "Transformers, expert parallelism": build_transformers,
    "torchtitan's dispatcher": build_torchtitan,
    "Megatron-Core's dispatcher": build_megatron,
}


class Inputs(NamedTuple):
    """Tokens of one micro-batch and their routing."""

    hidden: Tensor
    index: Tensor
    weights: Tensor


def draw_inputs(rank: int, tokens: int) -> Inputs:
    """Tokens of a rank."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, SHAPE.hidden, generator=generator)
    scores = torch.rand(tokens, SHAPE.experts, generator=generator)
    index = scores.topk(SHAPE.top_k).indices
    return Inputs(hidden.requires_grad_(), index, scores.gather(1, index).softmax(1).requires_grad_())


def join_inputs(parts: list[Inputs]) -> Inputs:
    """Tokens of all ranks."""
    hidden, index, weights = (torch.cat(tensors).detach() for tensors in zip(*parts, strict=True))
    return Inputs(hidden.requires_grad_(), index, weights.requires_grad_())


def step(layer: Layer, inputs: Inputs) -> Tensor:
    """Forward and backward; returns the output."""
    for leaf in (inputs.hidden, inputs.weights, *layer.parameters):
        leaf.grad = None
    with layer.context():
        out = layer.forward(*inputs)
        out.square().sum().backward()
    return out.detach()


def results(layer: Layer, inputs: Inputs) -> list[Tensor]:
    """Output of a step, and gradients of tokens, router weights and experts."""
    out = step(layer, inputs)
    assert inputs.hidden.grad is not None
    assert inputs.weights.grad is not None
    return [out, inputs.hidden.grad, inputs.weights.grad, *layer.gradients()]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference on any rank, relative to the largest element of a tensor."""
    pairs = zip(found, expected, strict=True)
    own = torch.stack([(one - reference).abs().max() / reference.abs().max() for one, reference in pairs]).max()
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.item()


def build_all(with_peers: bool) -> tuple[dict[str, Layer], dict[str, str]]:
    """Layers of all systems, and for each system that is not installed the error."""
    weights = draw_weights(SHAPE)
    layers = {name: builder(SHAPE, weights) for name, builder in FORMS.items()}
    absent: dict[str, str] = {}
    for name, builder in PEERS.items() if with_peers else ((ONE_PROCESS, PEERS[ONE_PROCESS]),):
        try:
            layers[name] = builder(SHAPE, weights)
        except ImportError as error:
            absent[name] = str(error)
    return layers, absent


def measure(rank: int, tokens: int, repeats: int, port: int, with_peers: bool, torchtitan: str) -> None:
    """Measure all systems in turn; rank 0 prints."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    disable_progress_bar()
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if torchtitan:
        sys.path.append(torchtitan)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    layers, absent = build_all(with_peers)
    inputs_of_ranks = [draw_inputs(each, tokens) for each in range(RANKS)]
    inputs = dict.fromkeys(layers, inputs_of_ranks[rank]) | {ONE_PROCESS: join_inputs(inputs_of_ranks)}
    whole = results(layers[ONE_PROCESS], inputs[ONE_PROCESS])
    expected = [tensor.chunk(RANKS)[rank] for tensor in whole]
    copy_bytes = tokens * SHAPE.top_k * SHAPE.hidden * 4
    counted, differences = {}, {ONE_PROCESS: 0.0}
    for name, layer in layers.items():
        if name != ONE_PROCESS:
            differences[name] = largest_difference(results(layer, inputs[name]), expected)
            if not differences[name] <= TOLERANCE:
                raise ValueError(f"{name} differs from one process by {differences[name]:.1e}, over {TOLERANCE}")
        with Traffic(int(0.9 * copy_bytes)) as counted[name]:
            step(layer, inputs[name])
    steps: dict[str, Callable[[], object]] = {
        name: partial(step, layer, inputs[name]) for name, layer in layers.items()
    }
    if rank:
        steps[ONE_PROCESS] = list  # rank 0 alone has this process
    wall, core = time_all(steps, repeats)
    if rank == 0:
        title = f"{detect().name}: {tokens:,} tokens a rank, {SHAPE.top_k} of {SHAPE.experts} experts"
        title += f" {SHAPE.hidden} x {SHAPE.width}, float32"
        figures = {name: Figures(counted[name], differences[name], wall[name], core[name]) for name in layers}
        console = Console(width=160)
        console.print(table_of(title, "plain", copy_bytes, {name: figures[name] for name in FORMS}))
        beside = {name: figures[name] for name in ("Weft", *PEERS) if name in figures}
        if with_peers:
            console.print(table_of(f"{title}: other systems", "Weft", copy_bytes, beside))
        for name, error in absent.items():
            console.print(f"{name}: not installed ({error})", markup=False)
    dist.destroy_process_group()


def time_all(
    steps: dict[str, Callable[[], object]], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall and core seconds of each repeat of each system, on the slower rank; the systems take turns."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    core: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, run in steps.items():
            dist.barrier()
            begin, began = time.perf_counter(), time.process_time()
            run()
            taken = torch.tensor([time.perf_counter() - begin, time.process_time() - began], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            wall[name].append(taken[0].item())
            core[name].append(taken[1].item())
    return wall, core


class Figures(NamedTuple):
    """Measurements of one system."""

    traffic: Traffic
    difference: float
    wall: list[float]
    core: list[float]


def table_of(title: str, base: str, copy_bytes: int, figures: dict[str, Figures]) -> Table:
    """Table of systems; ratios are those of the base, the time of the base divided by that of the system."""
    ratio = f"{base} / row"

    def ratios_of(seconds: list[float], of_base: list[float]) -> str:
        return "" if seconds is of_base else spread(ratios(of_base, seconds), ".2f")

    table = Table(title=title)
    for column in ("system", "passes", "messages", "of counts", "MB sent", "core ms", ratio, "ms", ratio, "difference"):
        table.add_column(column)
    for name, (traffic, difference, wall, core) in figures.items():
        table.add_row(
            name,
            f"{traffic.moved / copy_bytes:.1f}",
            str(traffic.messages),
            str(traffic.counts),
            f"{traffic.sent / 1e6:.2f}",
            f"{1e3 * median(core):.0f}",
            ratios_of(core, figures[base].core),
            f"{1e3 * median(wall):.0f}",
            ratios_of(wall, figures[base].wall),
            f"{difference:.0e}",
        )
    return table


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few tokens and repeats.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each system.")] = 15,
    peers: Annotated[bool, typer.Option(help="Run other systems too.")] = True,
    torchtitan: Annotated[str, typer.Option(help="Folder in which torchtitan is installed.")] = "",
) -> None:
    """Print passes, messages, bytes and seconds of each form and of other systems."""
    port = 29500 + os.getpid() % 1000
    spawn(measure, (256 if quick else 1024, 2 if quick else repeats, port, peers, torchtitan), nprocs=RANKS)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    typer.run(main)
