"""What a run with lies tells its server that the honest run does not.

Hidden facts are words, products, shares and documents whose masks, or whose keys, are
not those of the honest run; clear ones are fields of replies that are others.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.peers.lying import Record
from tests.support.peers.told import Row, Told, foreign
from tp_flower.protocol.messages import Action

MASKED = {
    "sums",
    "scores",
    "batch-scores",
    "tested-scores",
    "share",
    "products",
    "masked",
}
HIDDEN = {
    *(
        "sealed",
        "statement",
        "ledger",
        "ledger-end",
        "public-key",
        "site-key",
        "digest",
    ),
    "gradient-noise",
}
"""Fields of replies that are looked at as they are made, or are new in every run."""
KEYS = {"hashes", "codes", "group-hashes", "row-hashes", "subset"}
"""Those that follow from hashes under a new key: which are equal is compared."""
OF_THE_MODEL = {"mean-curvature", "largest-curvature", "score-sums", "coefficients"} | {
    *("total", "cost", "drawn")
}
"""Sums over rows, none of which counts for most, at whatever model the server's steps
make; and rows that are drawn at random."""

CATEGORIES = "categories"

Joined = set[frozenset[Row]]


def hidden_facts(honest: Record, record: Record, joined: Joined) -> Iterator[str]:
    """Yield what can be read although it should be masked or sealed, in words."""
    told = record.told
    before = honest.told
    yield from _sums(told, before, joined)
    yield from sorted(set(_keys_of_masks(told, before)))
    yield from _products(told, before)
    yield from sorted(set(_shares(told, before)))
    yield from _documents(told, before)
    yield from sorted(set(_moments(told, before)))
    if any(not any(own <= other for other in _equal(honest)) for own in _equal(record)):
        yield "which other keys are equal"


def _sums(told: Told, before: Told, joined: Joined) -> Iterator[str]:
    for name, words in told.words.items():
        if not name:
            if not before.words.get(name):
                yield f"{len(words)} scores in the clear"
        elif extra := foreign(words, joined):
            yield f"{extra} sums of scores {name!r} that are none of joined rows"


def _keys_of_masks(told: Told, before: Told) -> Iterator[str]:
    owners = defaultdict(set)
    for part, key in _masked_parts(before):
        owners[part].add(frozenset(before.keys[key]))
    for part, key in _masked_parts(told):
        if not any(told.keys[key] <= nodes for nodes in owners[part]):
            yield f"nodes {sorted(told.keys[key])} have the key of masks of part {part}"


def _masked_parts(told: Told) -> set[tuple[int, bytes]]:
    return {
        (word.row[0], key)
        for words in told.words.values()
        for word in words
        for (key, _, _), _ in word.masks
    }


def _products(told: Told, before: Told) -> Iterator[str]:
    sizes = {size for calls in before.products.values() for _, size, _ in calls}
    for context, calls in told.products.items():
        places = [place for place, _, _ in calls]
        if {size for _, size, _ in calls} - sizes or len(set(places)) < len(places):
            yield f"{context} under masks of places {[call[:2] for call in calls]}"


def _shares(told: Told, before: Told) -> Iterator[str]:
    owners = {frozenset(before.keys[key]) for (key, *_), _ in before.shares}
    is_clear = any(not key for (key, *_), _ in before.shares)
    shares: dict[tuple[Any, ...], bytes] = {}
    for where, numbers in told.shares:
        key = where[0]
        if not key and not is_clear:
            yield "a share in the clear"
        if key and not any(told.keys[key] <= nodes for nodes in owners):
            yield "another site has the key of a sealed sum"
        if shares.setdefault(where, numbers) != numbers:
            yield "two shares under one mask"


def _documents(told: Told, before: Told) -> Iterator[str]:
    owners = {
        (document, part): before.keys[key] for key, document, part in before.sealed
    }
    for key, document, part in told.sealed:
        if not told.keys[key] <= owners.get((document, part), set()):
            yield f"{document!r} of part {part} is sealed for {sorted(told.keys[key])}"


def _moments(told: Told, before: Told) -> Iterator[str]:
    """Yield the passes of which the server reads sums that weigh rows otherwise."""
    for (pass_name, pair), pads in told.pads.items():
        counts = [
            {
                place: rows
                for place, rows in run.multiplicity.items()
                if place[0] == pass_name
            }
            for run in (told, before)
        ]
        is_readable = not np.any(np.sum(pads, axis=0, dtype=np.uint64))
        if is_readable and counts[0] != counts[1]:
            yield f"moments {pair} of other rows in pass {pass_name!r}"


def _equal(record: Record) -> set[frozenset[Any]]:
    """Return which hashed keys of all tables are equal: the places of each value."""
    places = defaultdict(set)
    for action, _, packet in record.replies:
        for (part, name), array in (
            packet.arrays.items() if action == Action.EXTRACT else ()
        ):
            field, _, key = name.partition("/")
            if field == "hashes":
                for row, code in enumerate(packet.arrays[part, f"codes/{key}"]):
                    places[array[code].tobytes() if code >= 0 else b""].add(
                        (part, key, row)
                    )
            if field == "group-hashes":
                for value in np.asarray(array):
                    places[value.tobytes()].add((part, field, 0))
    return {frozenset(own) for own in places.values()}


def clear_facts(honest: Record, record: Record) -> Iterator[str]:
    """Yield the fields of replies that are in the clear and are not the honest
    run's.
    """
    first = _facts(honest)
    for where, value in _facts(record).items():
        name = where[-1].partition("/")[0]
        is_empty = isinstance(value, list | dict) and not value
        if is_empty or name in MASKED | HIDDEN | KEYS | OF_THE_MODEL:
            continue
        if where not in first:
            yield f"{where}"
        elif not np.array_equal(np.asarray(first[where]), np.asarray(value)):
            yield f"{where}: {first[where]!r:.60} is {value!r:.60}"


def _facts(record: Record) -> dict[tuple[Any, ...], Any]:
    """Return what left in the clear, by message, node, how many before, part and
    field.
    """
    seen: Counter[tuple[str, int]] = Counter()
    facts: dict[tuple[Any, ...], Any] = {}
    for action, node, packet in record.replies:
        where = action, node, seen[action, node]
        seen[action, node] += 1
        if "error" in packet.header:
            continue
        for name in packet.header.keys() - {"parts", "round", "seconds", "at"}:
            facts[(*where, None, name)] = packet.header[name]
        for own in packet.header.get("parts", ()):
            facts |= {
                (*where, own["id"], name): own[name] for name in own.keys() - {"id"}
            }
            if CATEGORIES in own:
                # their columns are in the order of hashes under a new key
                facts[(*where, own["id"], CATEGORIES)] = sorted(own[CATEGORIES])
        for (part, name), array in packet.arrays.items():
            facts[(*where, part, name)] = array
    return facts
