"""Auxiliary losses, load metric and correction biases of Mixture-of-Experts routers, independent of the layout.

The auxiliary loss of Switch Transformer (Fedus et al., 2021), as Transformers computes it from router logits, is a product of
two means over tokens. Computed over the tokens of one rank, it would differ between layouts. Here it is computed separately for
each row (as the sequence-wise loss of DeepSeek-V3, or Transformers with batches of one row) and averaged over the rows of the
global batch. It is therefore additive over micro-batches and data ranks; the sums within a row are all-reduced over cp and tp.

The z-loss of ST-MoE (Zoph et al., 2022), the mean of logsumexp(router logits)^2, keeps router logits small. It is a mean over
the tokens of all rows and layers, so that its sums are additive over everything.

Without an auxiliary loss, a bias on the scores by which a router chooses keeps loads even (DeepSeek-V3 Technical Report,
2024): after each step, the bias of each expert grows by a fixed amount if the expert had fewer copies of tokens in the global
batch than the mean, and shrinks by it if it had more. Families with such a bias have it as a buffer, which checkpoints save.
"""

import copy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from weft.anatomy.roles import Anatomy, Block
from weft.anatomy.transformers import experts_per_token
from weft.comm import collectives
from weft.parallel.experts.checks import takes_indices
from weft.topology.mesh import AXES, CONTEXT_AXES, ranks_along


def count_indices(indices: Tensor, size: int) -> Tensor:
    """Count of each index below `size`, int64 [size]. `torch.bincount` would wait for the device, to read the largest index.

    Args:
        indices: integers of any shape; larger indices do not count.
        size: number of counts.
    """
    flat = indices.flatten().long()
    counts = torch.zeros(size + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat.clamp(max=size), torch.ones_like(flat))[:size]


