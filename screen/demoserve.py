"""The demo Hub as a process of its own, so that it does not share an interpreter with whoever is measured against it.

`python -m screen.demoserve` prints one line of JSON, {"endpoint", "cdn", "mirrors"}, and serves until its stdin ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import requests
import typer

from . import demomodels
from .catalogue import demo_repos, headers_dir
from .demohub import COUNTS, DemoHub, Traffic
from .demorepo import folder_repo

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)


class Address(NamedTuple):
    endpoint: str
    cdn: str
    mirrors: list[str]

    def counts(self, suffix: str = "") -> dict[str, Traffic]:
        """Requests and body bytes by route so far, of files and repos whose names end so."""
        found = requests.get(self.endpoint + COUNTS, {"suffix": suffix}, timeout=30).json()
        return {route: Traffic(**traffic) for route, traffic in found.items()}


@app.command()
def serve(
    headers: Path | None = typer.Option(None, help="Serve a folder of recorded headers (*.json.gz)."),
    configs: Path | None = typer.Option(None, help="Their configs, org__name/config.json."),
    folder: list[str] = typer.Option([], help="Serve a folder as a repo: org/name=PATH. Repeatable."),
    latency: float = typer.Option(0.0, help="Seconds a request takes."),
    mirrors: int = typer.Option(0, help="Plain mirrors beside the Hub."),
    only: list[str] = typer.Option([], help="Serve these repos alone. Repeatable."),
    prepare: bool = typer.Option(False, help="Generate everything before the first request, not when it is asked for."),
    ranges_only: bool = typer.Option(False, help="Do not serve /safetensors-metadata."),
    port: int = typer.Option(0, help="Port of the Hub; 0 picks one."),
) -> None:
    """Serve the demo catalogue, or the folders named instead, on loopback until stdin ends."""
    gc.set_threshold(1_000_000, 50, 50)  # see `desk`
    repos = headers_dir(headers, configs) if headers else [] if folder else demo_repos()
    repos += [folder_repo(name, Path(path)) for name, _, path in (item.partition("=") for item in folder)]
    repos = [repo for repo in repos if not only or repo.name in only]
    for repo in repos if prepare else []:
        demomodels.prepare(repo)
    with DemoHub(repos, latency=latency, mirrors=mirrors, one_request_headers=not ranges_only, port=port) as hub:
        typer.echo(json.dumps(Address(hub.endpoint, hub.cdn, hub.mirrors)._asdict()))
        sys.stdin.read()


@contextlib.contextmanager
def served(*options: str) -> Iterator[Address]:
    """A demo Hub in a process of its own, with these options of the command line; it ends with the `with`."""
    command = [sys.executable, "-m", "screen.demoserve", *options]
    # Ctrl-C is for the client; the server ends with its stdin, however the client ends.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Address(**json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(10)


if __name__ == "__main__":
    app()
