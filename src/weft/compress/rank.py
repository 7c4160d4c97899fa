"""Entry point of each rank of `weft compress --nproc-per-node`: python -m weft.compress.rank SETTINGS.json."""

import json
import sys
from pathlib import Path

import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from weft.checkpoint.export_files import explain_writes
from weft.compress.ranks import Ranks
from weft.compress.recipe import Recipe
from weft.compress.run import ERRORS, Settings, compress_into
from weft.device.detect import detect
from weft.launch.heartbeat import Heartbeat
from weft.launch.rank_entry import connect, rank_main


def main() -> None:
    """Compress the share of this rank; rank 0 writes the files and the errors of the layers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    heartbeat = Heartbeat.open()
    rank, count, _ = connect(detect())

    def log(line: str) -> None:
        heartbeat.phase("compressing")
        if rank == 0:
            print(line, flush=True)

    log(f"compressing on {count} ranks")
    stored = load_file(settings.rows) if settings.rows else {}
    rows = [stored[str(index)] for index in range(len(stored))] or None
    part = Path(settings.part)
    with explain_writes(part):
        errors = compress_into(Path(settings.source), part, Recipe(**settings.recipe), rows, log, Ranks(rank, count))
        if rank == 0:
            (part / ERRORS).write_text(json.dumps(errors), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(main)
