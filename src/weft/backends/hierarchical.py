"""Hierarchical collectives of CPU ranks: through shared memory inside a host, with little traffic between hosts.

This module creates the process groups of a mesh. Ranks of one host communicate through shared memory. A group with the same
number of ranks on each of several hosts, numbered host after host, uses hierarchical collectives (as in the hierarchical
all-reduce of Jia et al., Highly Scalable Deep Learning, 2018). `inner` is the group of the ranks of this host; `outer` is the
group of the ranks with this local rank on all hosts.

    collective        step 1                     step 2                    step 3
    all-reduce        reduce-scatter inside      all-reduce between        all-gather inside
    reduce-scatter    reduce-scatter inside      reduce-scatter between
    all-gather                                   all-gather between        all-gather inside
    all-to-all        to the local rank inside   to the host
    broadcast                                    from the root's host      from the root's local rank

The ranks of a host share its traffic to other hosts: each rank sends 1 / ranks-per-host of the bytes that a ring of all ranks
sends over the link of the host. Sums inside a host come first, so that results may differ from those of a flat group in the
last bits; all ranks have the same bits.
"""
# mypy: disable-error-code="call-arg,override,assignment,attr-defined,arg-type"
# The stubs of ProcessGroup list every overload; torch.distributed itself calls one form of each method.

import json
import os
import platform
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo

from weft.backends.instrumented import FallbackGroup, Finish, GlooGroup, wait_for_all
from weft.backends.shared_memory import reduce_parts, share_memory
from weft.compat import is_registered

BACKENDS = {"auto": "weft", "two_level": "weft_two_level", "flat": "weft_flat"}
"""Backend name by `plan.comm.hierarchy`. A hierarchical all-to-all sends larger messages but not fewer bytes, so that "auto"
uses the flat one."""
INSIDE, BETWEEN = "@host", "@between"
"""Suffixes of a group's description: the group inside a host, and the group between hosts."""
# New names of torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SMALL = 4096  # elements below which an all-reduce between hosts is faster without a reduce-scatter inside the host
# Elements per pipelined chunk: one is reduced inside a host while the previous one is reduced between hosts.
PIECE = 2**20


def register_backend(hierarchy: str = "auto") -> str:
    """Register a backend with torch, once, and return its name for `init_device_mesh` and `new_group`.

    Args:
        hierarchy: value of `plan.comm.hierarchy`.
    """
    name = BACKENDS[hierarchy]
    if not is_registered(name):
        create = partial(_create_group, hierarchy=hierarchy)
        dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


def _create_group(store: dist.Store, rank: int, size: int, timeout: timedelta, *, hierarchy: str) -> Any:
    """Create the process group that torch requests; all ranks of the group reach the same decision."""
    gloo = partial(_gloo, store, "gloo", rank, size, timeout)

    def share(own: dist.Store, group_rank: int, ranks: int) -> Any:
        # The shared-memory group reports collectives itself: its gloo fallback bypasses torch's operators, so that
        # dispatch modes do not count a collective twice.
        plain = partial(ProcessGroupGloo, dist.PrefixStore("gloo", own), group_rank, ranks, timeout=timeout)
        return share_memory(own, group_rank, ranks, timeout, plain)

    store.set(f"host_id/{rank}", json.dumps(host_id()))
    host_ids = store.multi_get([f"host_id/{peer}" for peer in range(size)])
    hosts = len(set(host_ids))
    if hosts == 1:
        return share(dist.PrefixStore("host", store), rank, size) or gloo()
    per_host = size // hosts
    regular = size == hosts * per_host and all(
        host_ids[peer] == host_ids[peer - peer % per_host] for peer in range(size)
    )
    if hosts == size:
        return gloo(link=BETWEEN)
    if hierarchy == "flat" or not regular:
        return gloo()
    host, local_rank = divmod(rank, per_host)
    inner = share(dist.PrefixStore(f"host-{host}", store), local_rank, per_host)
    store.set(f"shares/{rank}", str(inner is not None))
    if any(value != b"True" for value in store.multi_get([f"shares/{peer}" for peer in range(size)])):
        return gloo()
    outer = _gloo(store, f"between-{local_rank}", host, hosts, timeout, BETWEEN)
    return TwoLevelGroup(inner, outer, gloo, hierarchy == "two_level")


def _gloo(store: dist.Store, prefix: str, rank: int, size: int, timeout: timedelta, link: str = "") -> GlooGroup:
    return GlooGroup(dist.PrefixStore(prefix, store), rank, size, timeout, link)


def host_id() -> list[str]:
    """Identity of this host, equal on all of its ranks. A container or emulated host with its own namespaces is one host."""
    if sys.platform != "linux":
        return [platform.node()]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return [platform.node(), boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))]


def leaves_host(group: dist.ProcessGroup) -> bool:
    """True if collectives of a CPU group go between hosts, and can therefore overlap with computation."""
    return isinstance(group, TwoLevelGroup | GlooGroup)


