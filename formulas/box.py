"""A box: hosts, their cards by UUID, their memory, and the seats to be placed on them. Read from TOML.

    [[host]]                         [[seat]]
    name = "a"                       name = "flash-next"
    ram = "512GiB"                   checkpoint = "org/name"
    [[host.card]]                    tensor-parallel-size = 2      # and any option of `vllm serve`, by its own name
    uuid = "GPU-..."                 max-model-len = 262144
    card = "h200"
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from .cards import Card, find_card
from .deployment import Deployment
from .errors import BadInput
from .options import OPTIONS, deployment_from, parse_arguments
from .units import parse_size

KILL_AT = 0.95
"""Share of a host's memory at which Ray's monitor ends a worker; it counts the whole node, pinned memory included
(docs.ray.io, out-of-memory prevention: RAY_memory_usage_threshold)."""

ONE_A_HOST = "one card per host"
SPREADS = (ONE_A_HOST, "over hosts")

_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_BOX_KEYS = ("host", "seat", "engine")
_HOST_KEYS = ("name", "address", "ram", "used", "kill_at", "card")
_CARD_KEYS = ("uuid", "card", "memory", "capability", "used")
_SEAT_KEYS = ("name", "checkpoint", "commit", "hosts", "count", "spread", "args")
_FLAGS = {flag.lstrip("-"): option for option in OPTIONS for flag in option.flags}


class BoxCard(NamedTuple):
    """One card of a host."""

    uuid: str
    card: Card
    used_bytes: int = 0  # by what is no seat of this plan


class Host(NamedTuple):
    """A host. Its memory is None where the box does not say."""

    name: str
    cards: tuple[BoxCard, ...]
    ram_bytes: int | None = None
    used_bytes: int | None = None  # by what is no seat of this plan
    kill_at: float = KILL_AT
    address: str | None = None

    @property
    def limit_bytes(self) -> int | None:
        """What seats may take before the host's memory monitor acts; None where the memory is not known."""
        return None if self.ram_bytes is None else int(self.ram_bytes * self.kill_at) - (self.used_bytes or 0)


class Seat(NamedTuple):
    """One served model: a checkpoint, how it is served, and what the box says of where."""

    name: str
    checkpoint: str
    commit: str | None
    deployment: Deployment
    hosts: tuple[str, ...] = ()  # it is pinned to; empty: any
    spread: str | None = None
    words: tuple[str, ...] = ()  # options that change no byte, handed on to the engine as they are
    unmodelled: tuple[str, ...] = ()
    group: str = ""  # the name in the box, which seats with a count share

    @property
    def ranks(self) -> int:
        return self.deployment.tp * self.deployment.pp * self.deployment.dp


class Box(NamedTuple):
    hosts: tuple[Host, ...]
    seats: tuple[Seat, ...]


def parse_box(text: str, name: str = "box") -> Box:
    """The box a TOML document describes; a seat with `count` is as many seats. Raises BadInput with the place."""
    try:
        body = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{name}: expected TOML, got {error}") from None
    _check_keys(body, _BOX_KEYS, name, "box")
    hosts = [_host(table, f"{name} host {i}") for i, table in enumerate(_tables(body, "host", name), 1)]
    _distinct([host.name for host in hosts], name, "host name")
    _distinct([card.uuid for host in hosts for card in host.cards], name, "card")
    known = {host.name for host in hosts}
    seats = []
    for i, table in enumerate(_tables(body, "seat", name), 1):
        seats += _seats({"engine": body["engine"], **table} if "engine" in body else table, f"{name} seat {i}", known)
    _distinct([seat.name for seat in seats], name, "seat name")
    return Box(tuple(hosts), tuple(seats))


def _host(table: Mapping[str, Any], where: str) -> Host:
    _check_keys(table, _HOST_KEYS, where, "host")
    name = _text(table, "name", where)
    where = f"{where} ({name})"
    kill_at = table.get("kill_at", KILL_AT)
    if isinstance(kill_at, bool) or not isinstance(kill_at, int | float) or not 0 < kill_at <= 1:
        raise BadInput(f"{where} kill_at: expected a share of its memory such as 0.95, got {kill_at!r}")
    cards = tuple(_card(card, f"{where} card {i}") for i, card in enumerate(_tables(table, "card", where), 1))
    used = _size(table, "used", where)
    host = Host(name, cards, _size(table, "ram", where), used, float(kill_at), _maybe_text(table, "address", where))
    if host.limit_bytes is not None and host.limit_bytes < 0:
        raise BadInput(f"{where}: expected used memory below {kill_at:g} of ram, got {table['used']} of {table['ram']}")
    return host


def _card(table: Mapping[str, Any], where: str) -> BoxCard:
    _check_keys(table, _CARD_KEYS, where, "card")
    uuid = _text(table, "uuid", where)
    if not _UUID.fullmatch(uuid):
        raise BadInput(
            f"{where} uuid: expected all of a card's UUID, GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, got {uuid!r}; "
            "`nvidia-smi -L` prints it",
            hint="an index changes with the order in which cards are found, and the engine refuses a shortened UUID",
        )
    capability, memory = _maybe_text(table, "capability", where), _size(table, "memory", where)
    if "card" not in table and (memory is None or capability is None):
        got = ", ".join(table)
        raise BadInput(f"{where}: expected card, or memory and capability, got {got}; `fit gpus` lists cards")
    try:
        card = find_card(_text(table, "card", where) if "card" in table else str(table["memory"]), capability)
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}", hint=error.hint) from None
    if memory is not None:
        card = card._replace(total_bytes=memory, source="as given", margin_bytes=0, estimated=False)
    return BoxCard(uuid, card, _size(table, "used", where) or 0)


