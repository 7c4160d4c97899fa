"""Calibration of one block after the other: the memory of a block, its inputs and what is outside of blocks.

The model is run once with placeholders for its blocks, which record what each block is called with besides hidden states:
masks, position embeddings, and which outputs of the block before it. Then each block is loaded, run on what the changed blocks
before it have computed, changed by a function, run again for the next block, and freed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from weft.anatomy.roles import Anatomy
from weft.compress.ranks import Matrix, Ranks
from weft.errors import DataError, ModelError

Call = tuple[tuple[Any, ...], dict[str, Any]]
Outputs = tuple[Any, ...]
"""Hidden states after a block, and what else it returns."""
Hessians = dict[Matrix, Tensor]
"""Sum of x xT over the inputs x of each matrix of a block, by the name of its weight in the block and its index in that weight:
the number of the expert, in a weight of all experts; else 0."""


@dataclass(frozen=True)
class _Output:
    """Stands for an output of a block other than its hidden states."""

    index: int

    def among(self, outputs: Outputs) -> Any:
        """The output itself."""
        return outputs[self.index]


class _Placeholder(nn.Module):
    """Records the arguments of a block, and returns its hidden states unchanged, with as many outputs as a block has.

    Args:
        block: the block.
        calls: list for the arguments.
        outputs_of: size of the tuple that a block returns for its arguments; 0 if it returns no tuple.
    """

    def __init__(self, block: nn.Module, calls: list[Call], outputs_of: Callable[..., int]):
        super().__init__()
        self.calls, self.outputs_of = calls, outputs_of
        self.__dict__["block"] = block  # not a child: its weights are not loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)  # models read the attention type from their blocks

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        count = self.outputs_of(*args, **kwargs)
        return (hidden, *(_Output(index) for index in range(1, count))) if count else hidden


def calibrate_blocks(
    model: Any,
    anatomy: Anatomy,
    load: Callable[[str, nn.Module], None],
    batches: Sequence[Tensor],
    change: Callable[[str, nn.Module, Hessians], None] | None = None,
    watch: Callable[[list[Tensor], list[Tensor]], None] = lambda inputs, outputs: None,
    ranks: Ranks = Ranks(),  # noqa: B008 - it is frozen
) -> None:
    """Run all blocks in order, and change each of them. Collective.

    Args:
        model: causal language model, without memory for the weights of its blocks.
        load: loads the weights of a module outside of blocks, or of a block, given its name; "" is the model without blocks.
        batches: token ids [rows, tokens] of this rank's calibration rows; all rows of a batch are of one length.
        change: changes the weights of a block, given its name, itself and the Hessians of its matrices; None: no change.
        watch: called with the hidden states before and after the changed block, one for each batch.
        ranks: ranks that add up the Hessians of their rows.

    Raises:
        ModelError: blocks do not return hidden states first, text does not run through them, or numbers are too large for
            their dtype.
    """
    names = [block.name for block in anatomy.blocks]
    stack = model.get_submodule(names[0].rpartition(".")[0])
    blocks, calls = list(stack), [[] for _ in names]  # type: list[nn.Module], list[list[Call]]
    sizes: list[int] = []

    def outputs_of(*args: Any, **kwargs: Any) -> int:  # all blocks return as many as the first
        if not sizes:
            load(names[0], blocks[0])
            output = blocks[0](*args, **kwargs)
            sizes.append(len(output) if isinstance(output, tuple) else 0)
        return sizes[0]

    for index, block in enumerate(blocks):
        stack[index] = _Placeholder(block, calls[index], outputs_of)
    load("", model)
    try:
        with torch.no_grad():
            for batch in batches:
                model(input_ids=batch, use_cache=False, logits_to_keep=1)
    finally:
        for index, block in enumerate(blocks):
            stack[index] = block
    if not calls[0]:
        raise ModelError(
            f"text does not run through {names[0]}",
            where="calibration",
            rule="blocks of a language model are compressed",
            fix="compress a model of text alone",
        )
    outputs: list[Outputs] = [(args[0] if args else kwargs["hidden_states"],) for args, kwargs in calls[0]]
    for name, block, of_block in zip(names, blocks, calls, strict=True):
        load(name, block)
        if change is not None:
            hessians: Hessians = {}
            with _Inputs(block, hessians):
                _run(block, of_block, outputs)
            ranks.sum_hessians(hessians)
            _check_finite(name, block, hessians.values(), Ranks())
            change(name, block, hessians)
        before, outputs = outputs, _run(block, of_block, outputs)
        _check_finite(name, block, [states for states, *_ in outputs], ranks)
        watch([states for states, *_ in before], [states for states, *_ in outputs])
        block.to("meta")


def _check_finite(name: str, block: nn.Module, tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Refuse a block whose numbers are too large for their dtype. Collective.

    Raises:
        ModelError: names the block and the dtype; the same on every rank.
    """
    problems = ranks.sum(torch.tensor(sum(not bool(tensor.isfinite().all()) for tensor in tensors)))
    if problems:
        dtype = str(next(block.parameters()).dtype).removeprefix("torch.")
        raise ModelError(
            f"{name} computes numbers that are not finite in {dtype}",
            where="calibration",
            rule="the model runs on the calibration rows in its own dtype",
            fix='set dtype = "fp32" in a recipe file',
        )


