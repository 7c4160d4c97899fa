"""Registry of codecs by their names in a plan."""

from weft.comm.compression.codec import Codec
from weft.comm.compression.feedback import Feedback
from weft.comm.compression.half import BFLOAT16, FLOAT16
from weft.comm.compression.int8 import INT8
from weft.comm.compression.one_bit import ONE_BIT
from weft.comm.compression.structured import STRUCTURED
from weft.plan import Comm

CODECS: dict[str, Codec] = {codec.name: codec for codec in (BFLOAT16, FLOAT16, INT8, STRUCTURED, ONE_BIT)}


def build_feedback(comm: Comm) -> Feedback | None:
    """Create the empty state of the compressed reductions of a plan; None if the plan has no compression."""
    if comm.compression == "none":
        return None
    takes_momentum = comm.compression == "1-bit"
    codec = CODECS[comm.compression]
    # A sum of sparse messages is not sparse: 2:4 would drop half of it again, and int8 is no larger.
    owner_codec = INT8 if codec is STRUCTURED else codec
    return Feedback(codec, owner_codec, keeps_errors=comm.error_feedback, takes_momentum=takes_momentum)
