"""Choice of the attention kernel of a run: candidates are timed on its device and its shapes, forward and backward.

Two operators are concerned. Rows are computed by torch's SDPA, whose back ends are flash, cuDNN, memory-efficient and matmuls.
Documents are computed by the variable-length flash operator. Both flash operators have torch's own implementation,
FlashAttention-2, and others that installed packages bring (FA3: Shah et al., 2024).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.compat import flash_implementation, flash_implementations
from weft.compute.sequences import Sequences, VarlenKernel
from weft.device.device import Device
from weft.errors import PlanError

BACK_ENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Back ends of SDPA by name. Every other name is an implementation of its flash back end."""
WARM_UP, CALLS = 2, 5
MARGIN = 0.95
"""Largest part of torch's own time that another kernel may take to replace it, so that noise of the times changes nothing."""


class AttentionShape(NamedTuple):
    """Attention of a micro-batch on one rank."""

    documents: tuple[tuple[int, ...], ...]
    """Lengths of the documents of each row; equal sums."""
    heads: int
    kv_heads: int
    """Heads of queries, and of keys and values; the latter divide the former."""
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None
    """Most keys that a token attends to, including itself; None: all of its document."""
    kernel: VarlenKernel | None
    """Kernel that computes document by document; None: SDPA computes all rows, with a mask where it is needed."""

    @property
    def window_hides(self) -> bool:
        """True if the window is shorter than a row."""
        return self.window is not None and self.window < sum(self.documents[0])

    @property
    def needs_mask(self) -> bool:
        """True if causal attention over full rows is not sufficient."""
        return self.window_hides or any(len(row) > 1 for row in self.documents)

    def mask(self, device: torch.device) -> Tensor:
        """Bool [rows, 1, S, S], true where a query sees a key."""
        rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in self.documents]
        ids = torch.stack(rows).to(device)
        seen = (ids[:, :, None] == ids[:, None]).tril()
        return (seen if self.window is None else seen.triu(1 - self.window))[:, None]

    def sequences(self, device: torch.device) -> Sequences:
        """Documents as causal sequences of a variable-length kernel."""
        lengths = [length for row in self.documents for length in row]
        ends = tuple(accumulate(lengths, initial=0))
        borders, longest = torch.tensor(ends, dtype=torch.int32, device=device), max(lengths)
        left = -1 if self.window is None else self.window - 1
        return Sequences(ends, ends, left, 0, borders, borders, longest, longest)


class Timings(NamedTuple):
    """Seconds of forward and backward of one layer by kernel; "reference" is torch's own choice."""

    rows: dict[str, float]
    documents: dict[str, float]
    failures: dict[str, str]
    """Reasons why kernels do not run."""

    def text(self) -> str:
        """Table of the times for the log."""
        parts = [
            f"{kind}: " + ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in times.items())
            for kind, times in (("rows", self.rows), ("documents", self.documents))
            if times
        ]
        return "; ".join([*parts, *(f"no {name}: {reason}" for name, reason in self.failures.items())])


class AttentionChoice(NamedTuple):
    """Kernels of a run."""

    rows: str = "reference"
    """First back end of SDPA, or implementation of its flash back end; "reference": torch's own order."""
    flash: str = "flash"
    """Implementation of both flash operators; "flash": torch's own."""

    def text(self, timings: Timings) -> str:
        """Kernels and the reason for them, for the log."""
        parts = [f"{self.rows} for rows"] * bool(timings.rows) + [f"{self.flash} for documents"] * bool(
            timings.documents
        )
        return f"{', '.join(parts) or self.rows}, by time of one layer: {timings.text()}"


def named_choice(name: str) -> AttentionChoice:
    """Kernels that `plan.compute.kernels.attention` names; "reference" changes nothing."""
    return AttentionChoice(name, "flash" if name in BACK_ENDS or name == "reference" else name)


def choose_attention(rows: Mapping[str, float], documents: Mapping[str, float]) -> AttentionChoice:
    """Fastest kernels by measured times; torch's own unless another one takes at most `MARGIN` of its time.

    Args:
        rows: seconds by kernel of SDPA; empty if no rows are computed by it.
        documents: seconds by implementation of the variable-length flash operator; empty if it is not used. One process has
            one implementation, and documents are the more frequent of the two.
    """
    if not documents:
        return named_choice(_fastest(rows, "reference"))
    flash = _fastest(documents, "flash")
    own = "reference" if flash == "flash" else flash
    others = [name for name in rows if name in BACK_ENDS and name != "flash"]
    return AttentionChoice(_fastest({name: rows[name] for name in (own, *others) if name in rows}, own), flash)


def _fastest(times: Mapping[str, float], own: str) -> str:
    best = min(times, key=times.__getitem__, default=own)
    return best if times.get(best, 0.0) <= MARGIN * times.get(own, torch.inf) else own


