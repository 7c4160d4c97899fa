"""Start ranks, as for training, only to measure the links between them; each rank is `python -m weft.comm.measure_links FOLDER ...`.

measured, source = survey(ranks=2)
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from weft.comm.link_benchmark import SECONDS, measure
from weft.device.device import detect
from weft.errors import WeftError
from weft.launch.coordinator import JobCoordinator
from weft.launch.launcher import connect, launch, rank_main
from weft.launch.rendezvous import RendezvousConfig
from weft.topology.measurement import Measurement

RESULT, SOURCE = "measurement.json", "source"


def measure_links(
    ranks: int, *, rendezvous: RendezvousConfig | None = None, seconds: float = SECONDS, cache: Path | None = None
) -> tuple[Measurement, str]:
    """Measure the links between ranks on this host, or on several hosts together, which all call it and have the result.

    Args:
        ranks: processes on this host.
        rendezvous: where hosts meet, if there are several.
        seconds: budget of the measurement; that of host 0 counts.
        cache: folder on host 0 for earlier measurements; that of host 0 counts.

    Raises:
        WeftError: one of its subclasses: the hosts did not meet, or a rank failed.
    """
    if rendezvous is None:
        return _survey_here(ranks, seconds, str(cache or ""), None)
    coordinator = JobCoordinator.join(rendezvous, ranks, node_rejoin_seconds=0)
    failure: WeftError | None = None
    try:
        if rendezvous.host == 0:
            coordinator.announce({"seconds": str(seconds), "cache": str(cache or "")})
        facts = coordinator.facts()
        return _survey_here(ranks, float(facts["seconds"]), facts["cache"], coordinator)
    except WeftError as error:
        failure = error
        raise
    finally:
        coordinator.end(failure)


def _survey_here(ranks: int, seconds: float, cache: str, coordinator: JobCoordinator | None) -> tuple[Measurement, str]:
    """Start the ranks of this host; the first of them leaves the result, so that hosts need no folder in common."""
    network = coordinator.rank_network() if coordinator else {}
    with tempfile.TemporaryDirectory(prefix="weft-topology-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "weft.comm.measure_links", str(folder), str(seconds), cache]
        launch(
            command,
            ranks=ranks,
            log_dir=folder / "logs",
            environment=network,
            coordinator=coordinator,
            warm=detect().supports_fork,
        )
        text = (folder / RESULT).read_text(encoding="utf-8")
        return Measurement.model_validate_json(text), (folder / SOURCE).read_text(encoding="utf-8")


def main() -> None:
    """Of a rank: join the others, measure, leave the result of this host's launcher in its folder."""
    folder, seconds, cache = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    device = detect()
    _, _, local_rank = connect(device)
    place = device.torch_device(local_rank)
    measured, source = measure(device, place, seconds=seconds, cache=Path(cache) if cache else None)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        (folder / RESULT).write_text(measured.model_dump_json(), encoding="utf-8")
        (folder / SOURCE).write_text(source, encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
