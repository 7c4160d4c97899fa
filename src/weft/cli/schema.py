"""weft schema"""

import json


def schema() -> None:
    """Print the JSON schema of a job, for editors."""
    from weft.job import Job

    print(json.dumps(Job.model_json_schema(), indent=2))
