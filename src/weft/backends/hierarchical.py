"""Collectives of CPU ranks on one or several hosts: inside a host through memory, and between hosts as little as can be.

The groups of a mesh come from here. Ranks of one host get shared memory. Where a group has as many ranks on each of several
hosts, host after host, its collectives go in two levels (as in the hierarchical all-reduce of Jia et al., Highly Scalable Deep
Learning, 2018): `inner` are the ranks of a host, `outer` those of the same place on each host.

    all-reduce        reduce-scatter inside      all-reduce between        all-gather inside
    reduce-scatter    reduce-scatter inside      reduce-scatter between
    all-gather                                   all-gather between        all-gather inside
    all-to-all        to the right place inside  to the right host
    broadcast                                    from the root's host      from the root's place

The ranks of a host then share what passes its link: each sends 1 / ranks-per-host of what one ring of all ranks would carry
over it. Sums are made inside first, so that they may differ from a flat group's in their last bits; all ranks have the same.
"""
# mypy: disable-error-code="call-arg,override,assignment,attr-defined,arg-type"
# The stubs of ProcessGroup list what may be called from Python; torch.distributed itself calls one form of each.

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

from weft.backends.instrumented import GlooGroup, InstrumentedGroup
from weft.backends.shared_memory import reduce_parts, share_memory

BACKENDS = {"auto": "weft", "two_level": "weft_two_level", "flat": "weft_flat"}
"""Name of the backend by `plan.comm.hierarchy`. In two levels an all-to-all sends larger messages, not fewer bytes: auto lets
it go flat."""
INSIDE, BETWEEN = "@host", "@between"
"""Behind the description of a group: its part inside a host, and that between hosts."""
# torch 2.13 gave these two their new names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
SMALL = 4096  # numbers that are sooner added up in full by each place than in parts
PIECE = 2**20  # numbers that are reduced inside a host while those before them travel between hosts


def register_backend(hierarchy: str = "auto") -> str:
    """Make a backend known to torch, once; its name for `init_device_mesh` and `new_group`.

    Args:
        hierarchy: as in `plan.comm.hierarchy`.
    """
    name = BACKENDS[hierarchy]
    if name.upper() not in dist.Backend._plugins:
        create = partial(_create_group, hierarchy=hierarchy)
        dist.Backend.register_backend(name, create, devices=["cpu"])
    return name


def _create_group(store: dist.Store, rank: int, size: int, timeout: timedelta, *, hierarchy: str) -> Any:
    """The group of some ranks, as torch asks for it; all of them come to the same decision."""
    gloo = partial(_gloo, store, "gloo", rank, size, timeout)

    def share(own: dist.Store, place: int, ranks: int) -> Any:
        # What shared memory passes on has been noted: it goes past torch's operators, and whoever watches them.
        plain = partial(ProcessGroupGloo, dist.PrefixStore("gloo", own), place, ranks, timeout=timeout)
        return share_memory(own, place, ranks, timeout, plain)

    store.set(f"place/{rank}", json.dumps(host_id()))
    places = [store.get(f"place/{peer}") for peer in range(size)]
    hosts = len(set(places))
    if hosts == 1:
        return share(dist.PrefixStore("host", store), rank, size) or gloo()
    per_host = size // hosts
    regular = size == hosts * per_host and all(places[peer] == places[peer - peer % per_host] for peer in range(size))
    if hosts == size:
        return gloo(link=BETWEEN)
    if hierarchy == "flat" or not regular:
        return gloo()
    host, place = divmod(rank, per_host)
    inner = share(dist.PrefixStore(f"host-{host}", store), place, per_host)
    store.set(f"shares/{rank}", str(inner is not None))
    if any(store.get(f"shares/{peer}") != b"True" for peer in range(size)):
        return gloo()
    outer = _gloo(store, f"between-{place}", host, hosts, timeout, BETWEEN)
    return TwoLevelGroup(inner, outer, gloo, hierarchy == "two_level")


def _gloo(store: dist.Store, prefix: str, rank: int, size: int, timeout: timedelta, link: str = "") -> GlooGroup:
    return GlooGroup(dist.PrefixStore(prefix, store), rank, size, timeout, link)


