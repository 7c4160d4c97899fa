"""Techniques of a plan by name, for tests of pairs and for docs/compatibility.md."""

from itertools import combinations
from typing import Any

Tables = dict[str, dict[str, Any]]

SPLITS: dict[str, Tables] = {
    "zero 0": {"parallel": {"zero": 0}},
    "zero 1": {"parallel": {"zero": 1}},
    "zero 2": {"parallel": {"zero": 2}},
    "zero 3": {"parallel": {"zero": 3}},
    "dp_replicate": {"parallel": {"dp_replicate": 2}},
    "tp": {"parallel": {"tp": 2}},
    "tp without sp": {"parallel": {"tp": 2, "sp": False}},
    "tp in chunks": {"parallel": {"tp": 2}, "comm": {"overlap_chunks": 2}},
    "cp, ring": {"parallel": {"cp": 2}},
    "cp, Ulysses": {"parallel": {"cp": 2, "cp_ulysses": 2}},
    "ep": {"parallel": {"ep": 2}},
    "ep, joint": {"parallel": {"ep": 2}, "comm": {"expert_overlap": "joint"}},
    "ep, replicas": {"parallel": {"ep": 2, "expert_balance": "replicate"}},
    "pp, 1f1b": {"parallel": {"pp": 2}, "pipeline": {"schedule": "1f1b"}},
    "pp, zb-h1": {"parallel": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}},
}
"""Techniques that split the work over ranks."""
NEUTRAL: dict[str, Tables] = {
    "split weights": {"precision": {"weights": "split_even"}},
    "recompute block": {"memory": {"recompute": ("block",)}},
    "recompute attention": {"memory": {"recompute": ("attention",)}},
    "recompute mlp": {"memory": {"recompute": ("mlp",)}},
    "recompute activation": {"memory": {"recompute": ("activation",)}},
    "recompute norm": {"memory": {"recompute": ("norm",)}},
    "offload block": {"memory": {"offload": ("block",), "offload_to": "disk"}},
    "offload attention": {"memory": {"offload": ("attention",), "offload_to": "disk"}},
    "offload mlp": {"memory": {"offload": ("mlp",), "offload_to": "disk"}},
    "states on a disk": {"memory": {"optimizer_device": "disk"}},
    "weights on a disk": {"parallel": {"zero": 3}, "memory": {"parameters_device": "disk"}},
}
"""Techniques that change no bit of a step."""
LOSSY: dict[str, Tables] = {
    "states of 8 bits": {"precision": {"optimizer_state_dtype": "int8"}},
    "backward in fp16": {"precision": {"backward": "fp16", "loss_scale": 4096.0}},
}
"""Techniques that change results within rounding."""
TECHNIQUES = SPLITS | NEUTRAL | LOSSY
PAIRS = list(combinations(TECHNIQUES, 2))


def join(first: str, second: str) -> Tables | None:
    """Tables of a plan with two techniques; None if they are alternatives, two values of first setting."""
    joined: Tables = {table: dict(settings) for table, settings in TECHNIQUES[first].items()}
    for table, settings in TECHNIQUES[second].items():
        for key, value in settings.items():
            before = joined.setdefault(table, {}).get(key, value)
            if isinstance(value, tuple):
                joined[table][key] = tuple(dict.fromkeys((*before, *value)) if before is not value else value)
            elif before != value:
                return None
            else:
                joined[table][key] = value
    same_axis = (
        {"tp", "cp", "pp"}
        & TECHNIQUES[first].get("parallel", {}).keys()
        & TECHNIQUES[second].get("parallel", {}).keys()
    )
    return None if same_axis else joined


def ranks_of(tables: Tables) -> int:
    """Number of ranks for a plan: two for each axis, and two data ranks if it has no axis; at most four."""
    parallel = tables.get("parallel", {})
    axes = [axis for axis in ("dp_replicate", "tp", "cp", "pp") if axis in parallel]
    return 4 if len(axes) + ("ep" in parallel) > 1 else 2
