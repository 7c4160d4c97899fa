"""Start ranks, as for training, only to measure the links between them; each rank is `python -m weft.comm.measure_links FOLDER ...`.

measured, source = survey(ranks=2)
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

from weft.device.device import detect
from weft.launch.launcher import connect, launch, rank_main
from weft.topology.measurement import Measurement
from weft.launch.rendezvous import RendezvousConfig
from weft.launch.coordinator import JobCoordinator
from weft.comm.link_benchmark import SECONDS, measure
from weft.errors import WeftError

RESULT, SOURCE = "measurement.json", "source"


def measure_links(
    ranks: int, *, meeting: RendezvousConfig | None = None, seconds: float = SECONDS, cache: Path | None = None
) -> tuple[Measurement, str]:
    """Measure the links between ranks on this host, or on several hosts together, which all call it and have the result.

    Args:
        ranks: processes on this host.
        meeting: where hosts meet, if there are several.
        seconds: budget of the measurement; that of host 0 counts.
        cache: folder on host 0 for earlier measurements; that of host 0 counts.

    Raises:
        WeftError: one of its subclasses: the hosts did not meet, or a rank failed.
    """
    if meeting is None:
        return _survey_here(ranks, seconds, str(cache or ""), None)
    team = JobCoordinator.join(meeting, ranks, rejoin_seconds=0)
    failure: WeftError | None = None
    try:
        if meeting.host == 0:
            team.announce({"seconds": str(seconds), "cache": str(cache or "")})
        facts = team.facts()
        return _survey_here(ranks, float(facts["seconds"]), facts["cache"], team)
    except WeftError as error:
        failure = error
        raise
    finally:
        team.end(failure)


def _survey_here(ranks: int, seconds: float, cache: str, team: JobCoordinator | None) -> tuple[Measurement, str]:
    """Start the ranks of this host; the first of them leaves the result, so that hosts need no folder in common."""
    network = team.rank_network() if team else {}
    with tempfile.TemporaryDirectory(prefix="weft-topology-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "weft.comm.measure_links", str(folder), str(seconds), cache]
        launch(
            command,
            ranks=ranks,
            log_dir=folder / "logs",
            environment=network,
            team=team,
            warm=detect().bears_forks,
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
