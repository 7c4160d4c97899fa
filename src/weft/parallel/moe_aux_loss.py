"""How evenly routers use their experts: the load as a metric, and the auxiliary loss that evens it, for any layout.

The auxiliary loss of Switch Transformer (Fedus et al., 2021), as Transformers computes it from router logits, is a product of
two means over tokens; computed over what one rank happens to hold it would differ for every layout. Here it is computed for
each row on its own (DeepSeek-V3's sequence-wise loss; Transformers with batches of one row) and averaged over the rows of
the global batch: so it adds up over micro-batches and ranks, and the sums inside a row travel over cp and tp.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy, Block
from weft.anatomy.transformers import experts_per_token
from weft.comm import collectives
from weft.parallel.expert import load_imbalance, takes_indices
from weft.topology.mesh import AXES, CONTEXT_AXES, ranks_along


class RouterStats:
    """Keeps what the routers of a model say during training, until it is asked for."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, mesh: DeviceMesh):
        self.mesh = mesh
        config: Any = model.config.get_text_config()
        asked = bool(getattr(config, "output_router_logits", False))
        self.coefficient = float(getattr(config, "router_aux_loss_coef", 0.0)) if asked else 0.0
        self.top_k = experts_per_token(config) or 1
        self.layers = sum(len(block.router) for block in anatomy.blocks)
        """With routers, in the whole model."""
        self.num_experts = max((_count_experts(model, block) for block in anatomy.blocks), default=0)
        self.model, self.dtype = model, torch.promote_types(model.dtype, torch.float32)
        self.logits: list[Tensor] = []
        self.recording = True
        """Not while backward runs a block again: what it says has been heard."""
        self.counts_load = False
        self.load: dict[str, Tensor] = {}
        """Copies of tokens for each expert since `take_load`, by layer, [num_experts] int64: those of this rank's tokens."""
        for block in anatomy.blocks:
            for name in block.experts:
                self._watch_load(name, model.get_submodule(name))
            for name in block.router if self.coefficient else ():
                model.get_submodule(name).register_forward_hook(self._keep_logits)
        if self.coefficient:  # in a loop that never asks for the sums, logits of earlier forwards must not pile up
            model.register_forward_pre_hook(lambda *_: self.logits.clear())

    def is_on(self) -> bool:
        """Whether the auxiliary loss takes part in the forward that is to come."""
        return self.coefficient > 0 and self.model.training

    def _watch_load(self, name: str, experts: Any) -> None:
        num_experts = getattr(experts, "num_experts", None)  # before expert parallelism leaves a part of them here
        if num_experts is None or not takes_indices(experts):
            return
        self.counts_load = True

        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and self.recording:
                index = args[1] if len(args) > 1 else next(value for key, value in kwargs.items() if "ind" in key)
                load = torch.bincount(index.flatten(), minlength=num_experts)[:num_experts]
                self.load[name] = self.load[name] + load if name in self.load else load

        experts.register_forward_pre_hook(count, with_kwargs=True)

    def _keep_logits(self, router: nn.Module, args: Any, out: Any) -> None:
        if router.training and self.recording:
            self.logits.append(out[0])

    def no_sums(self, rows: int, device: torch.device) -> Tensor:
        """`take_sums` of no layer."""
        return torch.zeros(rows, 2, self.num_experts, dtype=self.dtype, device=device)

    def take_sums(self, rows: int, device: torch.device) -> Tensor:
        """`router_sums` of the layers that ran in the last forward.

        Args:
            rows: of the micro-batch.
            device: of this rank.
        """
        logits, self.logits = self.logits, []
        return router_sums(logits, rows, self.top_k).to(self.dtype) if logits else self.no_sums(rows, device)

    def loss(self, sums: Tensor, tokens: int) -> Tensor:
        """Sum over rows of their auxiliary loss; every rank of cp and tp has the same value.

        Args:
            sums: of all layers of the model.
            tokens: of a row, on this rank.
        """
        groups = [self.mesh.get_group(axis) for axis in (*CONTEXT_AXES, "tp") if ranks_along(self.mesh, axis) > 1]
        return balance_loss(sums, tokens * self.layers, groups).sum()

    def tokens_of(self, seq_len: int) -> int:
        """Tokens of a row that go through the routers of this rank: tp ranks have a part each, sp or not."""
        return seq_len // ranks_along(self.mesh, *CONTEXT_AXES, "tp")

    def take_load(self) -> float | None:
        """Load of the busiest expert over the mean, in the most uneven layer, since the last call; the same on the ranks of a
        stage of a pipeline, 0 where it has no experts.

        None where there are no experts at all, or none that can be counted.
        """
        if not self.counts_load:
            return None
        if not self.load:
            return 0.0
        loads = torch.stack(list(self.load.values()))
        self.load = {}
        collectives.all_reduce(loads, self.mesh, tuple(axis for axis in AXES if axis != "pp"))
        return max(load_imbalance(load) for load in loads)


def router_sums(logits: list[Tensor], rows: int, top_k: int) -> Tensor:
    """What the auxiliary loss needs of some layers; the sums of all layers add up.

    Args:
        logits: of each layer, [rows * tokens, num_experts], row after row: this rank's tokens.
        rows: how many.
        top_k: experts a token goes to.

    Returns:
        [rows, 2, num_experts] float32 (float64 for float64 logits): choices of each expert, and sums of its probabilities.
    """
    stacked = torch.stack([layer.unflatten(0, (rows, -1)) for layer in logits], 1)  # [rows, layers, tokens, experts]
    probabilities = stacked.to(torch.promote_types(stacked.dtype, torch.float32)).softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, -1).indices, 1.0)
    return torch.stack([chosen.sum((1, 2)), probabilities.sum((1, 2))], 1)


def balance_loss(sums: Tensor, tokens: int, groups: list[dist.ProcessGroup]) -> Tensor:
    """Switch Transformer's auxiliary loss of each row, over the tokens of all layers.

    Args:
        sums: of `router_sums`, over all layers.
        tokens: of a row that they are sums over, each layer's counted: this rank's.
        groups: ranks that hold other tokens of the same rows.

    Returns:
        [rows]: num_experts x sum over experts of (share of choices x mean probability), which is top_k when the load is even.
    """
    for group in groups:
        sums = collectives.reduce(sums, group)
        tokens *= group.size()
    choices, probabilities = (sums / tokens).unbind(1)
    return sums.shape[-1] * (choices * probabilities).sum(-1)


def _count_experts(model: PreTrainedModel, block: Block) -> int:
    return max((int(getattr(model.get_submodule(name), "num_experts", 0)) for name in block.experts), default=0)
