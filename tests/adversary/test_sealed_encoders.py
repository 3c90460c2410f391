"""Encoders and statistics past the server: what it could read, swap or forge."""

import json
import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from client_apps.handlers import encoding
from strategies import Explain
from tests.support.federated import (
    Seen,
    WatchedGrid,
    on_requests,
    one_per_site,
    run_query,
    sharded,
    store,
    store_sql,
    train,
    whole,
)
from tests.support.peers.hostile import (
    ORDERS,
    SHOP,
    UK,
    UK_PART,
    US,
    US_PART,
    HostileGrid,
    arrays,
    change_of,
    shard_seal,
)
from tests.support.peers.hostile import train as train_hostile
from tests.support.peers.hostile_runs import check_all_refused, refused
from tp_flower.errors import SiteError
from tp_flower.features.statistics_codec import to_wire
from tp_flower.keyed_hash import hex_texts
from tp_flower.privacy.shard_seals import ENCODER, STATISTICS, ShardSeal, pad
from tp_flower.protocol.codec import encode
from tp_flower.protocol.packet import Packet, bytes_of, pack_bits
from tp_flower.protocol.setup_messages import ShardStatistics

SQL = store_sql("squared")
SITES = one_per_site(sharded(store()))
HOW = {"task": "regression", "num_epochs": 1}
ONE_TABLE = "SELECT age AS label, region, id FROM customers WHERE age IS NOT NULL"
ENCODERS = (
    ("o", "day", "standard"),
    ("c", "age", "bins(3) indicator"),
    ("i", "price", "min-max missing=mean"),
)
UNREADABLE = "the sealed (statistics|encoder) of part [0-9] cannot be opened"
FORGED = ShardSeal(bytes(32), "0" * 32, "o", (0, 1, 2))


def numbers_and_hashes(document: object) -> Iterator[float | str]:
    """Yield every number of a document that no other has by chance, and every hash."""
    if isinstance(document, dict | list | tuple):
        items = document.values() if isinstance(document, dict) else document
        for item in items:
            yield from numbers_and_hashes(item)
    elif isinstance(document, float) and math.isfinite(document):
        if len(repr(document)) > 9:
            yield document
    elif isinstance(document, str) and len(document) == 32:
        yield document


@pytest.fixture
def secrets(monkeypatch) -> set[float | str]:
    """The numbers and hashes of the encoders and statistics of all runs in a test."""
    collected: set[float | str] = set()

    def noted_fit(table, statistics):
        encoder = fit(table, statistics)
        collected.update(numbers_and_hashes(encoder.to_json()))
        return encoder

    def noted_wire(columns):
        sent = to_wire(columns)
        collected.update(numbers_and_hashes(encode(ShardStatistics({0: sent})).header))
        for hashes in sent.category_hashes.values():
            collected.update(hex_texts(hashes).to_pylist())
        return sent

    fit = encoding.fit
    monkeypatch.setattr(encoding, "fit", noted_fit)
    monkeypatch.setattr(encoding, "to_wire", noted_wire)
    return collected


def readings(value: float | str) -> Iterator[bytes]:
    """Yield the ways in which a message could hold a number or a hash."""
    if isinstance(value, str):
        yield value[:16].encode()
        yield np.frombuffer(bytes.fromhex(value), ">u8").astype("<u8").tobytes()
    else:
        yield repr(value).encode()
        yield np.float64(value).tobytes()


def content_of(seen: Seen) -> bytes:
    return json.dumps(seen.header).encode() + b"".join(
        array.tobytes() for array in seen.arrays.values()
    )


