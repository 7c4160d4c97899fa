"""A transport of experts that gathers all tokens, and a technique, for `plan.techniques` of Weft.

techniques = ["gathered_experts:gather_experts", "gathered_experts:shrink_gradient"]
"""

from collections.abc import Callable

from torch import Tensor

import weft
from weft.comm.collectives import gather, gather_dim, reduce_scatter
from weft.parallel.experts.path import Part


class Gather:
    """Transport that gathers the tokens of all ranks, computes the own experts, and sums by a reduce-scatter.

    It sends (n - 1) T H elements instead of T K H (n - 1) / n: less where a token has more experts than there are ranks. Its
    messages have one size, so that the host need not know how many rows each rank gets. Every rank has equally many tokens.
    """

    def __init__(self, num_experts: int, group):
        self.num_experts, self.group = num_experts, group

    def __call__(
        self, hidden: Tensor, index: Tensor, weights: Tensor, meanwhile: Callable[[], object]
    ) -> tuple[list[Part], Callable[[list[Tensor]], Tensor]]:
        own = self.num_experts // self.group.size()
        tokens, chosen = gather(hidden, self.group, 0), gather_dim(index, self.group, 0)
        meanwhile()
        local = chosen - own * self.group.rank()
        token, choice = ((local >= 0) & (local < own)).nonzero(as_tuple=True)

        def bring_back(outputs: list[Tensor]) -> Tensor:
            copies = outputs[0].new_zeros(*chosen.shape, hidden.shape[1]).index_put((token, choice), outputs[0])
            return (reduce_scatter(copies, self.group, 0) * weights[..., None]).sum(1)

        return [Part(tokens[token], local[token, choice][:, None])], bring_back


def gather_experts(model, anatomy, plan, mesh):
    """Use the transport in each layer that has experts on several ranks."""
    for path in weft.runtime(model).experts.values():
        path.exchange = Gather(path.exchange.num_experts, path.exchange.channel.group)


def shrink_gradient(model, anatomy, plan, mesh):
    """A tenth of the gradient for the embeddings, as in GLM-130B (Zeng et al., 2022)."""
    if anatomy.embedding:  # else another pipeline stage has it
        embedding = model.get_submodule(anatomy.embedding)
        embedding.register_forward_hook(lambda module, inputs, output: 0.1 * output + 0.9 * output.detach())