@contextmanager
def use_attention(choice: AttentionChoice) -> Iterator[None]:
    """Context in which attention has the chosen kernels; torch keeps both settings for the whole process, backward included.

    SDPA takes the other back ends in torch's order where the chosen one does not support a shape.
    """
    with ExitStack() as stack:
        if choice.flash != "flash":
            stack.enter_context(flash_implementation(choice.flash))
        if choice.rows != "reference":
            first = BACK_ENDS.get(choice.rows, SDPBackend.FLASH_ATTENTION)
            rest = [] if first == SDPBackend.MATH else [BACK_ENDS[name] for name in enabled_back_ends()]
            stack.enter_context(sdpa_kernel([first, *rest], set_priority=True))
        yield


def enabled_back_ends() -> list[str]:
    """Back ends that neither torch nor its user has switched off, in torch's order; cuDNN only where it is asked for."""
    known = torch.backends.cuda
    enabled = {"flash": known.flash_sdp_enabled(), "efficient": known.mem_efficient_sdp_enabled()}
    return [name for name, is_enabled in (enabled | {"math": known.math_sdp_enabled()}).items() if is_enabled]


def candidates(device: Device) -> list[str]:
    """Kernels between which a run on a device chooses; one or none where there is nothing to choose."""
    cudnn = ["cudnn"] if torch.backends.cuda.cudnn_sdp_enabled() else []
    known = {*enabled_back_ends(), *cudnn, *flash_implementations()} - {"math"}  # it keeps all scores
    return [name for name in device.attention_kernels if name in known]


def refused_kernel(name: str, device: Device, reason: str) -> PlanError:
    """Error for an attention kernel that a plan names and that does not run."""
    return PlanError(
        f"attention = {name!r} on {device.type}",
        where="plan.compute.kernels.attention",
        rule=reason,
        fix="leave plan.compute.kernels.attention out, or set it to 'auto'",
    )


def time_attention(
    shape: AttentionShape, names: Sequence[str], device: Device, torch_device: torch.device, *, by_rows: bool = True
) -> Timings:
    """Time forward and backward of one layer with each kernel.

    Args:
        shape: attention of the layer.
        names: kernels, and "reference".
        device: device of this host.
        torch_device: device of this rank.
        by_rows: False: SDPA computes no rows.
    """
    found = Timings({}, {}, {})
    rows = _rows_of(shape, torch_device) if by_rows else None
    documents = _documents_of(shape, torch_device) if shape.kernel is not None else None
    for name in names:
        is_flash = name not in BACK_ENDS and name != "reference"
        try:
            with flash_implementation(name if is_flash else ""):
                if documents is not None and (is_flash or name == "flash"):
                    found.documents[name] = median_seconds(documents, device)
                only = BACK_ENDS.get(name, SDPBackend.FLASH_ATTENTION)
                with nullcontext() if name == "reference" else sdpa_kernel(only), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch says of each other back end why it is not used
                    if rows is not None:
                        found.rows[name] = median_seconds(rows, device)
        except (RuntimeError, ImportError, NotImplementedError) as error:  # also a lack of memory
            found.failures[name] = str(error).partition(". ")[0].partition("\n")[0].removesuffix(".")
    return found


def median_seconds(run: Callable[[], Any], device: Device) -> float:
    """Median time between two events of the device around a call, after calls that warm it up."""
    pairs = []
    for _ in range(WARM_UP):
        run()
    for _ in range(CALLS):
        start, end = device.event(), device.event()
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    device.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs) / 1e3


def _rows_of(shape: AttentionShape, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of SDPA, with the arguments of Transformers: keys are repeated where SDPA does not take groups."""
    masked = shape.kernel is None and shape.needs_mask
    groups = not masked and shape.head_dim == shape.value_dim <= 256
    q, k, v, grad = _inputs(shape, shape.kv_heads if groups else shape.heads, device)
    q, k, v, grad = (x.unflatten(0, (len(shape.documents), -1)).transpose(1, 2) for x in (q, k, v, grad))
    for x in (q, k, v):
        x.requires_grad_()
    mask = shape.mask(device) if masked else None

    def run() -> Any:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=groups)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def _documents_of(shape: AttentionShape, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of the variable-length kernel."""
    q, k, v, grad = _inputs(shape, shape.kv_heads, device)
    kernel, sequences, scale = shape.kernel, shape.sequences(device), shape.head_dim**-0.5
    assert kernel is not None

    def run() -> Any:
        out, lse = kernel.forward(q, k, v, sequences, scale)
        return kernel.backward(grad, q, k, v, out, lse, sequences, scale)

    return run


def _inputs(shape: AttentionShape, kv_heads: int, device: torch.device) -> list[Tensor]:
    """Queries, keys, values and a gradient of the output, [tokens, heads, size] each."""
    tokens, dims = sum(map(sum, shape.documents)), (shape.head_dim, shape.head_dim, shape.value_dim, shape.value_dim)
    heads = (shape.heads, kv_heads, kv_heads, shape.heads)
    generator = torch.Generator(device).manual_seed(0)  # the numbers of the run are unchanged
    make: dict[str, Any] = {"generator": generator, "dtype": shape.dtype, "device": device}
    return [torch.randn(tokens, count, size, **make) for count, size in zip(heads, dims, strict=True)]