def chosen_experts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Indices of the experts that each token chooses, among the arguments of an experts module."""
    index: Tensor = args[1] if len(args) > 1 else next(value for key, value in kwargs.items() if "ind" in key)
    return index


class RouterStats:
    """Recorder of router logits and expert load during training."""

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, mesh: DeviceMesh):
        self.mesh = mesh
        config: Any = model.config.get_text_config() if anatomy.has_roles else None
        enabled = bool(getattr(config, "output_router_logits", False))
        self.coefficient = float(getattr(config, "router_aux_loss_coef", 0.0)) if enabled else 0.0
        """Factor of the load-balancing loss."""
        self.z_coefficient = 0.0
        """Factor of the z-loss; see `use_z_loss`."""
        self.z_sum: Tensor | None = None
        """z-loss summed over the rows of this rank in this step; the same on all ranks of cp and tp; None without rows."""
        self.top_k = experts_per_token(config) or 1
        self.routers = frozenset(name for block in anatomy.blocks for name in block.router)
        """Names of the routers of the full model."""
        self.num_experts = max((_count_experts(model, block) for block in anatomy.blocks), default=0)
        self.model, self.dtype = model, torch.promote_types(getattr(model, "dtype", torch.float32), torch.float32)
        self.logits: list[Tensor] = []
        self.recording = True
        """False while backward recomputes a block, whose forward has already been recorded."""
        self.counts_load = False
        self.load: dict[str, Tensor] = {}
        """Token copies per expert since the last `take_loads`, by layer, [num_experts] int64; tokens of this rank only."""
        self.records_window = False
        self.window: dict[str, Tensor] = {}
        """The same since the last `take_window`; empty without `records_window`."""
        self.corrected: dict[str, nn.Module] = {}
        """Router with a correction bias, by the name of its experts."""
        for block in anatomy.blocks:
            if (router := find_corrected(model, block)) is not None:
                self.corrected[block.experts[0]] = router
            for name in block.experts:
                self._count_load(name, model.get_submodule(name))
        if self.coefficient:
            self._record_logits()

    def _record_logits(self) -> None:
        modules = dict(self.model.named_modules())
        for name in self.routers & modules.keys():  # a pipeline stage has some of them
            modules[name].register_forward_hook(self._store_logits)
        # Discards logits of earlier forwards in a loop that never calls take_sums.
        self.model.register_forward_pre_hook(lambda *_: self.logits.clear())

    def use_z_loss(self, coefficient: float) -> None:
        """Add the z-loss, with its factor, to the loss of the training step; to be called before the first forward."""
        if coefficient and not self.coefficient:
            self._record_logits()
        self.z_coefficient = coefficient

    def is_on(self) -> bool:
        """True if the next forward contributes to the auxiliary losses."""
        return self.coefficient + self.z_coefficient > 0 and self.model.training

    def _count_load(self, name: str, experts: Any) -> None:
        num_experts = getattr(experts, "num_experts", None)  # of all ranks: expert parallelism is applied later
        if num_experts is None or not takes_indices(experts):
            return
        self.counts_load = True

        @torch.compiler.disable  # the name would make another graph for each layer
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and self.recording:
                index = chosen_experts(args, kwargs)
                load = count_indices(index, num_experts)
                self.load[name] = self.load[name] + load if name in self.load else load
                if self.records_window:
                    self.window[name] = self.window[name] + load if name in self.window else load

        experts.register_forward_pre_hook(count, with_kwargs=True)

    @torch.compiler.disable
    def _store_logits(self, router: nn.Module, args: Any, out: Any) -> None:
        if router.training and self.recording:
            self.logits.append(out[0])

    def zero_sums(self, rows: int, device: torch.device) -> Tensor:
        """Result of `take_sums` without layers."""
        columns = 2 * self.num_experts * (self.coefficient > 0) + (self.z_coefficient > 0)
        return torch.zeros(rows, columns, dtype=self.dtype, device=device)

    def take_sums(self, rows: int, device: torch.device) -> Tensor:
        """Return and reset the sums over tokens of the layers that ran in the last forward; additive over layers.

        Args:
            rows: number of rows of the micro-batch.
            device: device of the result if no layer ran.

        Returns:
            [rows, columns], float32 or float64: columns of `load_sums` and of `squared_logsumexp`, of the losses that are on.
        """
        if not self.logits:
            return self.zero_sums(rows, device)
        stacked = torch.stack([layer.unflatten(0, (rows, -1)) for layer in self.logits], 1)
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        self.logits = []
        columns = [load_sums(stacked, self.top_k)] if self.coefficient else []
        columns += [squared_logsumexp(stacked)] if self.z_coefficient else []
        return torch.cat(columns, 1).to(self.dtype)

    def loss(self, sums: Tensor, tokens: int) -> Tensor:
        """Auxiliary losses with their factors, summed over rows; the same on all ranks of cp and tp.

        Args:
            sums: result of `take_sums`, over all layers of the model.
            tokens: tokens per row on this rank.
        """
        tokens *= len(self.routers)
        for axis in (*CONTEXT_AXES, "tp"):
            if ranks_along(self.mesh, axis) > 1:
                sums = collectives.reduce(sums, self.mesh.get_group(axis))
                tokens *= ranks_along(self.mesh, axis)
        means, loss = sums / tokens, sums.new_zeros(())
        if self.coefficient:
            loss = loss + self.coefficient * load_balancing_loss(means[:, : 2 * self.num_experts]).sum()
        if self.z_coefficient:
            z_loss = means[:, -1].sum()
            self.z_sum = z_loss.detach() if self.z_sum is None else self.z_sum + z_loss.detach()
            loss = loss + self.z_coefficient * z_loss
        return loss

    def tokens_per_row(self, seq_len: int) -> int:
        """Tokens per row in the routers of this rank; tp ranks split them with and without sequence parallelism."""
        return seq_len // ranks_along(self.mesh, *CONTEXT_AXES, "tp")

    def clear(self) -> None:
        """Begin a step: forget the loads and the z-loss of forwards that nobody has taken."""
        self.load, self.z_sum = {}, None

    def take_loads(self) -> dict[str, Tensor] | None:
        """Return the copies of tokens for each expert since the last call, over all ranks, and reset them.

        All ranks of a pipeline stage return the same values.

        Returns:
            [num_experts] int64 by the name of the experts of each layer; empty for a stage without experts; None if the model
            has no experts, or no experts whose load can be counted.
        """
        if not self.counts_load:
            return None
        load, self.load = self.load, {}
        return self._over_ranks(load)

    def take_window(self) -> dict[str, Tensor]:
        """The same as `take_loads` since the last call of this method; empty without `records_window`."""
        window, self.window = self.window, {}
        return self._over_ranks(window)

    def _over_ranks(self, loads: dict[str, Tensor]) -> dict[str, Tensor]:
        if not loads:
            return {}
        stacked = torch.stack(list(loads.values()))
        collectives.all_reduce(stacked, self.mesh, tuple(axis for axis in AXES if axis != "pp"))
        return dict(zip(loads, stacked, strict=True))

    @torch.no_grad()
    def correct(self, loads: dict[str, Tensor], rate: float) -> None:
        """Move the correction biases of routers by `rate`, towards even loads.

        Args:
            loads: result of `take_loads` for a global batch.
            rate: amount by which each bias changes; 0.001 for DeepSeek-V3.
        """
        for name, router in self.corrected.items():
            if name in loads:
                load = loads[name].double()
                bias = router.get_buffer(CORRECTION)
                bias += (rate * (load.mean() - load).sign()).to(bias.dtype)


CORRECTION = "e_score_correction_bias"
"""Name in Transformers of the bias on the scores by which a router chooses experts."""


def find_corrected(model: nn.Module, block: Block) -> nn.Module | None:
    """Router of a block with a correction bias in a buffer; None without one."""
    if len(block.experts) != 1:
        return None
    modules = model.get_submodule(block.name).modules()
    found = [module for module in modules if CORRECTION in dict(module.named_buffers(recurse=False))]
    return found[0] if len(found) == 1 else None


def hides_logits(model: PreTrainedModel, anatomy: Anatomy) -> str:
    """Name of a router whose first output is not its logits, but for example their softmax; "" without one.

    A copy of each router runs with random weights: the logits of random tokens have both signs.

    Args:
        model: full model; may be on the meta device.
        anatomy: its roles.
    """
    generator, width = torch.Generator().manual_seed(0), model.config.get_text_config().hidden_size
    for block in anatomy.blocks:
        num_experts = _count_experts(model, block)
        rows, bias = torch.randn(64, width, generator=generator), torch.zeros(num_experts)
        for name in block.router if num_experts else ():
            router = copy.deepcopy(model.get_submodule(name)).to_empty(device="cpu").float()
            for tensor in (*router.parameters(), *router.buffers()):
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator) if tensor.ndim > 1 else torch.ones(()))
            # Some need rows of sequences, some the correction bias.
            calls = (rows,), (rows[None],), (rows, bias), (rows[None], bias)
            if not any(_returns_logits(router, args, (64, num_experts)) for args in calls):
                return name
    return ""


@torch.no_grad()
def _returns_logits(router: nn.Module, args: tuple[Tensor, ...], shape: tuple[int, int]) -> bool:
    try:
        out = router(*args)
    except (TypeError, ValueError, IndexError, RuntimeError):  # of a router with other arguments
        return False
    return isinstance(out, tuple) and out[0].shape == shape and bool((out[0] < 0).any())


def imbalances_of_blocks(anatomy: Anatomy, loads: dict[str, Tensor], device: torch.device) -> Tensor:
    """Load of the busiest expert divided by the mean load, for each block of a model; 0 for a block without loads.

    Args:
        anatomy: anatomy of the full model.
        loads: result of `take_loads`.
        device: their device.

    Returns:
        [blocks] float64 on the device, for which the host does not wait.
    """
    none = torch.zeros((), dtype=torch.float64, device=device)
    found = dict(zip(loads, load_imbalance(torch.stack(list(loads.values()))), strict=True)) if loads else {}
    own = ([found[name] for name in block.experts if name in found] for block in anatomy.blocks)
    return torch.stack([reduce(torch.maximum, values, none) for values in own])


def load_sums(logits: Tensor, top_k: int) -> Tensor:
    """Sums over layers and tokens from which the load-balancing loss is computed.

    Args:
        logits: router logits, [rows, layers, tokens, num_experts] float32 or float64.
        top_k: experts per token.

    Returns:
        [rows, 2 num_experts]: number of tokens that chose each expert, then sum of its probabilities.
    """
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, -1).indices, 1.0)
    return torch.cat([chosen.sum((1, 2)), probabilities.sum((1, 2))], 1)


def squared_logsumexp(logits: Tensor) -> Tensor:
    """Sum over layers and tokens of logsumexp(logits)^2, [rows, 1] (Zoph et al., ST-MoE, 2022). Argument as in `load_sums`."""
    return logits.logsumexp(-1).square().sum((1, 2))[:, None]


def load_balancing_loss(means: Tensor) -> Tensor:
    """Load-balancing loss of Switch Transformer for each row, over the tokens of all layers.

    Args:
        means: [rows, 2 num_experts]: fraction of tokens that chose each expert, and its mean probability.

    Returns:
        [rows]: num_experts x sum over experts of (fraction of choices x mean probability); top_k if the load is even.
    """
    choices, probabilities = means.chunk(2, 1)
    return choices.shape[1] * (choices * probabilities).sum(1)


def _count_experts(model: PreTrainedModel, block: Block) -> int:
    return max((int(getattr(model.get_submodule(name), "num_experts", 0)) for name in block.experts), default=0)


def load_imbalance(loads: Tensor) -> Tensor:
    """Load of the busiest expert divided by the mean load: 1 if balanced or without tokens, num_experts if one gets all.

    Args:
        loads: [..., num_experts] int64, tokens of each expert of a layer.

    Returns:
        [...] float64.
    """
    total = loads.sum(-1).double()
    return torch.where(total > 0, loads.amax(-1).double() * loads.shape[-1] / total, 1.0)
