"""Hierarchical dispatch to experts over the groups of an accelerator's backend, for which gloo groups stand in here."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.lab.plans import resolved
from tests.lab.pool import RankError, run_ranks
from tests.parallel.test_expert import NUM_EXPERTS, Case, build_model, experts_of, gradients, split_module
from weft.comm.recorder import Recorder
from weft.parallel.experts import groups as dispatch
from weft.parallel.experts.groups import dispatch_groups, ranks_per_host
from weft.plan import Comm, Parallel, Plan
from weft.topology.mesh import build_expert_mesh, build_mesh

HOSTS = ("a", "a", "b", "b")


def groups_of_rank(rank: int, ranks: int, hosts: tuple[str, ...], hierarchy: str, parallel: dict[str, Any]) -> Any:
    """Group of ep and the groups of dispatch, on a mesh of an accelerator."""
    plan = resolved(Plan(parallel=Parallel(**parallel)), ranks)
    expert_mesh = build_expert_mesh(plan, build_mesh(plan, "cuda", ranks))
    with mock.patch.object(dispatch, "host_id", return_value=[hosts[rank]]):
        groups = dispatch_groups(expert_mesh, Comm.model_validate({"hierarchy": hierarchy}))
    return expert_mesh.get_group("ep"), groups


def sizes(rank: int, ranks: int, *args: Any) -> list[tuple[int, int]]:
    """Size of each group of dispatch, and the sum of its ranks."""
    _, groups = groups_of_rank(rank, ranks, *args)
    found = []
    for group in groups:
        total = torch.tensor([rank])
        group.allreduce([total]).wait()
        found.append((group.size(), int(total)))
    return found


@pytest.mark.parametrize(
    ("hosts", "hierarchy", "parallel", "expected"),
    [
        (HOSTS, "auto", {"ep": 4}, [[(2, 2), (2, 1)], [(2, 4), (2, 1)], [(2, 2), (2, 5)], [(2, 4), (2, 5)]]),
        (
            HOSTS,
            "two_level",
            {"tp": 4, "ep": 4},
            [[(2, 2), (2, 1)], [(2, 4), (2, 1)], [(2, 2), (2, 5)], [(2, 4), (2, 5)]],
        ),
        (HOSTS, "flat", {"ep": 4}, [[(4, 6)]] * 4),
        (("a",) * 4, "auto", {"ep": 4}, [[(4, 6)]] * 4),
        (("a", "a", "a", "b"), "auto", {"ep": 4}, [[(4, 6)]] * 4),
        (("a", "b", "a", "b"), "auto", {"ep": 4}, [[(4, 6)]] * 4),
        (HOSTS, "auto", {"ep": 2}, [[(2, 1)], [(2, 1)], [(2, 5)], [(2, 5)]]),  # each group is on one host
    ],
    ids=str,
)
def test_dispatch_is_hierarchical_where_a_group_spans_hosts(
    hosts: tuple[str, ...], hierarchy: str, parallel: dict[str, Any], expected: list[list[tuple[int, int]]]
) -> None:
    assert run_ranks(4, sizes, hosts, hierarchy, parallel) == expected


@pytest.mark.must("refusal: messages of experts in two levels")
def test_two_levels_without_equal_hosts_are_refused() -> None:
    with pytest.raises(RankError, match="the ranks of ep are not distributed equally over their hosts"):
        run_ranks(4, sizes, ("a", "a", "a", "b"), "two_level", {"ep": 4})


def test_ranks_per_host() -> None:
    assert ranks_per_host(HOSTS, [[0, 1, 2, 3]]) == 2
    assert ranks_per_host(HOSTS, [[0, 2], [1, 3]]) == 1
    assert ranks_per_host(HOSTS, [[0, 1], [2, 3]]) == 2
    assert ranks_per_host(("a", "b", "b", "b"), [[0, 1], [2, 3]]) is None  # one group spans hosts, the other does not


def on_rank(rank: int, ranks: int, name: str, case: Case, hierarchy: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Outputs and gradients of the experts of this rank, and rows that it sends between hosts and inside its host."""
    group, groups = groups_of_rank(rank, ranks, HOSTS, hierarchy, {"ep": 4})
    experts = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    split_module(experts, group, groups=groups)
    with Recorder() as recorder:
        found = gradients(experts, case.tokens()[rank])
    return found, recorder.bytes_by("link")


@pytest.mark.must("parity: messages of experts in two levels", case="qwen3_moe")
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_parity_on_two_hosts(name: str) -> None:
    """Outputs and all gradients equal those of the untouched module on all tokens, flat and hierarchical."""
    case = Case((5, 9, 0, 3), top_k=3)
    untouched = experts_of(build_model(name, case.dtype, case.implementation))[-1]
    hidden, index, weights, gradient = (torch.cat(parts).detach() for parts in zip(*case.tokens(), strict=True))
    expected = gradients(untouched, (hidden.requires_grad_(), index, weights.requires_grad_(), gradient))
    for hierarchy in ("auto", "flat"):
        results = run_ranks(4, on_rank, name, case, hierarchy)
        for key, value in expected.items():
            found: Tensor = torch.cat([result[key] for result, _ in results])
            torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)
        links = {link for _, sent in results for link in sent}
        assert links == ({"between", "host"} if hierarchy == "auto" else {""})


def test_fewer_bytes_go_between_hosts() -> None:
    """All experts are chosen for each token: two copies for the other host are one row there."""
    case = Case((8, 8, 8, 8), top_k=NUM_EXPERTS)
    (_, hierarchical), *_ = run_ranks(4, on_rank, "qwen3_moe", case, "auto")
    (_, flat), *_ = run_ranks(4, on_rank, "qwen3_moe", case, "flat")
    element, hidden, passes = 8, 32, 2 * 4  # two passes of dispatch, combine and their backwards
    rows = 8 * hidden * element * passes
    assert (
        3 * rows <= flat[""] < 4 * rows
    )  # a row for each copy: two to the other host, one to the other rank; and counts
    assert 0 < hierarchical["between"] - rows < rows // 2  # one row for both; and indices and weights
