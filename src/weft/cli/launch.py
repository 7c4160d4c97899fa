"""weft launch"""

import typer

launch = typer.Typer(help="Start a job on the hosts of a cluster.", no_args_is_help=True)
