"""The weft command with all its subcommands. Subcommands import their dependencies at run time to keep `weft --help` fast."""

import logging
import os
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.advise import advise
from weft.cli.anatomy import anatomy
from weft.cli.calibrate import calibrate
from weft.cli.checkpoint import checkpoint
from weft.cli.clean import clean
from weft.cli.command import add_command
from weft.cli.compare import compare
from weft.cli.compress import compress
from weft.cli.doctor import doctor
from weft.cli.dryrun import dryrun
from weft.cli.eval import eval
from weft.cli.export import export
from weft.cli.launch import launch
from weft.cli.memory import memory
from weft.cli.options import HUB_OFFLINE
from weft.cli.plan import plan
from weft.cli.profile import profile
from weft.cli.report import report
from weft.cli.run import PASS_ON, run
from weft.cli.schema import schema
from weft.cli.topology import topology
from weft.cli.train import train
from weft.errors import Stopped
from weft.names import OTHER_NAMES, RENAMED
from weft.own_code import package_version

NOISE = ("torchao", "torch.utils._pytree")
"""Loggers that warn when Transformers imports torchao: of kernels for other devices, and of torchao's use of torch."""


class Commands(TyperGroup):
    """Command group that exits with code 130 and no traceback on Ctrl-C, and never downloads from a model hub."""

    def invoke(self, ctx: Any) -> Any:
        # Before Transformers is imported: a configuration may name a repository. A script of `weft run` decides itself.
        ctx.obj = {HUB_OFFLINE: os.environ.get(HUB_OFFLINE, "0")}
        os.environ.setdefault(HUB_OFFLINE, "1")
        for name in NOISE:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Stopped(signal.SIGINT) from None
        except Exception as error:  # the class of an unknown option is private to typer
            option = str(getattr(error, "option_name", ""))
            other = OTHER_NAMES.get(option.lstrip("-").replace("-", "_"))
            if option in RENAMED:
                answer = f"{option} is now {RENAMED[option]}"
            elif other and other != option:
                answer = f"instead of {option}, write {'' if other.startswith('--') else '--set with '}{other}"
            else:
                raise
            raise typer.BadParameter(answer, getattr(error, "ctx", None)) from None


app = typer.Typer(
    name="weft",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"weft {package_version()}")
        raise typer.Exit


@app.callback()
def weft(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Distributed training of existing PyTorch models."""


PLANNING = (plan, advise, calibrate, compare, dryrun, memory, topology)
add_command(app, train, reports_steps=True)
add_command(app, run, reports_steps=True, context_settings=PASS_ON)
for command in (*PLANNING, profile, eval, export, compress, report, clean, anatomy, doctor, schema):
    add_command(app, command)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(launch, name="launch")
