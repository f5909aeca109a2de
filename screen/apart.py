"""Large repos counted in processes of their own: one interpreter reads at most one core's worth of headers.

A worker is this interpreter once more, with pipes: (tally, call, arguments) in, (tally, answer) out, pickled. It owns
nothing, ends with its stdin, and is killed when the survey ends. One that cannot be started or is lost (killed for
its memory, say) costs only time: see `Lost`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from concurrent.futures import Future
from typing import Any

from formulas.errors import HeaderError

from .counting import Counted, Origin, Tally
from .shards import Placed

MOST = 4  # workers: each may hold a few hundred MB
_ANSWERED = {"index", "stated", "counted"}


class Lost(Exception):
    """The worker is gone, and with it what it was told. The repo is counted here, from the cache."""


class Apart:
    """The workers of a survey: started when first needed, at most one a core, ended by `close`."""

    def __init__(self, most: int | None = None) -> None:
        self._most = min(MOST, cores()) if most is None else most
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self.closed = self._most < 2  # with one core there is nothing to gain

    def tally(self) -> Remote | None:
        """A tally kept by the worker with the fewest; None where there is no worker to be had."""
        with self._lock:
            if self.closed:
                return None
            free = any(not worker.tallies for worker in self._workers)
            if not free and not self._start() and not self._workers:
                return None
            return Remote(min(self._workers, key=lambda worker: worker.tallies))

    def prepare(self) -> None:
        """Starts a worker for a tally that is likely soon: that takes as long as several requests do."""
        with self._lock:
            if not self.closed:
                self._start()

    def _start(self) -> bool:
        """Whether there is one worker more."""
        if len(self._workers) < self._most:
            with contextlib.suppress(OSError):
                self._workers.append(_Worker())
                return True
        return False

    def close(self) -> None:
        """Ends the workers; whoever waits for one gets Lost."""
        with self._lock:
            self.closed = True
        for worker in self._workers:
            worker.end()


class Remote:
    """A `Count` kept by a worker; what it is told is answered when it is asked. Every call may raise Lost."""

    def __init__(self, worker: _Worker):
        self._worker, self._key = worker, worker.open()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.release(self._key)

    def index(self, data: bytes) -> Placed:
        found: Placed = self._worker.ask(self._key, "index", data)
        return found

    def header(self, path: str, data: bytes, file_size: int, name: str) -> None:
        self._worker.tell(self._key, "header", path, data, file_size, name)

    def refuse(self, path: str, error: HeaderError) -> None:
        self._worker.tell(self._key, "refuse", path, error)

    def stated(self, texts: dict[str, bytes], sizes: dict[str, int], names: dict[str, str]) -> bool:
        found: bool = self._worker.ask(self._key, "stated", texts, sizes, names)
        return found

    def counted(self, origin: Origin) -> Counted:
        found: Counted = self._worker.ask(self._key, "counted", origin)
        return found


class _Worker:
    """A process, and the thread that hands its answers to those who wait for them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is for the parent
        )  # fmt: skip
        self._lock, self._keys = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost = False
        self.tallies = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def open(self) -> int:
        self.tallies += 1
        return next(self._keys)

    def release(self, key: int) -> None:
        """Lets the worker forget a tally."""
        self.tallies -= 1
        with contextlib.suppress(Lost):
            self.tell(key, "forget")

    def ask(self, key: int, call: str, *given: Any) -> Any:
        """The answer to a call; an error of the call itself is raised here."""
        answer: Future[Any] = Future()
        self._waiting[key] = answer
        self.tell(key, call, *given)
        return answer.result()

    def tell(self, key: int, call: str, *given: Any) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                pickle.dump((key, call, given), self._process.stdin, pickle.HIGHEST_PROTOCOL)
                self._process.stdin.flush()
        except (OSError, ValueError):  # the pipe is broken, or closed
            self._lose()
        if self._lost:
            raise Lost

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                key, answer = pickle.load(self._process.stdout)
                waiting = self._waiting.pop(key)
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._lose()

    def _lose(self) -> None:
        self._lost = True
        with contextlib.suppress(KeyError):  # until there are none
            while True:
                self._waiting.popitem()[1].set_exception(Lost())


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """A worker: keeps tallies until its stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(1_000_000, 50, 50)  # see `desk`
    tallies: defaultdict[int, Tally] = defaultdict(Tally)
    broken: dict[int, Exception] = {}  # what went wrong in a call that has no answer: that of the next
    with sys.stdin.buffer as told, sys.stdout.buffer as answers:
        while True:
            try:
                key, call, given = pickle.load(told)
            except EOFError:
                return
            if call == "forget":
                tallies.pop(key, None)
                continue
            try:
                answer = getattr(tallies[key], call)(*given)
            except Exception as error:
                answer = broken.setdefault(key, error)
            if call in _ANSWERED:
                pickle.dump((key, broken.pop(key, answer)), answers, pickle.HIGHEST_PROTOCOL)
                answers.flush()


if __name__ == "__main__":
    main()
