"""torch.compile of each block of a model (Ansel et al., PyTorch 2, 2024), as torchtitan compiles its layers.

The operators between the matmuls of a block become a few kernels, and the host issues fewer of them. Blocks of one shape share
their compiled code. Attention by documents and the hooks of other techniques are not compiled: they cut a block into several
graphs.
"""

from collections.abc import Iterable

import torch
from torch import nn


def compile_blocks(model: nn.Module, blocks: Iterable[str]) -> None:
    """Compile the forward of blocks, in place. The first call with each shape compiles, which may take a minute.

    Args:
        model: model on any device, including meta, before recompute and ZeRO.
        blocks: names of its blocks.
    """
    for name in blocks:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward)
