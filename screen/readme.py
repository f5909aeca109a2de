"""What a model card states, by topic, with the words it is stated in. A card answers, it decides nothing.

Only what is said counts, by the words such cards use; a topic no sentence was found for is *not found*, and a card may
still speak of it in other words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import yaml

Topic = Literal["base-model", "quantisation", "evaluation", "protocol", "repeats", "byte-audit", "patched", "pruned"]
PROVENANCE: tuple[Topic, ...] = ("base-model", "quantisation", "evaluation", "protocol", "repeats", "byte-audit")
"""What says where a checkpoint comes from and how well it was looked at."""
WARNINGS: tuple[Topic, ...] = ("patched", "pruned")
"""What makes a checkpoint another thing than its name says."""
_LONGEST_QUOTE = 160
_LONGEST_LINE = 2000  # characters of a line that are searched
_LONGEST_FRONT = 2**18


class Card(NamedTuple):
    """The statements of a card: quotes by topic, each topic that was found and no other."""

    stated: Mapping[Topic, tuple[str, ...]]

    def first(self, topic: Topic) -> str | None:
        """The first quote on a topic."""
        quotes = self.stated.get(topic)
        return quotes[0] if quotes else None


def parse_readme(text: str) -> tuple[dict[str, Any], str]:
    """(front matter, body). Front matter that is not YAML, or no mapping, is {}."""
    match = re.match(r"---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", text, re.DOTALL)
    if match is None:
        return {}, text
    try:
        front = yaml.safe_load(match[1]) if len(match[1]) <= _LONGEST_FRONT else None
    except (yaml.YAMLError, ValueError, RecursionError):
        front = None
    return (front if isinstance(front, dict) else {}), text[match.end() :]


def read_card(front: Mapping[str, Any], body: str) -> Card:
    """What the front matter and the body state. `front` may be what the Hub's API says it is."""
    found: defaultdict[Topic, list[str]] = defaultdict(list)
    for topic, quote in (*_front(front), *_body(body)):
        quote = " ".join(quote.split())
        if quote not in found[topic]:
            found[topic].append(quote if len(quote) <= _LONGEST_QUOTE else f"{quote[: _LONGEST_QUOTE - 3]}...")
    return Card({topic: tuple(found[topic][:3]) for topic in (*PROVENANCE, *WARNINGS) if topic in found})


# Front matter


def _front(front: Mapping[str, Any]) -> Iterator[tuple[Topic, str]]:
    bases = front.get("base_model")
    for base in bases if isinstance(bases, list) else [bases]:
        if isinstance(base, str) and base:
            relation = front.get("base_model_relation")
            yield "base-model", f"{base} ({relation})" if isinstance(relation, str) else base
    tags = front.get("tags")
    for tag in tags if isinstance(tags, list) else []:
        if isinstance(tag, str) and _FORMAT.fullmatch(tag):
            yield "quantisation", f"tag {tag}"
        if isinstance(tag, str) and re.fullmatch(r"(?i)reap|pruned|pruning|expert-pruning", tag):
            yield "pruned", f"tag {tag}"
    yield from (("evaluation", result) for result in _results(front.get("model-index")))


def _results(index: Any) -> Iterator[str]:
    """The results of the metadata's model-index: data set, metric and value.
    Source: https://huggingface.co/docs/hub/model-cards, "Evaluation Results"."""
    for model in index if isinstance(index, list) else []:
        results = model.get("results") if isinstance(model, Mapping) else None
        for result in results if isinstance(results, list) else []:
            if not isinstance(result, Mapping):
                continue
            data, metrics = result.get("dataset"), result.get("metrics")
            for metric in metrics if isinstance(metrics, list) else []:
                if isinstance(metric, Mapping) and isinstance(metric.get("value"), int | float):
                    name = data.get("name") if isinstance(data, Mapping) else None
                    yield f"{name or 'unnamed data set'} {metric.get('type') or 'score'} {metric['value']}"


# Body

