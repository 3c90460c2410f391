"""Small columns for the tests of encoders, and the way from shards to an encoder."""

from collections.abc import Mapping, Sequence

import numpy as np

from tp_flower.features import statistics
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.features.columns import (
    CategoricalColumn,
    FeatureColumn,
    NumericColumn,
    VectorColumn,
)
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.encodings import ABSENT, CategoryEncoding, categories_for
from tp_flower.features.fitting import fit
from tp_flower.features.spec import EncoderSpec
from tp_flower.features.statistics_codec import from_wire, to_wire
from tp_flower.keyed_hash import KeyedHasher, hex_texts
from tp_flower.protocol.codec import decode, encode
from tp_flower.protocol.packet import Packet, pack, unpack
from tp_flower.protocol.setup_messages import ShardStatistics, StatisticsOfPart

HASHER = KeyedHasher(bytes(range(32)))
Columns = Mapping[str, FeatureColumn]


def numeric(*values: float | None) -> NumericColumn:
    return NumericColumn(np.array([np.nan if v is None else v for v in values], float))


def categorical(*values: str | None) -> CategoricalColumn:
    names = sorted({v for v in values if v is not None})
    codes = [-1 if v is None else names.index(v) for v in values]
    return CategoricalColumn(np.array(codes, np.int32), tuple(names))


def vectors(*values: Sequence[float] | None, width: int = 2) -> VectorColumn:
    rows = [[np.nan] * width if row is None else row for row in values]
    return VectorColumn(np.array(rows, np.float32).reshape(-1, width))


def kind_of(column: FeatureColumn) -> str:
    if isinstance(column, NumericColumn):
        return "number"
    return "text" if isinstance(column, CategoricalColumn) else "vector"


def choice_of(columns: Columns, most: int = 256, **specs: str) -> TableChoice:
    entries = [("t", name, spec) for name, spec in specs.items()]
    for_trees = any(EncoderSpec.parse(spec).is_for_trees for spec in specs.values())
    return choose_encoders(entries, {"t": list(columns)}, most, for_trees=for_trees)[
        "t"
    ]


def statistics_of(
    choice: TableChoice,
    columns: Columns,
    counted: statistics.CountedRows | None = None,
    most: int = 0,
    **kinds: str,
) -> dict[str, statistics.ColumnStatistics]:
    """Statistics of a shard, as they arrive at the server."""
    found = {
        name: statistics.feature_statistics(
            choice,
            name,
            kinds.get(name, kind_of(column)),
            column,
            counted or statistics.CountedRows(HASHER),
        )
        for name, column in columns.items()
    }
    rows = most or max(column.rows for column in columns.values())
    arrived = received(unpack(pack(packet_of(to_wire(found)))))
    return from_wire(arrived, choice, rows)


def packet_of(part: StatisticsOfPart) -> Packet:
    """The packet in which a site sends the statistics of its only shard."""
    return encode(ShardStatistics({0: part}))


def received(packet: Packet) -> StatisticsOfPart:
    """The statistics that the server reads from such a packet."""
    return decode(ShardStatistics, packet).parts[0]


def encoder_of(
    *shards: Columns,
    most: int = 256,
    kinds: Mapping[str, str] | None = None,
    **specs: str,
) -> SiteEncoder:
    """The encoder fitted to shards, with the keys."""
    choice = choice_of(shards[0], most, **specs)
    found = [statistics_of(choice, shard, **(kinds or {})) for shard in shards]
    return fit("t", statistics.merge_tables(found)).for_site(HASHER)


def names_with_texts(encoder: SiteEncoder, columns: Columns) -> tuple[str, ...]:
    """The name of each encoded column, a category's by its text, as its site can."""
    names = list(encoder.encoder.feature_names)
    for encoding in encoder.encoder.encodings:
        if isinstance(encoding, CategoryEncoding):
            texts = categories_for(encoding, columns[encoding.name]).texts
            hashes = statistics.short_hashes(texts, encoder.keys[encoding.name])
            digits = hex_texts(hashes).to_pylist()
            text_of = dict(zip(digits, texts.to_pylist(), strict=True)) | {
                "f" * 32: ABSENT
            }
            start = names.index(encoding.feature_names[0])
            for place, category in enumerate(encoding.hashes, start):
                names[place] = f"{encoding.name}={text_of[category]}"
    return tuple(names)