def _seats(table: Mapping[str, Any], where: str, hosts: set[str]) -> list[Seat]:
    name = _text(table, "name", where)
    where = f"{where} ({name})"
    pinned = table.get("hosts", [])
    pinned = [pinned] if isinstance(pinned, str) else pinned
    for host in pinned:
        if host not in hosts:
            raise BadInput(f"{where} hosts: expected hosts of this box, got {host!r}{_meant(str(host), hosts)}")
    spread = table.get("spread")
    if spread not in (None, *SPREADS):
        raise BadInput(f"{where} spread: expected {' or '.join(map(repr, SPREADS))}, got {spread!r}")
    count = table.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise BadInput(f"{where} count: expected a number of seats, got {count!r}")
    fields, words, reasons = _options(table, where)
    try:
        deployment = deployment_from(fields)
    except BadInput as error:
        raise BadInput(f"{where}: {error.message}") from None
    seat = Seat(
        name, _text(table, "checkpoint", where), _maybe_text(table, "commit", where), deployment, tuple(pinned), spread,
        words, reasons, name,
    )  # fmt: skip
    return [seat] if count == 1 else [seat._replace(name=f"{name}-{i}") for i in range(1, count + 1)]


def _options(table: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Deployment fields, words to hand on, and what is not modelled, of a seat's engine options: keys of the seat,
    of its `args` table, or words in an `args` list."""
    args = table.get("args", {})
    if not isinstance(args, Mapping | list):
        raise BadInput(f"{where} args: expected a table of options or a list of words, got {args!r}")
    given = {key: value for key, value in table.items() if key not in _SEAT_KEYS}
    given |= args if isinstance(args, Mapping) else {}
    fields: dict[str, Any] = {}
    handed: list[str] = []
    unmodelled: list[str] = []
    words = [_word(key.replace("_", "-"), value) for key, value in given.items()]
    for word in [*words, *(_joined(args) if isinstance(args, list) else [])]:
        key = word.partition("=")[0].lstrip("-")
        try:
            read, reasons, strays = parse_arguments([word])
        except BadInput as error:
            near = "" if key in _FLAGS else _meant(key, _SEAT_KEYS, 0.7)
            raise BadInput(f"{where}: {error.message}{near}", hint=error.hint) from None
        if strays:
            raise BadInput(f"{where} args: expected options, got {strays[0]!r}")
        fields |= read
        unmodelled += reasons
        if not read:
            handed.append(word)
    return fields, tuple(handed), tuple(unmodelled)


def _word(key: str, value: Any) -> str:
    """A TOML key and value as the engine's own word: `--max-model-len=262144`. A switch that is off is its `no-`."""
    if isinstance(value, bool):
        off = key.removeprefix("no-") if key.startswith("no-") else f"no-{key}"
        if not value and key in _FLAGS and off not in _FLAGS:
            return f"--{key}=false"
        return f"--{key}" if value else f"--{off}"
    if isinstance(value, Mapping | list):
        return f"--{key}={json.dumps(value)}"
    return f"--{key}={value}"


def _joined(words: Sequence[Any]) -> list[str]:
    """Words of a command line with each option's value joined to it."""
    joined: list[str] = []
    for word in map(str, words):
        if word.startswith("-") or not joined or "=" in joined[-1]:
            joined.append(word)
        else:
            joined[-1] += f"={word}"
    return joined


def _check_keys(table: Mapping[str, Any], keys: Sequence[str], where: str, what: str) -> None:
    for key in table:
        if key not in keys:
            near = _meant(key, keys) or f"; keys are {', '.join(keys)}"
            raise BadInput(f"{where} {key}: expected a key of a {what}, got none{near}")


def _meant(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    near = get_close_matches(word.replace("_", "-"), list(known), n=1, cutoff=cutoff)
    return f"; is {near[0]!r} meant?" if near else ""


def _tables(table: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    found = table.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(each, Mapping) for each in found):
        raise BadInput(f"{where}: expected one [[{key}]] or more, got {'none' if found is None else repr(found)[:80]}")
    return found


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise BadInput(f"{where} {key}: expected a text, got {'nothing' if value is None else repr(value)}")
    return value


def _maybe_text(table: Mapping[str, Any], key: str, where: str) -> str | None:
    return _text(table, key, where) if key in table else None


def _size(table: Mapping[str, Any], key: str, where: str) -> int | None:
    if key not in table:
        return None
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadInput(f"{where} {key}: expected a size such as '71.2GiB', got {value!r}")
    try:
        return parse_size(str(value))
    except BadInput as error:
        raise BadInput(f"{where} {key}: {error.message}") from None


def _distinct(names: Sequence[str], where: str, what: str) -> None:
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise BadInput(f"{where}: expected each {what} once, got {twice[0]!r} {names.count(twice[0])} times")
