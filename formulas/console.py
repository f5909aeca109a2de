"""What the three command lines share: one sink for data and messages, one mapping from errors to exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from .errors import ToolkitError

YES, FAILED, USAGE, NO, PARTLY, LOCKED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class MainCommandGroup(TyperGroup):
    """A command group whose first command runs when the first word is no subcommand: `screen X` is `screen run X`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            args = ["run", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for param in self.params for option in param.opts}
        if args and args[0].startswith("-") and args[0] not in own | {"--help"}:
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


def application(name: str, help: str) -> typer.Typer:
    """A typer application in the house style: plain help, no pretty tracebacks, a main command called `run`."""
    return typer.Typer(
        name=name, help=help, cls=MainCommandGroup, no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def run(app: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line. Known errors are one sentence on stderr (an object under --json)."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        outcome = app(args=args, standalone_mode=False)
    except ToolkitError as error:
        report(error, as_json="--json" in args)
        return error.exit_code
    except KeyboardInterrupt:
        outcome = INTERRUPTED
    except BrokenPipeError:
        # The reader of our stdout left (`| head`): not a failure of ours, and nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if not hasattr(error, "exit_code"):
            raise
        show = getattr(error, "show", None)
        if callable(show):
            show(file=sys.stderr)
        return int(error.exit_code)
    if outcome == INTERRUPTED:  # typer has turned most Ctrl-C into this code
        message("interrupted; run again to continue")
    return outcome if isinstance(outcome, int) else YES


def report(error: ToolkitError, *, as_json: bool) -> None:
    """Shows an error on stderr in the form the user asked for."""
    if as_json:
        body = {"code": error.code, "message": error.message, "hint": error.hint}
        print(json.dumps({"error": body}), file=sys.stderr)
        return
    message(f"error: {error.message}")
    if error.hint:
        message(f"  {error.hint}")


def message(text: str) -> None:
    """A line for the person at the terminal; never data."""
    print(text, file=sys.stderr)


def data(text: str) -> None:
    """A line of the answer."""
    print(text)


def json_line(value: Any) -> None:
    """One JSON object on one line of stdout, written at once: a reader need not wait for the next one."""
    print(json.dumps(value, ensure_ascii=False, separators=(",", ":")), flush=True)


def table(rows: Sequence[Sequence[str]], *, right: Callable[[int], bool] = lambda column: False) -> list[str]:
    """Rows of text as aligned lines; columns for which `right` holds are right-aligned. The first row is the head."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if right(i) else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
