"""Launch ranks to measure the links between them; each rank runs `python -m weft.comm.measure_links FOLDER ...`.

measured, source = measure_links(ranks=2)
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from weft.comm.link_benchmark import SECONDS, measure
from weft.device.detect import detect
from weft.launch.coordinator import JobCoordinator
from weft.launch.follow import joined
from weft.launch.launcher import launch
from weft.launch.rank_entry import connect, rank_main
from weft.launch.rendezvous import RendezvousConfig
from weft.topology.measurement import Measurement

RESULT, SOURCE = "measurement.json", "source"


def measure_links(
    ranks: int, *, rendezvous: RendezvousConfig | None = None, seconds: float = SECONDS, cache: Path | None = None
) -> tuple[Measurement, str]:
    """Measure the links between ranks on this host, or on several hosts. Every host calls it and gets the same result.

    Args:
        ranks: number of ranks on this host.
        rendezvous: rendezvous of the hosts; None for one host.
        seconds: time budget of the measurement; the value of host 0 counts.
        cache: folder on host 0 for cached measurements; the value of host 0 counts.

    Returns:
        The measurement, and a text with its source.

    Raises:
        WeftError: one of its subclasses: the rendezvous failed, or a rank failed.
    """
    facts = {"seconds": str(seconds), "cache": str(cache or "")}
    with joined(rendezvous, ranks, node_rejoin_seconds=0) as coordinator:
        if coordinator:
            if coordinator.host == 0:
                coordinator.publish_config(facts)
            facts = coordinator.wait_for_config()
        return _measure_here(ranks, float(facts["seconds"]), facts["cache"], coordinator)


def _measure_here(
    ranks: int, seconds: float, cache: str, coordinator: JobCoordinator | None
) -> tuple[Measurement, str]:
    """Launch the ranks of this host. Local rank 0 writes the result to a local folder, so that no shared one is needed."""
    network = coordinator.network_environment() if coordinator else {}
    with tempfile.TemporaryDirectory(prefix="weft-topology-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "weft.comm.measure_links", str(folder), str(seconds), cache]
        launch(
            command,
            ranks=ranks,
            log_dir=folder / "logs",
            environment=network,
            coordinator=coordinator,
            use_forkserver=detect().supports_fork,
        )
        text = (folder / RESULT).read_text(encoding="utf-8")
        return Measurement.model_validate_json(text), (folder / SOURCE).read_text(encoding="utf-8")


def main() -> None:
    """Entry point of a rank: connect, measure, and write the result for the launcher of this host."""
    folder, seconds, cache = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    device = detect()
    _, _, local_rank = connect(device)
    measured, source = measure(
        device, device.torch_device(local_rank), seconds=seconds, cache=Path(cache) if cache else None
    )
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        (folder / RESULT).write_text(measured.model_dump_json(), encoding="utf-8")
        (folder / SOURCE).write_text(source, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