RUNS = {
    "whole": (whole, SQL, {}),
    "admm": (sharded, SQL, {}),
    "fitted": (sharded, SQL, {"encoders": ENCODERS}),
    "consensus": (sharded, SQL, {"lou": "consensus"}),
    "sgd": (sharded, SQL, {"method": "sgd", "batch_size": 20}),
    "coreset": (sharded, SQL, {"coreset_size": 20}),
    "personalised": (
        sharded,
        ONE_TABLE,
        {"method": "personalised", "test_fraction": 0.0},
    ),
    "explain": (sharded, SQL, {"method": Explain}),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_statistic_and_no_encoder_reaches_the_server(name, secrets):
    layout, sql, settings = RUNS[name]
    frames = store()
    frames["customers"]["region"] = [f"zanzibar-{k % 4}" for k in range(12)]
    how = {"method": "admm", **HOW, **settings}
    with WatchedGrid(one_per_site(layout(frames))) as grid:
        train(grid, sql, **how)
    contents = [content_of(seen) for seen in grid.seen]
    # in the clear a run would have shown all of them
    assert len(secrets) > 5
    for value in secrets:
        for reading in readings(value):
            assert not any(reading in content for content in contents), value
    # random names and keys hold eight digits of one of them in a run of 200,000
    hashes = [value[:8].encode() for value in secrets if isinstance(value, str)]
    assert sum(any(text in content for content in contents) for text in hashes) <= 1
    assert not any(b"zanzibar" in content for content in contents)
    fits = grid.sent("query.fit")
    assert len(fits) == (0 if layout is whole else len({s.node for s in fits}))
    assert bool(fits) == (layout is sharded)


def swapped(
    action: str, change: Callable[[Seen], object], match: str = UNREADABLE
) -> str:
    """Train with changed requests of one action; return the refusal."""

    with pytest.raises(SiteError, match=match) as caught:
        run_query(SQL, SITES, change=on_requests(action)(change), **HOW)
    return str(caught.value)


@pytest.fixture(scope="module")
def earlier() -> dict[str, dict]:
    """The sealed texts of a run with the same seed: in a simulation, the same keys."""
    finished = run_query(SQL, SITES, **HOW)
    return {
        action: finished.arrays(action) for action in ("query.fit", "train.prepare")
    }


def sealed_names(seen: Seen, prefix: str) -> list[tuple[int, str]]:
    return sorted(key for key in seen.arrays if key[1].startswith(prefix))


@pytest.mark.parametrize(
    ("action", "prefix"), [("query.fit", "statistics/"), ("train.prepare", "encoder")]
)
class TestSealedTexts:
    def test_of_another_run_are_refused(self, earlier, action, prefix):
        def replay(seen):
            for key in sealed_names(seen, prefix):
                seen.arrays[key] = earlier[action][key]

        assert action in swapped(action, replay)

    def test_of_another_table_are_refused(self, action, prefix):
        gathered: dict = {}

        def swap(seen):
            for key in sealed_names(seen, prefix):
                gathered[key] = seen.arrays[key]
                # one of the table before, in the same run
                others = [value for (n, _), value in gathered.items() if n != key[0]]
                seen.arrays[key] = others[0] if others else seen.arrays[key]

        # orders are parts 0 to 2 and led by 0, customers are led by part 3
        assert "table 'c'" in swapped(action, swap) or prefix == "encoder"

    @pytest.mark.cases(
        "changed-query.fit-statistics/",
        "made by the server-train.prepare-encoder",
        "empty-query.fit-statistics/",
    )
    @pytest.mark.parametrize(
        "change",
        [
            lambda text, _: np.append(text[:-1], text[-1] ^ 1),
            lambda _, document: FORGED.seal(b"{}", document, 0, ""),
            lambda *_: np.zeros(0, np.uint8),
        ],
        ids=["changed", "made by the server", "empty"],
    )
    def test_that_no_shard_has_sealed_are_refused(self, action, prefix, change):
        document = STATISTICS if prefix == "statistics/" else ENCODER

        def replace(seen):
            for key in sealed_names(seen, prefix):
                seen.arrays[key] = change(seen.arrays[key], document)

        swapped(action, replace)


def test_statistics_of_another_shard_are_refused():
    def exchange(seen):
        first, second = sealed_names(seen, "statistics/")[:2]
        swapped_texts = {first: seen.arrays[second], second: seen.arrays[first]}
        seen.arrays.update(swapped_texts)

    assert "statistics of part 0" in swapped("query.fit", exchange)


def test_statistics_for_other_shards_are_refused():
    """A shard that was left out of the list that the others were sent."""

    def forget(seen):
        for part in seen.header["parts"]:
            if part["shards"]["group"] == "table-0" and part["id"] > 0:
                part["shards"]["numbers"] = [0, 1]

    swapped("query.statistics", forget, "'shards': the run was proposed with ")


def test_an_encoder_in_place_of_statistics_is_refused():
    gathered = {}

    def keep(seen):
        if seen.action == "query.fit" and seen.is_reply:
            gathered.update(seen.arrays)
        if seen.action == "train.prepare" and not seen.is_reply:
            for key in sealed_names(seen, "encoder"):
                # statistics of the same table, sealed under the same key
                seen.arrays[key] = kept["statistics/0"]
        if seen.action == "query.fit" and not seen.is_reply and not kept:
            kept.update({name: array for (_, name), array in seen.arrays.items()})

    kept: dict = {}
    with pytest.raises(SiteError, match="sealed encoder of part 0 cannot be opened"):
        run_query(SQL, SITES, change=keep, **HOW)
    assert gathered


@pytest.mark.parametrize(
    ("action", "node", "change", "match"),
    [
        # the group of all sites, not of the table's
        (
            *("query.statistics", US, 'part.shards.group = "run"'),
            r"'shards' is .*\^table-",
        ),
        # a group that the site is not in
        (
            *("query.statistics", US, 'part.shards.group = "table-0"'),
            (
                "'shards': the run was proposed with .*'table-1'.* the request says "
                ".*'table-0'"
            ),
        ),
        ("query.fit", UK, "part.shards = {}", "it has no 'shards/1'"),
        ("train.prepare", US, f"{US_PART}/encoder gone", "it has no 'encoder'"),
    ],
    ids=["all sites", "another group", "no shards", "no encoder"],
)
def test_a_request_that_no_shard_answers(tmp_path, action, node, change, match):
    assert re.search(match, refused(tmp_path, action, node, change_of(change)))


def test_a_table_in_one_shard_leads_nothing(tmp_path):
    def lead(action, node, packet):
        if action == "train.prepare" and node == SHOP:
            parts = {**packet.header, "parts": [{"id": ORDERS, "shards": {}}]}
            head = {n: parts[n] for n in ("run", "round", "after", "parts")}
            yield "lead", ("query.fit", type(packet)(head, {}))

    grid = HostileGrid(tmp_path, lead)
    train_hostile(grid)
    (answer,) = grid.answers
    answer.check_nothing_left()
    assert "part 0 has no statistics of a table in several shards" in answer.error


@pytest.mark.parametrize(("node", "part"), [(SHOP, ORDERS), (US, US_PART)])
def test_encoders_are_fitted_to_one_choice_of_rows(tmp_path, node, part):
    """The columns of two encoders would tell how the rows between them differ."""

    def again(action, at, packet):
        if action in ("query.fit", "train.prepare") and at == node:
            rows = (
                np.arange(len(np.unpackbits(asked[0].arrays[part, "trained"]))) % 5 > 0
            )
            counts = np.ones(np.count_nonzero(rows), np.int32)
            fewer = arrays(part, trained=pack_bits(rows), multiplicity=counts)(asked[0])
            here = {name: packet.header[name] for name in ("run", "round", "after")}
            header = {**fewer.header, **here}
            yield "again", ("query.statistics", type(packet)(header, fewer.arrays))
        if action == "query.statistics" and at == node:
            asked.append(packet)

    asked: list = []
    grid = HostileGrid(tmp_path, again, policies={"orders": "min-rows = 1"})
    train_hostile(grid)
    check_all_refused(
        grid.answers, "another request has already fitted this run's encoders"
    )


def with_hostile_shard(folder, action, node, names, change, **settings) -> str:
    """Train beside a shard that seals another text; return the refusal."""
    document, shard = names

    def resealed(asked, at, packet):
        if (asked, at) != (action, node):
            return packet
        seal = shard_seal(grid, UK, UK_PART)
        replaced = dict(packet.arrays)
        for key in packet.arrays:
            if key[1] in (document, f"{document}/{shard}"):
                text = change(seal.open(packet.arrays[key], document, shard))
                replaced[key] = seal.seal(text, document, shard, "")
        return type(packet)(packet.header, replaced)

    grid = HostileGrid(folder, instead=resealed)
    with pytest.raises(SiteError) as caught:
        train_hostile(grid, **settings)
    return str(caught.value)


def edited(**changes):
    """Change the document of an encoding, the first that has these parameters."""

    def change(text: bytes) -> bytes:
        document = json.loads(text)
        fitting = (e for e in document["encodings"] if changes.keys() <= e.keys())
        next(fitting).update(changes)
        return json.dumps(document).encode()

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (edited(scale=0.0), "malformed encoder: .*'age': centre, scale, fill or limit"),
        (edited(hashes=["x"]), "'kind': the categories are not hashes"),
        (edited(name="salary"), "feature 'salary' is not among the shard's: age, kind"),
        (lambda _: b"{}", "encoder has version None"),
        (lambda _: b"[" * 10_000, "'encoder' is malformed"),
        (lambda _: b"\x00", "'encoder' is malformed"),
    ],
)
def test_an_encoder_of_a_hostile_shard_is_checked(tmp_path, change, match):
    names = ENCODER, UK_PART
    text = with_hostile_shard(tmp_path, "train.prepare", US, names, change)
    assert re.search(match, text)


