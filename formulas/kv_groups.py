"""How the engine groups caches: layers of a group share a block table, and all groups draw blocks of one size.

Source: vllm 0.33.0 v1/core/kv_cache_planning.py (get_kv_cache_groups, unify_kv_cache_spec_page_size,
_get_kv_cache_groups_uniform_page_size, _get_packed_kv_cache_groups, _approximate_gcd); the group-size ratio by release
is in releases.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .kv_specs import Cached, Layout, Spec, SpecKind
from .releases import Rules


class Group(NamedTuple):
    """Caches that live in the same blocks. `padding` layers are paid for and hold nothing."""

    caches: tuple[Cached, ...]

    @property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(cached.spec for cached in self.caches)

    @property
    def bytes(self) -> int:
        """Bytes of one block of this group."""
        return sum(spec.page_bytes for spec in self.specs)


class Unplannable(Exception):
    """Pages that no rule makes equal; the engine refuses them too."""


def groups(layout: Layout, rule: Rules) -> tuple[Group, ...]:
    """The groups of a layout, in the engine's order. Raises Unplannable where page sizes cannot be unified."""
    caches = layout.caches
    if not caches:
        return ()
    if _uniform(c.spec for c in caches):
        return (Group(caches),)
    if layout.block_outermost and len({c.spec.page_bytes for c in caches}) > 1:
        return _packed(caches)
    return _equal_pages(_unified(caches), rule.group_ratio)


def _uniform(specs: Iterable[Spec]) -> bool:
    """Whether layers always need the same number of blocks, so that one table serves them all."""
    return len({_family(spec) for spec in specs}) == 1


def _family(spec: Spec) -> tuple[object, ...]:
    if spec.kind in (SpecKind.FULL, SpecKind.MLA):
        return "full", spec.block_size
    if spec.kind is SpecKind.STATE:
        return spec.kind, spec.block_size, spec.speculative, spec.page_bytes, spec.replicated
    return spec.kind, spec.block_size, spec.window


def _unified(caches: Sequence[Cached]) -> list[Cached]:
    """Caches whose pages all have the size of the largest: by more tokens to a block, else by padding."""
    largest = max(c.spec.page_bytes for c in caches)
    return [Cached(c.layer, _grown(c.spec, largest)) for c in caches]


def _grown(spec: Spec, page: int) -> Spec:
    if spec.page_bytes == page:
        return spec
    if spec.kind is SpecKind.STATE:
        return spec._replace(page_bytes=page)
    if page % spec.page_bytes == 0:
        ratio = page // spec.page_bytes
        return spec._replace(
            block_size=spec.block_size * ratio, page_bytes=page, content_bytes=spec.content_bytes * ratio
        )
    if spec.kind is SpecKind.MLA:
        raise Unplannable(f"a latent page of {spec.page_bytes} bytes does not divide the largest page of {page}")
    return spec._replace(page_bytes=page)


def _equal_pages(caches: Sequence[Cached], ratio: float | None) -> tuple[Group, ...]:
    """Groups of equally many layers: as many as the rarest kind has, or as the commonest where they are close."""
    buckets: dict[Spec, list[Cached]] = {}
    for cached in caches:
        buckets.setdefault(cached.spec, []).append(cached)
    counts = [len(bucket) for bucket in buckets.values()]
    size = min(counts)
    if ratio is not None and max(counts) < size * ratio:
        size = max(counts)
    return tuple(
        Group(tuple(bucket[i::parts]))
        for bucket in buckets.values()
        for parts in [-(-len(bucket) // size)]
        for i in range(parts)
    )


def _packed(caches: Sequence[Cached]) -> tuple[Group, ...]:
    """Groups whose blocks hold pages of different sizes side by side; every group fits the widest one's block."""
    families: dict[tuple[object, ...], list[Cached]] = {}
    for cached in caches:
        families.setdefault(_family(cached.spec), []).append(cached)
    buckets = [_Bucket(tuple(members)) for members in families.values()]
    floor = max((b.repeats for b in buckets if b.balanced and len(b.by_page) > 1), default=0)
    per_group = _least_padding([b.repeats for b in buckets if b.balanced], floor) if floor else None
    anchor = max(b.widest(len(b.caches) if b.is_state(per_group) else b.parts(per_group)) for b in buckets)
    found: list[Group] = []
    for bucket in buckets:
        parts = bucket.parts(per_group)
        if bucket.is_state(per_group):
            fitting = max(anchor // bucket.caches[0].spec.page_bytes, 1)
            parts = max(parts, -(-len(bucket.caches) // fitting))
        found += bucket.split(parts)
    return tuple(found)


class _Bucket(NamedTuple):
    """Caches of one family, seen as repeats of one layer of each page size."""

    caches: tuple[Cached, ...]

    @property
    def by_page(self) -> dict[int, list[Cached]]:
        pages: dict[int, list[Cached]] = {}
        for cached in self.caches:
            pages.setdefault(cached.spec.page_bytes, []).append(cached)
        return pages

    @property
    def repeats(self) -> int:
        return Counter(c.spec.page_bytes for c in self.caches).most_common(1)[0][1]

    @property
    def balanced(self) -> bool:
        return len({len(members) for members in self.by_page.values()}) == 1

    def parts(self, per_group: int | None) -> int:
        return -(-self.repeats // per_group) if self.balanced and per_group else 1

    def is_state(self, per_group: int | None) -> bool:
        kind = self.caches[0].spec.kind
        return kind in (SpecKind.STATE, SpecKind.RING) or (per_group is None and kind is SpecKind.SLIDING)

    def widest(self, parts: int) -> int:
        """Bytes of the largest of `parts` groups of this bucket."""
        return sum(-(-len(members) // parts) * page for page, members in self.by_page.items())

    def split(self, parts: int) -> list[Group]:
        if parts == 1:
            return [Group(self.caches)]
        repeats = list(zip(*self.by_page.values(), strict=True))
        return [Group(tuple(c for repeat in repeats[i::parts] for c in repeat)) for i in range(parts)]


def _least_padding(counts: Sequence[int], floor: int) -> int:
    """The group size in [floor, max] that rounds the counts up least; the larger of two as good."""
    best = max(1, floor)
    pads = {d: sum(-n % d for n in counts) for d in range(best, max(counts) + 1)}
    return min(pads, key=lambda d: (pads[d], -d)) if pads else best
