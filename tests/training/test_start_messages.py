"""Messages of the start of `weft train`, before its first step: rounds that grow with the logarithm of the ranks."""

import math
import time
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.lab.jobs import write_job
from tests.lab.pool import run_ranks
from weft.comm.recorder import Message, Recorder
from weft.data import Prepared, prepare
from weft.job import Job
from weft.launch.heartbeat import Heartbeat
from weft.training import loop
from weft.training.session import open_session

ROUND_SECONDS = 50e-6  # of a message between two hosts


def test_the_start_gathers_texts_of_all_ranks_once(tmp_path: Path) -> None:
    """The hosts of the ranks, for their times. Before, seven texts of each rank, in fourteen all-gathers, each a ring."""
    job = Job.load(write_job(tmp_path, train={"steps": 1}))
    prepared = prepare(job.data, model_folder=None, log=print)
    for messages in run_ranks(2, start, job, prepared, tmp_path / "run"):
        assert not {message.operation for message in messages} & {"all_gather", "all_to_all", "reduce_scatter"}
        assert [message.site.partition(":")[0] for message in texts(messages)] == ["rank_times.py"]
        small = Counter(message.site.partition(":")[0] for message in messages if message.operation == "send")
        assert small.total() <= 8
        # On two ranks each message is a round; gloo broadcasts along a tree.
        sequence = len([message for message in messages if message.operation in ("send", "broadcast")])
        assert sequence * math.ceil(math.log2(10_240)) * ROUND_SECONDS < 0.1


def texts(messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.operation == "send" and message.dtype == torch.uint8]


def start(rank: int, ranks: int, job: Job, prepared: Prepared, out: Path) -> list[Message]:
    """Messages until the first step."""
    out.mkdir(exist_ok=True)
    marks: list[int] = []
    run_step = loop.Loop.run_step

    def first_step(own: loop.Loop) -> Any:
        marks.append(len(recorder.messages))
        return run_step(own)

    with (
        Recorder() as recorder,
        mock.patch("weft.training.session.connect", return_value=(rank, ranks, rank)),
        mock.patch.object(loop.Loop, "run_step", first_step),
        redirect_stdout(StringIO()),
    ):
        session = open_session(job, prepared, out, [])
        loop.train(session, out, Heartbeat.open(), time.time())
    return recorder.messages[: marks[0]]
