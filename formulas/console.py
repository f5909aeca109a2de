"""What the three command lines share: one sink for data and messages, one mapping from errors to exit codes."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import isfinite
from typing import Any

import typer
from typer.core import TyperGroup

from .errors import BadInput, ToolkitError

YES, FAILED, USAGE, NO, PARTLY, LOCKED, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130


class MainCommandGroup(TyperGroup):
    """A command group whose first command runs when the first word is no subcommand: `screen X` is `screen run X`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            args = ["run", *self._checked(ctx, args, args[0])]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for param in self.params for option in param.opts}
        if args and args[0].startswith("-") and args[0] not in own.union(ctx.help_option_names):
            args = self._named(ctx, args)
        return list(super().parse_args(ctx, args))

    def _named(self, ctx: Any, args: list[str]) -> list[str]:
        """The words after options of the main command with their command first: `screen --json show X` is a `show`."""
        options = [param for param in self.commands["run"].params if param.param_type_name == "option"]
        valued = {name for param in options if not getattr(param, "is_flag", False) for name in param.opts}
        for at, (before, word) in enumerate(pairwise(["", *args])):
            if before not in valued and (word == "-" or not word.startswith("-")):
                named = self.get_command(ctx, word) is not None
                return [word, *args[:at], *args[at + 1 :]] if named else ["run", *self._checked(ctx, args, word)]
        return ["run", *args]

    def _checked(self, ctx: Any, args: list[str], word: str) -> list[str]:
        """The arguments of the main command. Raises BadInput where the first of its words is a command mistyped."""
        near = get_close_matches(word, [name for name in self.commands if name != "run"], n=1, cutoff=0.75)
        if near and "/" not in word and not os.path.exists(word):
            raise BadInput(
                f"{word}: expected a command or a repo as org/name, got neither; nothing was done",
                hint=f"did you mean `{ctx.info_name} {near[0]}`? if it is a repo: `{ctx.info_name} run {word}`",
            )
        return args


def application(name: str, help: str) -> typer.Typer:
    """A typer application in the house style: plain help, no pretty tracebacks, a main command called `run`."""
    return typer.Typer(
        name=name, help=help, cls=MainCommandGroup, no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip


def run(app: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """The exit code of one command line. Known errors are one sentence on stderr (an object under --json)."""
    _open_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        outcome = app(args=args, standalone_mode=False)
        _write("", end="", flush=True)
    except ToolkitError as error:
        report(error, as_json="--json" in args)
        if isinstance(error, OutputLost):
            _drop_stdout()
        return error.exit_code
    except KeyboardInterrupt:
        outcome = INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()  # its reader left (`| head`): not a failure of ours, and nobody is left to tell
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


class OutputLost(ToolkitError):
    """What stdout leads to takes no more."""

    code = "output_lost"


def message(text: str) -> None:
    """A line for the person at the terminal; never data."""
    print(_shown(text), file=sys.stderr)


def data(text: str) -> None:
    """A line of the answer. Raises OutputLost."""
    _write(_shown(text))


def json_line(value: Any) -> None:
    """One JSON object on one line of stdout, written at once: a reader need not wait for the next one.

    In ASCII, so that every reader's encoding and every reader's idea of a line will do; a number that JSON cannot hold
    (NaN, Infinity) is null. Raises OutputLost.
    """
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"))
    _write(text, flush=True)


def _write(text: str, *, end: str = "\n", flush: bool = False) -> None:
    try:
        print(text, end=end, flush=flush)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(f"stdout: expected room for the answer, got {error.strerror}; the rest is lost") from None


def _open_streams() -> None:
    """A stream the caller closed (`2>&-`) is nowhere, before a socket gets its number; any text can be written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Lets what is still to be written to stdout go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Names and texts come from strangers: what moves the cursor, colours, or turns the writing direction is spelled out.
_CONTROLS = [*range(0x20), *range(0x7F, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_SPELLED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_SPELLED_IN_TEXT = {code: text for code, text in _SPELLED.items() if chr(code) not in "\n\t"}


def _shown(text: str) -> str:
    return text if text.isascii() and text.isprintable() else text.translate(_SPELLED_IN_TEXT)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return {key: _finite(item) for key, item in value.items()} if isinstance(value, dict) else value


def table(rows: Sequence[Sequence[str]], *, right: Callable[[int], bool] = lambda column: False) -> list[str]:
    """Rows of text as aligned lines; columns for which `right` holds are right-aligned. The first row is the head."""
    if not rows:
        return []
    rows = [[cell.translate(_SPELLED) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if right(i) else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
