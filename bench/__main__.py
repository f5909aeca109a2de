"""Every bench in one run, side by side: `python -m bench [--json] [NAME...]`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from bench import parse, screen

BENCHES = {"screen": screen.measure, "parse": parse.measure}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", default=[*BENCHES, "stage"], metavar="NAME", help="screen, parse, stage")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name == "stage":  # it has options of its own, and prints JSON lines
            subprocess.run([sys.executable, "-m", "bench.stage"], check=True)
            continue
        for row in BENCHES[name]():
            load = round(os.getloadavg()[0], 1)
            print(json.dumps({"bench": name} | row | {"load": load}) if chosen.json else written(row), flush=True)


def written(row: dict[str, object]) -> str:
    """A row as text: its first value, then each figure with its name."""
    client, rest = row.get("client"), {key: value for key, value in row.items() if key != "client"}
    figures = ", ".join(f"{key.replace('_', ' ')} {shown(value)}" for key, value in rest.items())
    return f"{client}: {figures}" if client else figures


def shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    main()