class TwoLevelGroup(FallbackGroup):
    """Hierarchical group: rank r has local rank r % inner.size() on host r // inner.size().

    The methods are those that torch.distributed calls; see its functions for their meaning. A collective that is issued with
    async_op finishes in `wait`, so that all ranks must wait in the same order. All other operations use a flat gloo group.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        outer: dist.ProcessGroup,
        make_gloo: Callable[[], Any],
        hierarchical_all_to_all: bool,
    ):
        """
        Args:
            inner: group of the ranks of this host.
            outer: group of the ranks with this local rank on all hosts.
            make_gloo: factory of a group of all ranks; called at its first use.
            hierarchical_all_to_all: True for a hierarchical all-to-all, False for a flat one.
        """
        self.inner, self.outer = inner, outer
        self.hierarchical_all_to_all = hierarchical_all_to_all
        self.per_host, self.hosts = inner.size(), outer.size()
        super().__init__(outer.rank() * self.per_host + inner.rank(), self.per_host * self.hosts, make_gloo)
        self._description = ""

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        flat = tensor.contiguous().view(-1)
        works = [self._all_reduce(piece, op) for piece in flat.split(PIECE)]
        return wait_for_all(works, tensors, lambda: _write_back(flat, tensor))

    def _all_reduce(self, flat: Tensor, op: Any) -> dist.Work:
        """All-reduce a contiguous chunk; the steps of several chunks are pipelined."""
        if flat.numel() < SMALL:
            dist.all_reduce(flat, op, self.inner)
            return dist.all_reduce(flat, op, self.outer, async_op=True)
        missing = -flat.numel() % self.per_host
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat
        part = torch.empty_like(padded[: padded.numel() // self.per_host])
        reduce_scatter_single(part, padded, op, self.inner)
        between = dist.all_reduce(part, op, self.outer, async_op=True)

        def finish() -> None:
            all_gather_single(padded, part, self.inner)
            _write_back(padded[: flat.numel()], flat)

        return Finish(between, finish, [flat])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        own = input.new_empty(self.hosts * input.numel())
        between = all_gather_single(own, input.reshape(-1), self.outer, async_op=True)
        blocks = list(zip(output.view(self.hosts, -1), own.view(self.hosts, -1), strict=True))
        own_block, _ = blocks.pop(self.outer.rank())
        all_gather_single(own_block, input.reshape(-1), self.inner)

        def finish() -> None:
            for block, piece in blocks:
                all_gather_single(block, piece, self.inner)

        return Finish(between, finish, [output])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (tensors,), (input,) = outputs, inputs
        if any(tensor.numel() != input.numel() for tensor in tensors):
            return self.gloo.allgather(outputs, inputs)
        gathered = input.new_empty(self.ranks * input.numel())
        work = self.all_gather_single(gathered, input)

        def finish() -> None:
            for tensor, piece in zip(tensors, gathered.view(self.ranks, -1), strict=True):
                tensor.copy_(piece.view_as(tensor))

        return Finish(work, finish, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        own = input.new_empty(self.hosts * output.numel())
        for part, host in zip(own.view(self.hosts, -1), input.reshape(self.hosts, -1), strict=True):
            reduce_scatter_single(part, host, op, self.inner)
        # An all-to-all, since the reduce-scatter of gloo is an all-reduce of the full tensor.
        received = torch.empty_like(own)
        between = dist.all_to_all_single(received, own, group=self.outer, async_op=True)

        def finish() -> None:
            result = output.new_empty(output.numel())
            reduce_parts(list(received.view(self.hosts, -1).unbind()), op, result)
            output.copy_(result.view_as(output))

        return Finish(between, finish, [output])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        if not self.hierarchical_all_to_all:
            return self.gloo.alltoall_base(output, input, output_splits, input_splits)
        width = input[:1].numel() if len(input) else output[:1].numel()
        sizes_in = torch.tensor(input_splits or [len(input) // self.ranks] * self.ranks)
        sizes_in = sizes_in.view(self.hosts, -1) * width
        sizes_out = torch.tensor(output_splits or [len(output) // self.ranks] * self.ranks)
        sizes_out = sizes_out.view(self.hosts, -1) * width
        counts = torch.empty(self.per_host, self.hosts, dtype=torch.int64)  # from each local rank, to each host
        dist.all_to_all_single(counts, sizes_in.T.contiguous(), group=self.inner)
        pieces = input.reshape(-1).split(sizes_in.flatten().tolist())
        by_local_rank = [
            pieces[host * self.per_host + local] for local in range(self.per_host) for host in range(self.hosts)
        ]
        inside = input.new_empty(int(counts.sum()))
        dist.all_to_all_single(
            inside, torch.cat(by_local_rank), counts.sum(1).tolist(), sizes_in.sum(0).tolist(), group=self.inner
        )
        pieces = inside.split(counts.flatten().tolist())
        by_host = [pieces[local * self.hosts + host] for host in range(self.hosts) for local in range(self.per_host)]
        message, result = torch.cat(by_host), output.view(-1)
        between = dist.all_to_all_single(
            result, message, sizes_out.sum(1).tolist(), counts.sum(0).tolist(), self.outer, async_op=True
        )
        return Finish(between, lambda: None, [output])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        host, local_rank = divmod(opts.rootRank, self.per_host)
        flat = tensor.contiguous()
        if local_rank == self.inner.rank():
            self.outer.broadcast(flat, host).wait()
        self.inner.broadcast([flat], _broadcast_options(local_rank)).wait()
        _write_back(flat, tensor)
        return Finish(None, lambda: None, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.gloo.barrier()

    # Names of torch 2.11 and 2.12

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    # Flat group

    @cached_property
    def gloo(self) -> Any:
        group = super().gloo
        group._set_group_name(f"{self._name} flat")
        group._set_group_desc(self._description)
        return group

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        return self.gloo.send(tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self.gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self.gloo.recv_anysource(tensors, tag)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.inner._set_group_name(f"{name} inside host {self.outer.rank()}")
        self.outer._set_group_name(f"{name} between local ranks {self.inner.rank()}")

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        self.inner._set_group_desc(f"{description}{INSIDE}")
        self.outer._set_group_desc(description)
        super()._set_group_desc(description)


def _write_back(result: Tensor, tensor: Tensor) -> None:
    """Copy a result into the caller's tensor if the reshape of that tensor was a copy."""
    if result.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(result.view_as(tensor))


def _broadcast_options(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options
