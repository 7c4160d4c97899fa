"""Speed of each device beside its peers, and links between ranks: judgements of what the ranks measured.

Thresholds depend on the device: equal accelerators differ by a few percent, ranks on CPU share cores with other processes.
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from weft.observe.doctor.finding import Facts, Finding, group, label, summarize
from weft.topology.measurement import NETWORK, Measurement, find_slow
from weft.topology.topology import format_rate

RATES = {"matmul": "matmul", "copy": "memory copy", "upload": "copy from host to device"}
RATIOS = {"cpu": (0.5, 0.75), "accelerator": (0.85, 0.95)}  # red and yellow: share of the usual rate
FLEET = 4  # number of ranks from which the spread of the ranks is known
DEVIATIONS = 5.0
"""Deviation of a slow rank from the median, in median absolute deviations, scaled to standard deviations."""
TO_DEVIATION = 1.4826
NOMINAL_SHARE = 0.1  # of an interface's nominal speed: one TCP connection may not use more of a fast one


def judge_speed(hosts: Sequence[Facts]) -> list[Finding]:
    """Red and yellow: a device is slower than its peers, for matmuls or copies.

    A host is slow if even its best rank is slow among the best ranks of all hosts; ranks of the other hosts are compared with
    each other (`find_low`).

    Facts: "ranks" of host 0, a list in rank order with the index of the host, the local rank, and rates by name; "device".
    """
    ranks = (group(hosts[0], "ranks") or []) if hosts else []
    findings: list[Finding] = []
    for name in RATES:
        rates = [rank["rates"].get(name) for rank in ranks]
        if len(rates) > 1 and all(rates):
            findings += _judge_rates(hosts, ranks, name, rates)
    return summarize("speed", findings, ranks[1:], f"{len(ranks)} ranks compute and copy equally fast")


def _judge_rates(
    hosts: Sequence[Facts], ranks: Sequence[dict[str, Any]], name: str, rates: list[float]
) -> list[Finding]:
    """Hosts whose best rank is slow, then slow ranks of the other hosts."""
    red, yellow = RATIOS["cpu" if hosts[0]["device"]["type"] == "cpu" else "accelerator"]
    labels = {facts["host"]["index"]: label(facts) for facts in hosts}
    members = {index: [n for n, rank in enumerate(ranks) if rank["host"] == index] for index in labels}
    slow_hosts = find_low({index: max(rates[n] for n in own) for index, own in members.items() if own}, yellow)
    slow_ranks = find_low({n: rate for n, rate in enumerate(rates) if ranks[n]["host"] not in slow_hosts}, yellow)
    shares = {f"rank {n} on {labels[ranks[n]['host']]}": share for n, share in slow_ranks.items()}
    for index, share in slow_hosts.items():
        who = f"rank {members[index][0]} on" if len(members[index]) == 1 else "all ranks of"
        shares[f"{who} {labels[index]}"] = share
    fix = "look for other processes, heat and power limits on this host, or leave it out"
    findings = []
    for who, share in shares.items():
        text = f"{who}: {RATES[name]} has {share:.0%} of the usual rate"
        findings.append(Finding("red" if share < red else "yellow", "slow device", text, fix))
    return findings


def find_low(rates: Mapping[int, float], ratio: float) -> dict[int, float]:
    """Share of the usual rate of each rate that is low.

    Of four rates or more, the median is usual, and a low rate is also five deviations away from it, by the median absolute
    deviation. Of fewer, the best is usual.

    Args:
        rates: rates by host or rank.
        ratio: share of the usual rate below which a rate is low.
    """
    values = list(rates.values())
    usual = floor = max(values, default=0.0)
    if len(values) >= FLEET:
        usual = median(values)
        floor = usual - DEVIATIONS * TO_DEVIATION * median(abs(rate - usual) for rate in values)
    return {index: rate / usual for index, rate in rates.items() if rate < ratio * usual and rate <= floor}


def judge_links(hosts: Sequence[Facts]) -> list[Finding]:
    """Red: a host, rank or pair has less than half of the usual bandwidth (`find_slow`), or ranks could not run together.

    Yellow: the links between hosts have less than 10 % of the speed that their interface states.

    Facts: "links" of host 0, a `Measurement`; "failure" of host 0, the reason why the ranks failed; "devices" with the network
    interface.
    """
    if not hosts:
        return []
    failure = hosts[0].get("failure")
    if failure:
        text = f"ranks of all hosts could not run together: {failure}"
        return [Finding("red", "ranks", text, "see the output of all hosts; open all TCP ports between the hosts")]
    links = group(hosts[0], "links")
    if links is None:
        return []
    measured = Measurement.model_validate(links)
    fix = "check cables, ports and the load of the hosts; `weft topology` prints all links"
    findings = [Finding("red", "slow link", text, fix) for text in find_slow(measured)]
    rates, kinds = measured.rates(), measured.kinds
    network = [
        float(rates[a, b])
        for a, row in enumerate(kinds)
        for b, kind in enumerate(row)
        if kind == NETWORK and rates[a, b] > 0
    ]
    nominal = [
        facts["devices"]["network"]["bits_per_second"] / 8
        for facts in hosts
        if (group(facts, "devices") or {}).get("network") and facts["devices"]["network"]["bits_per_second"]
    ]
    if network and nominal and max(network) < NOMINAL_SHARE * min(nominal):
        text = f"links between hosts have {format_rate(max(network))}, and their interfaces state {format_rate(min(nominal))}"
        findings.append(Finding("yellow", "slow network", text, "check that --interface names the fast network"))
    usual = f"{format_rate(median(network))} between hosts" if network else "inside one host"
    return summarize("links", findings, [1] if measured.world_size > 1 else [], f"no link is slow; {usual}")