def check_tokens(tokens: int, widths: Iterable[int]) -> None:
    """Check that there are enough calibration tokens for the Hessians of matrices with these numbers of input channels.

    Raises:
        DataError: a matrix has more input channels than there are tokens.
    """
    needed = max(widths)
    if tokens < needed:
        raise DataError(
            f"{tokens} calibration tokens",
            where="calibration",
            rule=f"the largest layer has {needed} input channels, and needs as many tokens",
            fix="name a longer text with --calibrate, or set more rows in a recipe file",
        )


def _run(block: nn.Module, calls: Sequence[Call], before: Sequence[Outputs]) -> list[Outputs]:
    """Outputs of a block for all batches, given those of the block before it."""
    found: list[Outputs] = []
    for (args, kwargs), given in zip(calls, before, strict=True):
        states = given[0]
        own = ((states, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": states})
        values, named = tree_map_only(_Output, partial(_Output.among, outputs=given), own)
        with torch.no_grad():
            output = block(*values, **named)
        output = output if isinstance(output, tuple) else (output,)
        if not isinstance(output[0], Tensor) or output[0].shape != states.shape:
            raise ModelError(
                f"a {type(block).__name__} does not return hidden states",
                where="calibration",
                rule="hidden states are the first that a block returns",
                fix='set method = "nearest" in a recipe file: it needs no calibration',
            )
        found.append(output)
    return found


class _Inputs(TorchFunctionMode):
    """Context in which the inputs of the matrices of a block are added to their Hessians.

    It sees each multiplication by a matrix: of nn.Linear, and of one expert in a weight of all experts.
    """

    def __init__(self, block: nn.Module, hessians: Hessians):
        super().__init__()
        self.hessians = hessians
        self.last: tuple[Tensor, Tensor] | None = None
        """Latest input and its x xT: layers such as query, key and value have the same input."""
        self.matrices: dict[int, Matrix] = {}
        for name, weight in block.named_parameters():
            if weight.ndim == 2:
                self.matrices[weight.data_ptr()] = name, 0
            if weight.ndim == 3:
                self.matrices |= {weight[index].data_ptr(): (name, index) for index in range(len(weight))}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            inputs, weight, *_ = (*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs))
            if (matrix := self.matrices.get(weight.data_ptr())) is not None:
                self._add(matrix, inputs)
        return func(*args, **kwargs)

    def _add(self, matrix: Matrix, inputs: Tensor) -> None:
        if self.last is None or self.last[0] is not inputs:
            rows = inputs.reshape(-1, inputs.shape[-1]).float()
            self.last = inputs, rows.T @ rows
        held = self.hessians.get(matrix)
        self.hessians[matrix] = self.last[1].clone() if held is None else held.add_(self.last[1])