def statistics_with(**changes):
    """Another shard's statistics, whose first feature is changed so."""

    def change(_: bytes) -> bytes:
        feature = {"name": "age", "kind": "number", "rows": 3, "count": 3}
        first = {**feature, "mean": 0.0, "m2": 1.0, **changes}
        parts = [{"id": US_PART, "statistics": [first] * changes.pop("times", 2)}]
        return bytes_of(Packet({"parts": parts}))

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (statistics_with(count=4), "'age': count must be a whole number from 0 to 3"),
        (statistics_with(m2=-1.0), r"allowed: `float` >= 0.0 - at `\$.statistics\[0\]"),
        (statistics_with(), "statistics of feature 'kind' are not in place|'age'"),
        (lambda _: b"", "'text' is malformed"),
        (lambda _: b"\x93\xc0\xc0\xc0", "'text' is malformed"),
        (lambda _: bytes_of(encode(ShardStatistics({}))), "it has no 'part'"),
    ],
)
def test_statistics_of_a_hostile_shard_are_checked_by_the_leading_one(
    tmp_path, change, match
):
    names = STATISTICS, US_PART
    text = with_hostile_shard(tmp_path, "query.fit", UK, names, change)
    assert "the statistics of site 'us' cannot be used: " in text
    assert re.search(match, text)


