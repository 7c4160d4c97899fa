"""weft schema"""

import json


def schema() -> None:
    """Print the JSON schema of a job, for editors."""
    from weft.posttraining.job import job_schema

    print(json.dumps(job_schema(), indent=2))
