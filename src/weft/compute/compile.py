"""torch.compile of each block of a model (Ansel et al., PyTorch 2, 2024), as torchtitan compiles its layers.

The operators between the matmuls of a block become a few kernels, and the host issues fewer of them. Blocks of one shape share
their compiled code. Attention by documents and the hooks of other techniques are not compiled: they cut a block into several
graphs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from weft.compat import inductor


class CompiledRegions:
    """Backend of torch.compile: Inductor, with a count of the compiled regions that have run.

    torch falls back to eager code silently, for instance where a block is first called inside a dispatch mode, and for the rest
    of the process. The count shows that compiled code runs.
    """

    def __init__(self, lower: Callable[[fx.GraphModule, list[Any]], Callable[..., Any]] = inductor) -> None:
        self.lower = lower
        """Compiler of a graph."""
        self.forwards = 0
        """Forwards of compiled regions since the start: one for each region of each block and micro-batch, again for each
        recomputation and evaluation."""
        self.graphs = 0
        """Graphs that were compiled."""

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph, as a backend of torch.compile."""
        compiled = self.lower(graph, inputs)
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.forwards += 1
            return compiled(*args)

        return run


def compile_blocks(model: nn.Module, blocks: Iterable[str]) -> CompiledRegions:
    """Compile the forward of blocks, in place. The first call with each shape compiles, which may take a minute.

    Args:
        model: model on any device, including meta, before recompute and ZeRO.
        blocks: names of its blocks.

    Returns:
        Count of the compiled regions that run.
    """
    regions = CompiledRegions()  # one for all blocks, because blocks share code only under the same backend
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=regions)
    return regions
