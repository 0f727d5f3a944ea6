"""The command line: which commands there are, and the one way in and out of the process.

Every command's module imports nothing but Typer and its flags at the top, so `coli --help` costs Python, Typer and
reading a dozen small files; engines, NumPy and Numba are imported by the command that needs them, when it runs. Help is
Typer's plain one: the rich form adds more start time than everything else together.
Guarded by tests/cli/test_app.py (start time, and that no heavy module is loaded by help).
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from coli.commands import bench, chat, convert, doctor, env, info, plan, run, serve, warmup
from coli.commands._errors import guarded

app = typer.Typer(
    name="coli",
    help="Run big hybrid mixture-of-experts language models on a machine you own.",
    epilog="Exit codes: 0 ok, 1 failure, 2 usage or setting, 3 model, 4 memory, 5 device, 6 check, "
    "130 Ctrl-C, 143 SIGTERM.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(serve.serve)
app.command()(chat.chat)
app.command()(info.info)
app.command()(plan.plan)
app.command()(convert.convert)
app.command()(doctor.doctor)
app.command()(env.env)
app.command()(warmup.warmup)
app.command()(bench.bench)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"coli {version('coli')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Run big hybrid mixture-of-experts language models on a machine you own."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line (sys.argv without the name by default) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "_COLI_COMPLETE" in os.environ:  # a shell asks for completions, in Typer's protocol
        app(arguments, prog_name="coli")
    return guarded(lambda: _invoke(arguments))


def _invoke(arguments: list[str]) -> int:
    """Typer's own `main` prints errors and chooses exit codes; here both are ours, so it is left out. No command is
    a question for help."""
    command = typer.main.get_command(app)
    with command.make_context("coli", list(arguments) or ["--help"]) as context:
        command.invoke(context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