_FORMATS = (
    r"(?:NVFP4|MXFP4|MXFP8|FP8|FP4|INT[248]|W\dA\d{1,2}|AWQ|GPTQ|AutoRound|auto-round|EXL[23]|GGUF|bitsandbytes|"
    r"[248]-bit)"
)
_FORMAT = re.compile(rf"(?i){_FORMATS}")
_QUANTISED = re.compile(
    rf"(?i)\bquanti[sz](?:ed|ation|ing)\b[^\n]*?\b{_FORMATS}\b|\b{_FORMATS}\b[^\n]*?\bquanti[sz](?:ed|ation|ing)\b"
)
_MADE_FROM = re.compile(
    r"(?i)\b(?:quanti[sz]ed|fine-?tuned|derived|converted|pruned|distilled)\b[^\n.]{0,40}?\b(?:from|of|version)\b"
    r"[^\n.]{0,20}?\b[\w-]+/[\w.-]+"
)
_PATCHED = re.compile(
    r"(?i)\b(?:requires?|needs?|must|only\s+(?:works?|loads?|runs?)|depends\s+on|apply|install)\b[^.\n]{0,80}?"
    r"\b(?:patch(?:ed)?\b(?!\s+size)|fork\b|custom\s+(?:build|branch|loader|kernel|image|engine)|unmerged|"
    r"modified\s+(?:vllm|sglang|transformers)|PR\s?#?\d{3,})|"
    r"\bpatched\s+(?:vllm|sglang|transformers|loader|engine|build|image)"
)
_PRUNED = re.compile(
    r"\bREAP\b|(?i:\bexperts?\s+(?:\w+\s+){0,3}(?:removed|dropped|pruned)\b|"
    r"\b(?:removed|dropped|pruned|pruning)\s+(?:\w+\s+){0,4}(?:experts?|layers?)\b|"
    r"\b\d+\s+(?:of|out of)\s+\d+\s+experts\b|\bpruned\s+(?:model|version|checkpoint)\b)"
)
_AUDIT = re.compile(
    r"(?i)\bsha-?256|\bbyte[- ](?:for[- ]byte|identical|equal|exact|audit)|\bbit[- ](?:exact|identical|for[- ]bit)|"
    r"\bbitwise\b|\bchecksums?\b"
)
_BENCHMARK = re.compile(
    r"\b(?:MMLU|GSM8?K|GPQA|HumanEval|MBPP|AIME|IFEval|LiveCodeBench|SWE-?[Bb]ench|ARC|HellaSwag|TruthfulQA|"
    r"Wino[Gg]rande|BBH|MATH|Arena-?Hard|MT-?Bench|BFCL|RULER|HLE|PPL|KLD|[Ww]iki[Tt]ext)|"
    r"(?i:\bperplexity\b|\bKL[- ]divergence\b)"
)
_SCORE = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d+|\s?%)")
_EVALUATED = re.compile(r"(?i)eval|benchmark|result|accuracy|quality|score")
_PROTOCOL = re.compile(
    r"(?i)\blm[-_ ]?eval|evaluation harness|\blighteval\b|\bevalscope\b|\bsimple-evals\b|\bevalplus\b|\bopencompass\b|"
    r"\b(?:zero|few|\d+)[- ]shots?\b|num_fewshot|\btemperature\b|\bgreedy\b|\bmax_(?:gen_toks|new_tokens|tokens)\b"
)
_REPEATS = re.compile(
    r"(?i)\b(?:\d+|two|three|four|five|six|eight|ten|sixteen)\s+(?:independent\s+)?"
    r"(?:runs|repeats|repetitions|seeds|trials)\b|"
    r"\b(?:avg|mean)@\d+|\baveraged?\s+(?:over|across)\b|±|\+/-|\bstandard\s+(?:deviation|error)\b|\bstderr\b"
)
_NOT = re.compile(
    r"(?i)\b(?:no|not|without|never|none|nothing|cannot|nor|isn't|doesn't|don't|aren't|wasn't)\b[^.;,]{0,40}$"
)
_ANYWHERE: tuple[tuple[Topic, re.Pattern[str]], ...] = (
    ("base-model", _MADE_FROM), ("quantisation", _QUANTISED), ("patched", _PATCHED), ("pruned", _PRUNED),
    ("byte-audit", _AUDIT),
)  # fmt: skip
_IN_EVALUATIONS: tuple[tuple[Topic, re.Pattern[str]], ...] = (("protocol", _PROTOCOL), ("repeats", _REPEATS))


def _body(body: str) -> Iterator[tuple[Topic, str]]:
    for heading, lines in _sections(body):
        blocks = list(_blocks(lines))
        for line in [heading, *lines]:
            for topic, pattern in _ANYWHERE:
                if (quote := _said(pattern, line)) is not None:
                    yield topic, quote
        scores = [block for block in blocks if _BENCHMARK.search(block) and _SCORE.search(block)]
        yield from (("evaluation", _row(block)) for block in scores)
        if not scores and not _EVALUATED.search(heading):
            continue  # a temperature to serve with is no protocol
        for line in lines:
            for topic, pattern in _IN_EVALUATIONS:
                if (quote := _said(pattern, line)) is not None:
                    yield topic, quote


def _sections(body: str) -> Iterator[tuple[str, list[str]]]:
    """(heading, lines below it), the text before the first heading under an empty one."""
    heading, lines = "", list[str]()
    fenced = False
    for line in (line[:_LONGEST_LINE] for line in body.splitlines()):
        fenced ^= line.lstrip().startswith("```")
        if re.match(r"#{1,6}\s", line) and not fenced:
            yield heading, lines
            heading, lines = line.lstrip("# "), []
        else:
            lines.append(line)
    yield heading, lines


def _blocks(lines: list[str]) -> Iterator[str]:
    """Tables whole, other lines one by one: a table's head and its numbers are on different lines."""
    table: list[str] = []
    for line in [*lines, ""]:
        if line.lstrip().startswith("|"):
            table.append(line)
            continue
        if table:
            yield "\n".join(table)
            table = []
        yield line


def _row(block: str) -> str:
    """The line of a table, or of the text, that has both or else the first score."""
    rows = block.splitlines()
    both = next((row for row in rows if _BENCHMARK.search(row) and _SCORE.search(row)), None)
    if both is not None:
        return both
    named, scored = (next(row for row in rows if pattern.search(row)) for pattern in (_BENCHMARK, _SCORE))
    return f"{named} {scored}"


def _said(pattern: re.Pattern[str], line: str) -> str | None:
    """The line where it says what the pattern looks for and no word before it denies that."""
    match = pattern.search(line)
    return None if match is None or _NOT.search(line[: match.start()]) else line.strip()
