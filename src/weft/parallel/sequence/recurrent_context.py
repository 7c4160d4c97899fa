"""Context parallelism of recurrent mixers: each rank of cp computes the recurrence of its own heads, over whole sequences.

    before the mixer     all-gather of the tokens of all ranks, in the order of the sequence
    mixer                heads of this rank (`recurrent_heads.py`)
    after the mixer      reduce-scatter: the sum over heads, for the tokens of this rank

A recurrence is computed in the order of the sequence: if its state passed along the ranks, all but one would wait. Divided
heads keep all ranks busy, as those of Ulysses do in attention (Jacobs et al., 2023). Weights are whole. A rank has gradients of
its own heads only; they are summed over the ranks of cp like those of all other weights.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from weft.anatomy.roles import Anatomy
from weft.comm import collectives
from weft.parallel.sequence.context_grid import natural_positions
from weft.parallel.sequence.recurrent_heads import mixer_heads, set_local_mixer
from weft.parallel.sequence.rows import apply_cp
from weft.parallel.tensor.boundaries import map_hidden, map_output
from weft.parallel.tensor.vocabulary import SEQUENCE
from weft.parallel.weights import LocalWeights, TensorLayout, to_local
from weft.topology.mesh import CONTEXT_AXES, join_axes, ranks_along

if TYPE_CHECKING:
    from weft.parallel.build import Build


def apply_recurrent_context(model: Any, anatomy: Anatomy, mesh: DeviceMesh) -> None:
    """Divide the heads of recurrent mixers over cp, in place; after tensor parallelism, which has divided them first.

    Args:
        model: model on any device, including meta, whose mixers `mixer_heads` knows.
        anatomy: its roles.
        mesh: device mesh with the axes of `weft.topology.mesh`.
    """
    group = join_axes(mesh, CONTEXT_AXES).get_group()
    ulysses, ring = ranks_along(mesh, "cp_ulysses"), ranks_along(mesh, "cp_ring")
    ranks = group.size()

    def positions(length: int, device: torch.device) -> Tensor:
        """Place in the sequence of each token, in the order of the ranks."""
        return torch.cat([natural_positions(length, ulysses, ring, rank, device) for rank in range(ranks)])

    def enter(hidden: Tensor) -> Tensor:
        whole = collectives.gather(hidden, group, SEQUENCE)
        return whole if ring == 1 else whole[:, positions(whole.shape[SEQUENCE], whole.device).argsort()]

    def leave(out: Tensor) -> Tensor:
        ordered = out if ring == 1 else out[:, positions(out.shape[SEQUENCE], out.device)]
        return collectives.reduce_scatter(ordered, group, SEQUENCE)

    for name in (name for block in anatomy.blocks for name in block.recurrence):
        divide_mixer(model.get_submodule(name), group, enter, leave)


def divide_mixer(
    mixer: Any, group: dist.ProcessGroup, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]
) -> None:
    """Let a rank compute its own heads of a mixer, in place.

    Args:
        mixer: recurrent mixer that `mixer_heads` knows.
        group: ranks of cp.
        enter: makes whole sequences of the hidden states of this rank.
        leave: makes the outputs of this rank of partial sums over heads, of whole sequences.
    """
    rank, ranks = group.rank(), group.size()

    def enter_whole(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Transformers makes an empty cache in training, too. Split models refuse one with states, and rows of single tokens.
        caches = {name: None for name in ("cache_params", "past_key_values") if name in kwargs}
        return map_hidden(args, kwargs | caches, enter)

    heads = mixer_heads(mixer, ranks)
    assert heads is not None  # refused before
    buffers = {name for name, _ in mixer.named_buffers()}
    layouts = {
        name: TensorLayout("narrow", -1 if name in buffers else 0, heads.own_rows(name, rank, ranks))
        for name in heads.rows
    }
    output = mixer.get_submodule(heads.output)
    width = to_local(output.weight).shape[1] // ranks
    layouts[f"{heads.output}.weight"] = TensorLayout("narrow", 1, ((rank * width, width),))
    if output.bias is not None:
        layouts[f"{heads.output}.bias"] = TensorLayout("once")
    LocalWeights(mixer, layouts, group, sums_gradients=False)
    set_local_mixer(mixer, heads, ranks)
    mixer.register_forward_pre_hook(enter_whole, with_kwargs=True)
    # Before the sum over tp, which splits the tokens of a rank of cp.
    mixer.register_forward_hook(lambda _, args, out: map_output(out, leave), prepend=True)


def split_context(build: "Build") -> None:
    """Step of `parallelize`: attention and recurrent mixers of split rows, by the heads and with the dropout of this rank."""
    build.begin("split_context", "split_tensors", "place_dropout")
    if build.choices.attention != "context":
        return
    model, anatomy, plan, runtime = build.model, build.anatomy, build.plan, build.runtime
    runtime.attention_plans = apply_cp(model, anatomy, build.mesh, plan.comm.ulysses_chunks, runtime.dropout)
    if plan.parallel.cp > 1:
        apply_recurrent_context(model, anatomy, build.mesh)
