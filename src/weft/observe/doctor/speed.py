"""Speed of each device beside its peers, and links between ranks: judgements of what the ranks measured.

Thresholds depend on the device: equal accelerators differ by a few percent, ranks on CPU share cores with other processes.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from weft.observe.doctor.finding import Facts, Finding, Level, group, label, summarize
from weft.topology.measurement import NETWORK, Measurement, find_slow
from weft.topology.topology import format_rate

RATES = {"matmul": "matmul", "copy": "memory copy", "upload": "copy from host to device"}
RATIOS = {"cpu": (0.5, 0.75), "accelerator": (0.85, 0.95)}  # red and yellow: share of the usual rate
FLEET = 4  # number of ranks from which the spread of the ranks is known
DEVIATIONS = (
    5.0  # median absolute deviations, as standard deviations of a normal distribution, that a slow rank must have
)
TO_DEVIATION = 1.4826
NOMINAL_SHARE = 0.1  # of an interface's nominal speed: one TCP connection may not use more of a fast one


def judge_speed(hosts: Sequence[Facts]) -> list[Finding]:
    """Red and yellow: a device is slower than its peers, for matmuls or copies.

    With four ranks or more, a rank is slow if its rate is below a share of the median and five deviations away from it (median
    absolute deviation); with fewer, if its rate is below a share of the best. If all ranks of a host are slow, the host is
    named.

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
    kind = "cpu" if hosts[0]["device"]["type"] == "cpu" else "accelerator"
    red, yellow = RATIOS[kind]
    usual, floor = max(rates), max(rates)
    if len(rates) >= FLEET:
        usual = median(rates)
        floor = usual - DEVIATIONS * TO_DEVIATION * median(abs(rate - usual) for rate in rates)
    slow = {index for index, rate in enumerate(rates) if rate < yellow * usual and rate <= floor}
    findings = []
    for facts in hosts:
        own = [index for index, rank in enumerate(ranks) if rank["host"] == facts["host"]["index"]]
        if not slow.intersection(own):
            continue
        groups = [own] if len(own) > 1 and slow.issuperset(own) else [[index] for index in own if index in slow]
        for indices in groups:
            share = max(rates[index] for index in indices) / usual
            level: Level = "red" if share < red else "yellow"
            who = f"all ranks of {label(facts)}" if len(indices) > 1 else f"rank {indices[0]} on {label(facts)}"
            of = "median of all ranks" if len(rates) >= FLEET else "best rank"
            text = f"{who}: {RATES[name]} has {share:.0%} of the rate of the {of}"
            fix = "look for other processes, heat and power limits on this host, or leave it out"
            findings.append(Finding(level, "slow device", text, fix))
    return findings


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
