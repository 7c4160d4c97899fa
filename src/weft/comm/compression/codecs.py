"""Codecs by their names in a plan: those of Weft, and those of installed packages."""

from importlib.metadata import entry_points

import torch

from weft.comm.compression.codec import Codec, decode, encode
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.half import BFLOAT16, FLOAT16
from weft.comm.compression.int8 import INT8
from weft.comm.compression.one_bit import ONE_BIT
from weft.comm.compression.structured import STRUCTURED
from weft.errors import PlanError
from weft.plan import CODEC_GROUP, Comm

CODECS: dict[str, Codec] = {codec.name: codec for codec in (BFLOAT16, FLOAT16, INT8, STRUCTURED, ONE_BIT)}
LENGTHS = (1, 63, 1000)
"""Row lengths with which a codec of another package is tried."""


def build_feedback(comm: Comm) -> Feedback | None:
    """Create the empty state of the compressed reductions of a plan; None if the plan has no compression.

    Raises:
        PlanError: see `find_codec`.
    """
    if comm.compression == "none":
        return None
    takes_momentum = comm.compression == "1-bit"
    codec = find_codec(comm.compression)
    return Feedback(codec, codec.owner, keeps_errors=comm.error_feedback, takes_momentum=takes_momentum)


def find_codec(name: str) -> Codec:
    """Codec of a name: one of `CODECS`, or the object of an entry point in the group "weft.codecs".

    Raises:
        PlanError: no such entry point exists, its object is no codec, or the codec breaks a rule of `Codec`.
    """
    if name in CODECS:
        return CODECS[name]
    try:
        codec = entry_points(group=CODEC_GROUP)[name].load()
        problem = _problem_of(codec) if isinstance(codec, Codec) else f"it is {type(codec).__name__}, no Codec"
    except Exception as error:  # code of another package
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise PlanError(
            f"the codec {name} cannot be used: {problem}",
            where="plan.comm.compression",
            rule=f"an entry point in the group {CODEC_GROUP} names a weft.comm.compression.codec.Codec",
            fix="mend the package of the codec, or choose one of " + ", ".join(CODECS),
        )
    return codec


def _problem_of(codec: Codec) -> str:
    """Rule of `Codec` that a codec breaks; empty if it breaks none."""
    for length in LENGTHS:
        rows = torch.randn(3, length, generator=torch.Generator().manual_seed(0))
        messages = encode(codec, rows)
        if messages.shape != (3, codec.bytes(length)) or messages.dtype != torch.uint8:
            return (
                f"bytes({length}) is {codec.bytes(length)}, a message has {messages.dtype} {list(messages.shape)[1:]}"
            )
        decoded = decode(codec, messages, length)
        if decoded.shape != rows.shape or decoded.dtype != torch.float32:
            return f"a row of {length} is decoded to {decoded.dtype} {list(decoded.shape)[1:]}"
        if not torch.equal(decode(codec, encode(codec, rows[1:2]), length), decoded[1:2]):
            return "a message depends on other rows"
        rows[1, -1] = torch.nan
        if bool(decode(codec, encode(codec, rows), length)[1].isfinite().all()):
            return "NaN is not visible after decoding, so that a broken step would be applied"
    return ""
