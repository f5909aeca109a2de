"""Runs `stage` many times without paying for the imports each time, and kills it where a test says.

A process of its own: it reads one JSON line an order, forks, runs the command line in the child and answers with a
JSON line {"code", "calls"}. `die_at` N ends the child at its N-th change of the disk, as SIGKILL would: before the
call, or with half of the data written. `kill_at` N has the parent send SIGKILL once it sees N changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

CHANGES = ("rename", "link", "symlink", "unlink", "mkdir", "write", "pwrite", "fsync", "fdatasync", "fchmod")


class Zygote:
    """The tests' end: `run` returns the exit code (-9 when killed) and how often the disk was changed."""

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def run(self, args: list[Any], *, env: dict[str, str], **order: Any) -> tuple[int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"args": list(map(str, args)), "env": env, **order}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["calls"]


def _count_changes(counter: Any, die_at: int | None) -> None:
    """Counts every call that changes the disk into shared memory; ends the process at one of them."""
    lock = threading.Lock()

    def counted(name: str) -> Any:
        real = getattr(os, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            with lock:
                counter[0] += 1
                if counter[0] == die_at:
                    if name in ("write", "pwrite"):
                        real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                    os._exit(137)
            return real(*args, **kwargs)

        return change

    for name in CHANGES:
        setattr(os, name, counted(name))


def _child(order: dict[str, Any], counter: Any) -> int:
    from formulas import console
    from stage.cli import app

    os.environ.update(order["env"])
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if not order.get("loud"):
        os.dup2(null, 2)
    _count_changes(counter, order.get("die_at"))
    return console.run(app, order["args"])


def _main() -> None:
    import mmap

    import stage.cli  # noqa: F401  the price of the imports, paid once

    counter = memoryview(mmap.mmap(-1, 8)).cast("q")
    for line in sys.stdin:
        order = json.loads(line)
        counter[0] = 0
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(_child(order, counter))
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(99)
        ended, status = 0, 0
        while order.get("kill_at") and counter[0] < order["kill_at"] and not ended:
            time.sleep(0.001)
            ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            if order.get("kill_at"):
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"code": -9 if code == 137 else code, "calls": counter[0]}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    _main()
