"""All commands, by name. Each one imports what it needs when it runs, so that `weft --help` is quick."""

import typer

from weft.cli.advise import advise
from weft.cli.anatomy import anatomy
from weft.cli.calibrate import calibrate
from weft.cli.checkpoint import checkpoint
from weft.cli.compare import compare
from weft.cli.dryrun import dryrun
from weft.cli.export import export
from weft.cli.memory import memory
from weft.cli.plan import plan
from weft.cli.report import report
from weft.cli.schema import schema
from weft.cli.topology import topology
from weft.cli.train import train
from weft.cli.validate import validate

app = typer.Typer(
    name="weft",
    help="Trains the PyTorch models people already have, on many devices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
PLANNING = (plan, advise, calibrate, validate, compare, dryrun, memory, topology)
for command in (train, *PLANNING, export, report, anatomy, schema):
    app.command()(command)
app.add_typer(checkpoint, name="checkpoint")