def seal(**changes) -> ShardSeal:
    fields = {"key": bytes(32), "run": "r", "table": "t", "shards": (0, 2)}
    return ShardSeal(**{**fields, **changes})


@given(st.binary(max_size=5000), st.sampled_from([STATISTICS, ENCODER]))
def test_what_is_sealed_is_opened_in_its_place_alone(text, document):
    sealed = seal().seal(text, document, 2, "digest")
    assert seal().open(sealed, document, 2) == text
    # answered again it is the same bytes, and no text is like the answer to another
    assert (seal().seal(text, document, 2, "digest") == sealed).all()
    assert (seal().seal(text, document, 2, "another")[:12] != sealed[:12]).any()
    other_document = {STATISTICS: ENCODER, ENCODER: STATISTICS}[document]
    for elsewhere, place in (
        (seal(), (document, 0)),
        (seal(), (other_document, 2)),
        (seal(key=bytes(31) + b"1"), (document, 2)),
        (seal(run="s"), (document, 2)),
        (seal(table="u"), (document, 2)),
        (seal(shards=(0, 1, 2)), (document, 2)),
    ):
        with pytest.raises(SiteError, match="cannot be opened"):
            elsewhere.open(sealed, *place)


@given(st.integers(0, 1 << 22))
def test_a_length_is_told_within_an_eighth(size):
    padded = len(pad(bytes(size)))
    assert size < padded
    assert padded - size <= max(1024, size / 8 + 1)
    assert padded % 1024 == 0
    assert len(pad(bytes(max(size - 1, 0)))) <= padded