def host_id() -> list[str]:
    """What ranks of one host have in common. A network of its own makes an emulated host, or a container."""
    if sys.platform != "linux":
        return [platform.node()]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return [platform.node(), boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))]


def leaves_host(group: dist.ProcessGroup) -> bool:
    """Whether collectives of a group of CPU ranks go between hosts, and so can be under way while ranks compute."""
    return isinstance(group, TwoLevelGroup | GlooGroup)


class TwoLevelGroup(InstrumentedGroup):
    """Ranks on several hosts, as many on each: rank r has place r % inner.size() on host r // inner.size().

    The methods are those that torch.distributed calls; see its functions for their meaning. What is issued with async_op ends
    in `wait`: all ranks wait in one order. Operations that are not written here go flat, through gloo.
    """

    def __init__(
        self,
        inner: dist.ProcessGroup,
        outer: dist.ProcessGroup,
        make_flat: Callable[[], Any],
        exchanges_in_levels: bool,
    ):
        """
        Args:
            inner: ranks of this host.
            outer: ranks of this place on all hosts.
            make_flat: makes a group of all ranks, when it is first wanted.
            exchanges_in_levels: all-to-all too; else it goes flat.
        """
        self.inner, self.outer, self.make_flat = inner, outer, make_flat
        self.exchanges_in_levels = exchanges_in_levels
        self.per_host, self.hosts = inner.size(), outer.size()
        super().__init__(outer.rank() * self.per_host + inner.rank(), self.per_host * self.hosts)
        self._description = ""

    # Collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        flat = tensor.contiguous().view(-1)
        works = [self._all_reduce(piece, op) for piece in flat.split(PIECE)]
        return _all(works, tensors, lambda: _write_back(flat, tensor))

    def _all_reduce(self, flat: Tensor, op: Any) -> dist.Work:
        """Of a contiguous piece: what one does inside a host, another does between hosts."""
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

        return _Finish(between, finish, [flat])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        own = input.new_empty(self.hosts * input.numel())
        between = all_gather_single(own, input.reshape(-1), self.outer, async_op=True)
        places = list(zip(output.view(self.hosts, -1), own.view(self.hosts, -1), strict=True))
        here, _ = places.pop(self.outer.rank())
        all_gather_single(here, input.reshape(-1), self.inner)

        def finish() -> None:
            for host, piece in places:
                all_gather_single(host, piece, self.inner)

        return _Finish(between, finish, [output])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (tensors,), (input,) = outputs, inputs
        if any(tensor.numel() != input.numel() for tensor in tensors):
            return self.flat.allgather(outputs, inputs)
        gathered = input.new_empty(self.ranks * input.numel())
        work = self.all_gather_single(gathered, input)

        def finish() -> None:
            for tensor, piece in zip(tensors, gathered.view(self.ranks, -1), strict=True):
                tensor.copy_(piece.view_as(tensor))

        return _Finish(work, finish, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        own = input.new_empty(self.hosts * output.numel())
        for part, host in zip(own.view(self.hosts, -1), input.reshape(self.hosts, -1), strict=True):
            reduce_scatter_single(part, host, op, self.inner)
        # Gloo would all-reduce everything and throw the rest away.
        theirs = torch.empty_like(own)
        between = dist.all_to_all_single(theirs, own, group=self.outer, async_op=True)

        def finish() -> None:
            result = output.new_empty(output.numel())
            reduce_parts(list(theirs.view(self.hosts, -1).unbind()), op, result)
            output.copy_(result.view_as(output))

        return _Finish(between, finish, [output])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        (output,), (tensors,) = outputs, inputs
        if any(tensor.numel() != output.numel() for tensor in tensors):
            return self.flat.reduce_scatter(outputs, inputs, opts)
        return self.reduce_scatter_single(output, torch.cat([tensor.reshape(-1) for tensor in tensors]), opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        if not self.exchanges_in_levels:
            return self.flat.alltoall_base(output, input, output_splits, input_splits)
        width = input[:1].numel() if len(input) else output[:1].numel()
        sends = torch.tensor(input_splits or [len(input) // self.ranks] * self.ranks).view(self.hosts, -1) * width
        takes = torch.tensor(output_splits or [len(output) // self.ranks] * self.ranks).view(self.hosts, -1) * width
        counts = torch.empty(self.per_host, self.hosts, dtype=torch.int64)  # from each place here, to each host
        dist.all_to_all_single(counts, sends.T.contiguous(), group=self.inner)
        pieces = input.reshape(-1).split(sends.flatten().tolist())
        by_place = [
            pieces[host * self.per_host + place] for place in range(self.per_host) for host in range(self.hosts)
        ]
        here = input.new_empty(int(counts.sum()))
        dist.all_to_all_single(
            here, torch.cat(by_place), counts.sum(1).tolist(), sends.sum(0).tolist(), group=self.inner
        )
        pieces = here.split(counts.flatten().tolist())
        by_host = [pieces[place * self.hosts + host] for host in range(self.hosts) for place in range(self.per_host)]
        message, result = torch.cat(by_host), output.view(-1)
        between = dist.all_to_all_single(
            result, message, takes.sum(1).tolist(), counts.sum(0).tolist(), self.outer, async_op=True
        )
        return _Finish(between, lambda: None, [output])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        host, place = divmod(opts.rootRank, self.per_host)
        flat = tensor.contiguous()
        if place == self.inner.rank():
            self.outer.broadcast(flat, host).wait()
        self.inner.broadcast([flat], _broadcast_options(place)).wait()
        _write_back(flat, tensor)
        return _Finish(None, lambda: None, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.flat.barrier()

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _all([self.allreduce([tensor], opts) for tensor in tensors], tensors)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _all([self.all_gather_single(output, input) for output, input in pairs], outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, inputs, strict=True)
        return _all([self.reduce_scatter_single(output, input, opts) for output, input in pairs], outputs)

    # As torch 2.11 and 2.12 name them

    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # One level, whose threads and connections are made when it is first wanted, by all ranks

    @cached_property
    def flat(self) -> Any:
        group = self.make_flat()
        group._set_group_name(f"{self._name} flat")
        group._set_group_desc(self._description)
        return group

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> dist.Work:
        return self.flat.send(tensors, destination, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> dist.Work:
        return self.flat.recv(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        return self.flat.recv_anysource(tensors, tag)

    def reduce(self, *args: Any) -> dist.Work:
        return self.flat.reduce(*args)

    def gather(self, *args: Any) -> dist.Work:
        return self.flat.gather(*args)

    def scatter(self, *args: Any) -> dist.Work:
        return self.flat.scatter(*args)

    def alltoall(self, *args: Any) -> dist.Work:
        return self.flat.alltoall(*args)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.inner._set_group_name(f"{name} inside host {self.outer.rank()}")
        self.outer._set_group_name(f"{name} between places {self.inner.rank()}")

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        self.inner._set_group_desc(f"{description}{INSIDE}")
        self.outer._set_group_desc(description)
        super()._set_group_desc(description)


class _Finish(dist.Work):
    """A collective whose last part is done by who waits for it."""

    def __init__(self, work: dist.Work | None, finish: Callable[[], None], result: Any):
        super().__init__()
        self.work, self.finish, self.outputs, self.is_done = work, finish, result, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self.is_done:
            self.is_done = True
            if self.work is not None:
                self.work.wait()
            self.finish()
        return True

    def is_completed(self) -> bool:
        return self.is_done

    def result(self) -> Any:
        return self.outputs

    def get_future(self) -> Any:
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.outputs)
        return future


def _all(works: list[dist.Work], result: Any, afterwards: Callable[[], None] = lambda: None) -> dist.Work:
    def finish() -> None:
        for work in works:
            work.wait()
        afterwards()

    return _Finish(None, finish, result)


def _write_back(found: Tensor, tensor: Tensor) -> None:
    """Into the caller's tensor, where a reshape had to copy it."""
    if found.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(found.view_as(tensor))


def _broadcast_options(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    return options
