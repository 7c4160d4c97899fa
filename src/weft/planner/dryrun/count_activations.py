"""Activation bytes of a layer, counted in a process of its own, for a caller that is in a process group.

The process reads a job as JSON from its standard input, and prints the counts as JSON.
"""

import json
import os
import subprocess
import sys
from typing import Any

from weft.job import Job
from weft.planner.costmodel.peak_memory import LayerActivations
from weft.planner.dryrun.layer_activations import trace_layers

LIMIT_SECONDS = 300
HIDDEN = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), "")
"""Environment without accelerators: a dry run needs none, and starts faster without."""


def count_activations(job: Job, device_type: str, with_tp: bool = False) -> LayerActivations | None:
    """Count activations with and without recompute of blocks; None if the model cannot be dry-run.

    Args:
        job: provides model, sequence length and dtypes.
        device_type: device type of the ranks.
        with_tp: True to count with tp = 2 too.
    """
    given = {"job": job.model_dump(mode="json", exclude_none=True), "device_type": device_type, "with_tp": with_tp}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "weft.planner.dryrun.count_activations"],
            input=json.dumps(given),
            env=os.environ | HIDDEN,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return LayerActivations(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Count for the job of the standard input."""
    given: dict[str, Any] = json.load(sys.stdin)
    found = trace_layers(Job.parse(given["job"]), given["device_type"], given["with_tp"], ("none", "full"))
    print(json.dumps(vars(found)))


if __name__ == "__main__":
    main()
