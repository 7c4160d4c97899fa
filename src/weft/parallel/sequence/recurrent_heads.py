"""Recurrent mixers divided by heads: Mamba-2 (Dao and Gu, 2024), gated delta nets (Yang et al., 2024), short convolutions.

Each head has a separate state, so that a rank computes the recurrence of its own heads, over whole sequences:

    input projections, convolution     rows or channels of its heads
    A_log, D, dt_bias, gated norm      those of its heads
    output projection                  columns of its heads; the outputs are summed over ranks

A short convolution (LFM2) has channels instead of heads. Heads of Mamba-2 share the projections B and C in groups. With fewer
groups than ranks, several ranks compute the same group.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from weft.parallel.tensor.adapters import has_adapters
from weft.parallel.weights import to_local

Segment = tuple[int, int]
"""Rows of a projection, and the heads or groups that they belong to."""


@dataclass(frozen=True)
class MixerHeads:
    """Rows and attributes of a mixer that belong to its heads."""

    rows: dict[str, tuple[Segment, ...]]
    """Segments of the first dim of a parameter, or of the last one of a buffer, by name within the mixer."""
    output: str
    """Output projection, whose columns belong to heads."""
    counts: dict[str, int]
    """Attributes of the mixer that count heads or their features."""
    groups: dict[str, int]
    """Attributes that count groups; a rank has at least one."""
    convolution: str = "conv1d"

    def is_even(self, ranks: int) -> bool:
        """True if every rank has its own part of each segment."""
        return all(units % ranks == 0 for segments in self.rows.values() for _, units in segments)

    def own_rows(self, name: str, rank: int, ranks: int) -> tuple[Segment, ...]:
        """Start and length of the rows of a rank, for each segment of a parameter."""
        segments = self.rows[name]
        starts = [0, *accumulate(size for size, _ in segments)]
        return tuple(
            (start + rank * units // ranks * (size // units), max(units // ranks, 1) * (size // units))
            for start, (size, units) in zip(starts, segments, strict=False)
        )


def mixer_heads(mixer: Any, ranks: int) -> MixerHeads | None:
    """Heads of a recurrent mixer of Transformers.

    Args:
        mixer: recurrent mixer; may be on the meta device.
        ranks: ranks that divide its heads.

    Returns:
        None if ranks cannot divide them: another kind of mixer, another number of heads, weights of unknown roles.
    """
    if hasattr(mixer, "num_v_heads") and hasattr(mixer, "key_dim"):
        found = _of_delta_net(mixer)
        divides = mixer.num_k_heads % ranks == 0 and mixer.num_v_heads % ranks == 0
    elif hasattr(mixer, "n_groups") and hasattr(mixer, "ssm_state_size") and hasattr(mixer, "num_heads"):
        found = _of_mamba2(mixer)
        own_groups = mixer.n_groups % ranks == 0
        # A norm over the features of all heads of a group needs them on one rank.
        divides = mixer.num_heads % ranks == 0 and (
            own_groups or (ranks % mixer.n_groups == 0 and not _has_norm(mixer))
        )
    elif (channels := _channels(mixer)) is not None:
        found, divides = _of_short_convolution(mixer, channels), channels % ranks == 0
    else:
        return None
    shared = {f"{name}.weight" for name in ("norm", "o_norm") if f"{name}.weight" not in found.rows}
    known = {*found.rows, f"{found.output}.weight", f"{found.output}.bias", *shared}
    is_known = {name for name, _ in mixer.named_parameters()} <= known
    return found if divides and is_known and not has_adapters(mixer) else None


def _of_mamba2(mixer: Any) -> MixerHeads:
    features, scalars = (mixer.intermediate_size, mixer.num_heads), (mixer.num_heads, mixer.num_heads)
    states = (mixer.n_groups * mixer.ssm_state_size, mixer.n_groups)
    projections, channels = (features, features, states, states, scalars), (features, states, states)
    rows = {
        **{f"in_proj.{name}": projections for name in ("weight", "bias")},
        **{f"conv1d.{name}": channels for name in ("weight", "bias")},
        **dict.fromkeys(("A_log", "D", "dt_bias"), (scalars,)),
        "mup_vector": projections,
        "norm.weight": (features,),
    }
    return MixerHeads(
        _present(mixer, rows),
        "out_proj",
        {"num_heads": mixer.num_heads, "intermediate_size": mixer.intermediate_size},
        {"n_groups": mixer.n_groups, "groups_time_state_size": states[0]},
    )


def _of_delta_net(mixer: Any) -> MixerHeads:
    keys, values = (mixer.key_dim, mixer.num_k_heads), (mixer.value_dim, mixer.num_v_heads)
    scalars = (mixer.num_v_heads, mixer.num_v_heads)
    layers = {
        "in_proj_qkvz": ((2 * (mixer.key_dim + mixer.value_dim), mixer.num_k_heads),),  # ordered by key head
        "in_proj_ba": ((2 * mixer.num_v_heads, mixer.num_k_heads),),
        "in_proj_qkv": (keys, keys, values),
        "in_proj_z": (values,),
        "in_proj_b": (scalars,),
        "in_proj_a": (scalars,),
        "q_proj": (keys,),
        "k_proj": (keys,),
        "v_proj": (values,),
        "g_proj": (values,),
        "a_proj": (scalars,),
        "b_proj": (scalars,),
        "conv1d": (keys, keys, values),
    }
    rows = {f"{layer}.{name}": segments for layer, segments in layers.items() for name in ("weight", "bias")}
    counts = ("num_k_heads", "num_v_heads", "key_dim", "value_dim")
    return MixerHeads(
        _present(mixer, rows | dict.fromkeys(("A_log", "dt_bias"), (scalars,))),
        "out_proj" if hasattr(mixer, "out_proj") else "o_proj",
        {name: getattr(mixer, name) for name in counts},
        {},
    )


def _channels(mixer: Any) -> int | None:
    """Channels of a short convolution with two gates; None for another mixer."""
    convolution, projection = getattr(mixer, "conv", None), getattr(mixer, "in_proj", None)
    if not isinstance(convolution, nn.Conv1d) or not isinstance(projection, nn.Linear):
        return None
    channels = convolution.groups
    is_alone = {name.partition(".")[0] for name, _ in mixer.named_parameters()} == {"conv", "in_proj", "out_proj"}
    fits = convolution.in_channels == channels and to_local(projection.weight).shape[0] == 3 * channels
    return channels if is_alone and fits else None


def _of_short_convolution(mixer: Any, channels: int) -> MixerHeads:
    own = (channels, channels)
    layers = {"in_proj": (own, own, own), "conv": (own,)}
    rows = {f"{layer}.{name}": segments for layer, segments in layers.items() for name in ("weight", "bias")}
    return MixerHeads(_present(mixer, rows), "out_proj", {}, {}, "conv")


def _present(mixer: nn.Module, rows: dict[str, tuple[Segment, ...]]) -> dict[str, tuple[Segment, ...]]:
    names = {name for name, _ in (*mixer.named_parameters(), *mixer.named_buffers())}
    return {name: segments for name, segments in rows.items() if name in names}


def _has_norm(mixer: Any) -> bool:
    return any(True for _ in mixer.norm.parameters()) if hasattr(mixer, "norm") else False


def set_local_mixer(mixer: Any, heads: MixerHeads, ranks: int) -> None:
    """Set the numbers of heads, groups and features of this rank, which the forward of the mixer reads, in place."""
    for name, count in heads.counts.items():
        setattr(mixer, name, count // ranks)
    before = heads.groups.get("n_groups", 1)
    for name, count in heads.groups.items():
        if hasattr(mixer, name):
            setattr(mixer, name, count // before * max(before // ranks, 1))
    if hasattr(mixer, "norm") and hasattr(mixer.norm, "n_groups"):
        mixer.norm.n_groups = mixer.n_groups
    convolution: Any = mixer.get_submodule(heads.convolution)
    channels = sum(length for _, length in heads.own_rows(f"{heads.convolution}.weight", 0, ranks))
    convolution.groups = convolution.in_channels = convolution.out_channels = channels
    if hasattr(mixer, "conv_dim"):
        mixer.conv_dim = channels
