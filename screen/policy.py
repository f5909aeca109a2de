"""What a user wants of a checkpoint: a flat table of keys, from a TOML file, each of them also a flag."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import date
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError

from formulas.errors import BadInput
from formulas.facts import Document
from formulas.units import parse_size

from .readme import Topic


def _words(value: Any) -> Any:
    """A list as TOML has it, or the words of a flag separated by commas."""
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    try:
        return parse_size(value) if isinstance(value, str) else value
    except BadInput as error:
        raise ValueError(error.message) from None  # the form in which pydantic adds the key


# The titles are what an error says was expected.
Words = Annotated[tuple[str, ...] | None, BeforeValidator(_words), Field(title="a list of words")]
Size = Annotated[int | None, BeforeValidator(_bytes), Field(ge=0, title="a size such as 20GiB")]
Count = Annotated[int | None, Field(ge=0, title="a whole number")]
Day = Annotated[date | None, Field(title="a day as YYYY-MM-DD")]
Permit = Literal["allow", "deny"]
_TOPICS = ", ".join(get_args(Topic))
Topics = Annotated[tuple[Topic, ...] | None, BeforeValidator(_words), Field(title=f"words among {_TOPICS}")]


def _key(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


class Policy(Document):
    """Every key, its default, and what it asks. Words may hold `*`: `fp8*` is every FP8 format."""

    licences: Words = _key(None, "licences allowed, as the card spells them")
    deny_licences: Words = _key(None, "licences refused")
    changed_after: Day = _key(None, "last change on this day or later (YYYY-MM-DD)")
    max_age_days: Count = _key(None, "last change at most so many days ago")
    gated: Permit = _key("allow", "repos that ask for an access request")
    scan: Literal["ignore", "not-unsafe", "clean"] = _key(
        "not-unsafe", "the Hub's security scan: not-unsafe refuses what it flags, clean wants it finished"
    )
    min_size: Size = _key(None, "weight files take at least so much, as 20GiB")
    max_size: Size = _key(None, "weight files take at most so much, as 140GiB")
    duplicates: Literal["drop", "keep"] = _key("drop", "byte-identical copies of an earlier candidate")
    architectures: Words = _key(None, "architectures allowed")
    deny_architectures: Words = _key(None, "architectures refused")
    model_types: Words = _key(None, "model types allowed")
    deny_model_types: Words = _key(None, "model types refused")
    remote_code: Permit = _key("allow", "checkpoints that need code from their repo")
    methods: Words = _key(None, "quantisation methods allowed; none = not quantised")
    deny_methods: Words = _key(None, "quantisation methods refused")
    formats: Words = _key(None, "weight formats allowed: nvfp4, fp8_block128, mxfp4, int4*, bf16")
    deny_formats: Words = _key(None, "weight formats refused")
    dtypes: Words = _key(None, "dtypes allowed in the main stack: BF16, U8, F8_E4M3")
    deny_dtypes: Words = _key(None, "dtypes refused in the main stack")
    experts: Count = _key(None, "experts a layer of the full model; fewer is a pruned model")
    mtp: Literal["any", "required", "forbidden"] = _key("any", "tensors of the MTP head (the drafter)")
    mtp_dtypes: Words = _key(None, "dtypes allowed in the MTP head")
    max_mtp: Size = _key(None, "the MTP head takes at most so much, as 6GiB")
    ple_formats: Words = _key(None, "formats allowed for the per-layer embedding table: fp8, bf16, none")
    undeclared_table: Permit = _key("allow", "an FP8 table whose config does not declare it")
    unindexed: Permit = _key("allow", "tensors that the index does not name")
    unloadable: Permit = _key("deny", "missing scales, half-quantised fused layers, a wrong ignore list")
    card_states: Topics = _key(None, "what its card must state: base-model, quantisation, evaluation, protocol...")
    card_refuses: Topics = _key(None, "what its card must not state: patched, pruned")
    unplaced: Permit = _key("deny", "modules that the reference of --like lacks, or has and the candidate lacks")


KEYS = tuple(Policy.model_fields)


def parse_policy(text: str, *, name: str, flags: Mapping[str, Any]) -> Policy:
    """The policy in a TOML text, each key overridden by the flag of that name where one was given.

    Raises BadInput naming the key, what was expected, and for a misspelt key the nearest one.
    """
    try:
        stated = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{name}: expected TOML, got something else ({error})") from None
    for key in stated.keys() - Policy.model_fields.keys():
        near = get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
        raise BadInput(f"{name}: expected a policy key, got {key!r}; nothing was screened", hint=hint)
    given = {key: value for key, value in flags.items() if value is not None}
    try:
        return Policy(**{**stated, **given})
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        where = f"--{key.replace('_', '-')}" if key in given else f"{name}: {key}"
        value = given.get(key, stated.get(key))
        raise BadInput(
            f"{where}: expected {_expected(key)}, got {value!r:.100}; nothing was screened",
            hint=f"{key}: {Policy.model_fields[key].description}",
        ) from None


def _expected(key: str) -> str:
    """What a key's value may be, for a sentence."""
    field = Policy.model_fields[key]
    return field.title or " or ".join(get_args(field.annotation))
