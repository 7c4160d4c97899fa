"""Kinds of jobs with a trainer of TRL: its class, the rows that it needs, and the keys that it takes. Imports no torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Kind = Literal["dpo", "kto", "orpo", "cpo", "simpo", "reward", "grpo", "rloo", "online_dpo", "gkd"]


class TrainerKind(NamedTuple):
    """A trainer of TRL, as jobs use it."""

    name: str
    """Beginning of the names of its class and of its configuration."""
    columns: tuple[str, ...]
    """Columns of a row. Preferences may also have `prompt`; rewards get all further columns."""
    module: str = "trl"
    """Module that has the class. Those of `trl.experimental` may lack it in another version."""
    rewards: bool = False
    """True if it scores answers by trainer.rewards."""
    reference: bool = False
    """True if it takes trainer.reference."""
    teacher: bool = False
    """True if it takes trainer.teacher."""
    evaluates: bool = True
    """True if it can evaluate held-out rows."""
    template: Literal["row", "option", ""] = "row"
    """Place of the arguments of the chat template: a column, the option chat_template_kwargs, or none."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Defaults of options that make the kind; `loss_type` among them is fixed."""
    positive: tuple[str, ...] = ()
    """Options that TRL divides by, or without which nothing is learned."""


PAIRS = ("chosen", "rejected")
KINDS: dict[Kind, TrainerKind] = {
    "dpo": TrainerKind("DPO", PAIRS, reference=True, positive=("beta", "discopop_tau")),
    "kto": TrainerKind("KTO", ("prompt", "completion", "label"), reference=True, positive=("beta",)),
    "orpo": TrainerKind("ORPO", PAIRS, "trl.experimental.orpo"),
    "cpo": TrainerKind("CPO", PAIRS, "trl.experimental.cpo", positive=("beta",)),
    "simpo": TrainerKind(
        "CPO", PAIRS, "trl.experimental.cpo", options={"loss_type": "simpo", "cpo_alpha": 0.0}, positive=("beta",)
    ),
    "reward": TrainerKind("Reward", PAIRS),
    "grpo": TrainerKind("GRPO", ("prompt",), rewards=True, template="option", positive=("temperature",)),
    "rloo": TrainerKind("RLOO", ("prompt",), rewards=True, template="option", positive=("temperature",)),
    "online_dpo": TrainerKind(
        "OnlineDPO",
        ("prompt",),
        "trl.experimental.online_dpo",
        rewards=True,
        reference=True,
        evaluates=False,
        template="",
        positive=("beta", "temperature"),
    ),
    "gkd": TrainerKind(
        "GKD", ("messages",), "trl.experimental.gkd", teacher=True, template="", positive=("temperature",)
    ),
}


def names_of(field: str) -> str:
    """Kinds with a property, for messages.

    Args:
        field: field of `TrainerKind` that is true for them.
    """
    return ", ".join(name for name, kind in KINDS.items() if getattr(kind, field))
