"""Run a script under accelerate's FSDP2 on CPU ranks, where accelerate 1.15 reads its FSDP settings on accelerators only.

torchrun --nproc-per-node 2 fsdp_script.py ZERO SCRIPT ARGUMENTS...     # ZERO: 2 keeps gathered weights, 3 frees them
"""

import runpy
import sys
from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType

BLOCKS = {
    "sft": ("LlamaDecoderLayer",),
    "lora": ("LlamaDecoderLayer",),
    "vlm": ("LlamaDecoderLayer", "CLIPEncoderLayer"),
    "dit": ("BasicTransformerBlock",),
}
"""Classes of the blocks by the last argument."""
zero, sys.argv = sys.argv[1], sys.argv[2:]
original = Accelerator.__init__


def init(self: Accelerator, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.state.distributed_type = DistributedType.FSDP
    self.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=zero == "3",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[*BLOCKS[sys.argv[-1]]],
    )


Accelerator.__init__ = init  # type: ignore[method-assign]
runpy.run_path(sys.argv[0], run_name="__main__")
