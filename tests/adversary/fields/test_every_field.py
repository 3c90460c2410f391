"""A dishonest server sends each field of each message wrong: nothing leaves that was not told.

What was told is what an honest run tells. A lie is refused, or makes no difference to what can be
read: all replies in the clear are the honest ones, all sums of scores that have no mask left are
those of joined rows, and nobody else has the key of a mask or a seal.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.support import federated
from tests.support.peers import lying
from tests.support.peers.lying import Federation, Lie, Record
from tests.support.peers.told import foreign
from tp_flower.protocol.messages import Action

MASKED = {"scores", "batch-scores", "tested-scores", "share", "products", "masked"}
HIDDEN = {"sealed", "ledger", "public-key", "site-key", "digest"}
"""Fields of replies that are looked at as they are made, or are new in every run."""

ORDERS = 16
SQL = (
    "SELECT o.qty AS label, o.price, o.day, c.age, c.kind, i.cost, i.size FROM orders o "
    "JOIN customers c ON o.cust = c.id JOIN items i ON o.item = i.item"
)
MOST = 3
"""Lies of a field, besides those that follow from what it means."""


def customers(*ids: int) -> pd.DataFrame:
    columns = {"id": ids, "age": [20.0 + 7 * k * k for k in ids], "kind": [f"k{k % 2}" for k in ids]}
    return pd.DataFrame({**columns, "pay": [1.5 * k for k in ids]})


def tables() -> dict[str, dict[str, pd.DataFrame]]:
    rng, row = np.random.default_rng(3), np.arange(ORDERS)
    orders = {"cust": row % 8, "friend": row * 3 % 8, "item": row % 5}
    numbers = {name: rng.normal(size=ORDERS) for name in ("price", "qty", "salary")}
    items = {name: rng.normal(size=5) for name in ("cost", "size")}
    return {
        "shop": {"orders": pd.DataFrame({**orders, **numbers, "day": rng.integers(1, 29, ORDERS)})},
        "us": {"customers": customers(0, 1, 2, 3)},
        "uk": {"customers": customers(4, 5, 6, 7)},
        "lab": {"items": pd.DataFrame({"item": np.arange(5), **items})},
    }


RULES = 'min-rows = 3\nreleases = { models = "sealed", scores = "masked", statistics = "moments" }'
STRICT = {
    "orders": 'columns = ["price", "day", "cust", "item", "friend"]\nlabels = ["qty"]\n'
    f"most-unmatched = 0\n{RULES}",
    "customers": f"most-unmatched = 0\n{RULES}",
    "items": f"most-unmatched = 0\n{RULES}",
}
RUNS = {
    "cg": {"num_epochs": 2},
    "admm": {"num_epochs": 1},
    "sgd": {"num_epochs": 1, "batch_size": 8},
    "boost": {"num_epochs": 2},
}
FIRST = {
    "cg": [a for a in Action if a.startswith("query.") or a in ("train.prepare", "train.descent", "train.direction")],
    "admm": [Action.ADMM, Action.CONSENSUS],
    "sgd": [Action.SGD, Action.STEP],
    "boost": [Action.BOOST, Action.BAG],
}
"""The messages that are attacked in each run."""


@cache
def federation(folder: Path, kind: str) -> Federation:
    return Federation(folder / kind, tables(), STRICT if kind == "strict" else None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("sites")


@pytest.fixture(autouse=True)
def quick(monkeypatch, caplog):
    caplog.set_level("CRITICAL", "flwr")
    monkeypatch.setattr(os, "fsync", lambda _: None)


def run(name: str):
    return partial(federated.train, sql=SQL, method=name, **RUNS[name])


HONEST: dict[tuple[Path, str, str], Record] = {}


def honest_run(place, kind, name) -> Record:
    if (place, kind, name) not in HONEST:
        HONEST[place, kind, name] = record = federation(place, kind).run(run(name))
        assert not record.error
    return HONEST[place, kind, name]


def tried(honest: Record, actions: set[str]):
    """Return what each field of the first such request to each node could say instead."""
    seen: Counter[str] = Counter()

    def lies(action: str, node: int, packet):
        for field in lying.places(action, node, packet) if action in actions else ():
            seen[field.field] += 1
            most = {1: MOST, 2: 1}.get(seen[field.field], 0)
            is_special = field.field in lying.CHANGES or field.field in lying.WORDS
            for number, (what, change) in enumerate(lying.lies(field, packet, honest)):
                if number < most or (is_special and most):
                    yield Lie(field, what, change)

    return lies


def clear_facts(record: Record) -> dict[tuple, object]:
    """Return what left in the clear, by message, node, how many before, part and field."""
    seen: Counter[tuple[str, int]] = Counter()
    facts = {}
    for action, node, packet in record.replies:
        where = action, node, seen[action, node]
        seen[action, node] += 1
        if "error" in packet.header:
            continue
        for name, value in packet.header.items():
            if name == "parts":
                for own in value:
                    facts |= {(*where, own["id"], n): v for n, v in own.items() if n != "id"}
            elif name not in ("round", "seconds", "at"):
                facts[(*where, None, name)] = value
        for (part, name), array in packet.arrays.items():
            facts[(*where, part, name)] = array
    return facts


def kinds_of_hashes(record: Record) -> set[frozenset]:
    """Return which hashed keys of all tables are equal: the places of each value."""
    places = defaultdict(set)
    for action, node, packet in record.replies:
        if action != Action.EXTRACT:
            continue
        for (part, name), array in packet.arrays.items():
            if name.partition("/")[0] in ("hashes", "group-hashes"):
                for position, value in enumerate(np.asarray(array)):
                    places[value.tobytes()].add((part, name, position))
    return {frozenset(own) for own in places.values()}


def differences(honest: Record, record: Record, joined) -> Iterator[str]:
    """Yield what a run tells that the honest one does not."""
    told, before = record.told, honest.told
    for name, words in told.words.items():
        if name == "" and not before.words.get(""):
            yield f"{len(words)} scores in the clear"
        elif extra := foreign(words, joined):
            yield f"{extra} sums of scores {name!r} that are none of joined rows"
    owners = defaultdict(set)
    for source in (before,):
        for words in source.words.values():
            for word in words:
                for (key, _, _), _ in word.masks:
                    owners[word.row[0]].add(frozenset(source.keys[key]))
    for words in told.words.values():
        for word in words:
            for (key, _, _), _ in word.masks:
                if not any(told.keys[key] <= nodes for nodes in owners[word.row[0]]):
                    yield f"nodes {told.keys[key]} have the key of masks of part {word.row[0]}"
                    break
            else:
                continue
            break
    sizes = {size for calls in before.products.values() for _, size, _ in calls}
    for context, calls in told.products.items():
        if {size for _, size, _ in calls} - sizes or len({p for p, _, _ in calls}) < len(calls):
            yield f"{context} under masks of places {[call[:2] for call in calls]}"
    clear = any(not key for (key, *_), _ in before.shares)
    shares: dict[tuple, bytes] = {}
    for where, numbers in told.shares:
        if not where[0] and not clear:
            yield "a share in the clear"
        if shares.setdefault(where, numbers) != numbers:
            yield "two shares under one mask"
    of_shares = {frozenset(before.keys[key]) for (key, *_), _ in before.shares}
    for (key, *_), _ in told.shares:
        if key and not any(told.keys[key] <= nodes for nodes in of_shares):
            yield "another site has the key of a sealed sum"
    documents = {(document, part): frozenset(before.keys[k]) for k, document, part in before.sealed}
    for key, document, part in told.sealed:
        if not told.keys[key] <= documents.get((document, part), frozenset()):
            yield f"{document!r} of part {part} is sealed for {told.keys[key]}"
    if kinds_of_hashes(record) - kinds_of_hashes(honest):
        yield "which other keys are equal"
    yield from other_facts(honest, record)


def other_facts(honest: Record, record: Record) -> Iterator[str]:
    first = clear_facts(honest)
    for where, value in clear_facts(record).items():
        name = where[-1].partition("/")[0]
        if name in MASKED | HIDDEN or name in ("hashes", "row-hashes", "group-hashes", "subset"):
            continue
        if where not in first:
            yield f"{where}"
        elif not same(first[where], value):
            yield f"{where}: {first[where]!r:.60} is {value!r:.60}"


def same(one, other) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return one == other


@pytest.mark.parametrize("kind", ["default", "strict"])
@pytest.mark.parametrize("name", FIRST)
def test_a_lie_in_any_field_gains_nothing(place, kind, name):
    honest = honest_run(place, kind, name)
    joined = lying.joined_rows(honest)
    sent = federation(place, kind).run(run(name), tried=tried(honest, {str(a) for a in FIRST[name]}))
    assert not sent.error
    found = []
    for lie in sent.answered:
        record = federation(place, kind).run(
            run(name), {(lie.place.action, lie.place.node): [lie.change]}
        )
        if more := list(dict.fromkeys(differences(honest, record, joined))):
            found.append(
                f"{lie.place.field} at {lie.place.node} {lie.what}: {'; '.join(more[:4])} "
                f"[{record.error[:100]}]"
            )
    print(len(sent.refused), "refused", len(sent.answered), "answered")
    assert not found, "\n" + "\n".join(found)
