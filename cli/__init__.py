"""The command line: parses options, calls one function, prints. Commands are imported when they are used.

Comes in: arguments. Goes out: text, and an exit code: 0, that of an LlmcError, 2 for wrong usage, 130 after Ctrl-C,
1 for a defect of llmc itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os

import click

from llmc.artifacts.errors import LlmcError

#: Command -> what it does. Each is the `command` of the module llmc.cli.<name>.
COMMANDS = {
    "build": "Compile a checkpoint into engine.plan.",
    "estimate": "Say what a model needs of a GPU, and how fast it can be.",
    "calibrate": "Measure activation ranges and write a calibration table.",
    "opt": "Run passes alone on the text of a graph.",
    "export": "Write a plan's graph and weights as ONNX.",
    "inspect": "Show what a plan is made of and pinned to.",
    "verify": "Check a plan: hashes, checkpoint, lock, golden answers.",
    "run": "Answer one prompt or chat on the terminal.",
    "serve": "Serve a plan over HTTP, as OpenAI's API.",
    "bench": "Measure the speed of a plan, or of a running server.",
    "tune": "Measure which tactics suit this machine.",
    "models": "Show which model types compile, and why others do not.",
}


class _Commands(click.Group):
    """A group that knows its commands' names and help before it imports them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"llmc.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except LlmcError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("LLMC_TRACEBACK"):
                raise
            # A defect of llmc, not of its input; still one line, and a way to see more.
            text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            click.echo(f"error: internal error: {text}; LLMC_TRACEBACK=1 shows where. Please report it", err=True)
            ctx.exit(1)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"llmc {importlib.metadata.version('llmc')}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
def main() -> None:
    """llmc compiles a language model into one file, and runs and serves that file."""
