"""Agreement of a table's shards on the type of a column and the format of its times.

A database or a Parquet file declares the types of its columns, a text file does not:
its site lists the readings that fit all texts of a column. All shards must have one
kind of values; those whose days are written in one of several formats take the one that
most shards can take.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.run.sites import HostedShard
from tp_flower.errors import SchemaError
from tp_flower.extraction.select_plan import kind_of
from tp_flower.protocol.text_readings import AS_TEXT, DAY_FORMATS, ISO, TextReading

Place = tuple[int, int]
"""A shard: its node, and its position there."""

_PREFERENCE = (ISO, *DAY_FORMATS)


@dataclass(frozen=True)
class ShardColumn:
    """A column at one shard, by the name that it has there."""

    shard: HostedShard
    name: str

    @property
    def place(self) -> Place:
        """The node and the position of the shard."""
        return self.shard.node, self.shard.position

    @property
    def type(self) -> str:
        """The type of its values, of texts by their best reading."""
        return self.shard.columns[self.name]

    @property
    def is_empty(self) -> bool:
        """Whether it has no value, so that its type must not count."""
        return self.name in self.shard.all_null

    @property
    def is_detected(self) -> bool:
        """Whether its type is not declared, but detected in a text file."""
        return self.name in self.shard.texts

    @property
    def readings(self) -> Sequence[TextReading]:
        """Those that fit all texts, besides the texts themselves."""
        return self.shard.texts[self.name].readings

    def of_kind(self, kind: str | None) -> list[TextReading]:
        """Return the readings of a kind."""
        if kind == "text":
            return [AS_TEXT]
        return [reading for reading in self.readings if kind_of(reading.type) == kind]


@dataclass(frozen=True)
class AgreedColumn:
    """A column as all shards of its table read it.

    Attributes:
        type: of the first shard with values.
        readings: by shard, where its type is detected and it has values.
        format: of the days that most shards have; "" for ISO 8601, and for other types.
        other_formats: fit the same texts, but as other days.
        merges_as: the type in which distinct texts of some shard are equal values; ""
            for none.
    """

    type: str
    readings: Mapping[Place, TextReading]
    format: str = ISO
    other_formats: tuple[str, ...] = ()
    merges_as: str = ""


def agree_on_column(
    column: Sequence[ShardColumn], required: TextReading | None = None
) -> AgreedColumn:
    """Return a column as all shards of a table read it: as ``wanted`` if all texts fit.

    A SchemaError names two shards whose values are of different kinds.
    """
    valued = [item for item in column if not item.is_empty]
    if not valued:
        # a column without any value is what it should be
        return AgreedColumn(column[0].type if required is None else required.type, {})
    kind = _kind(valued, required)
    detected = [item for item in valued if item.is_detected]
    options = {item.place: item.of_kind(kind) for item in detected}
    for item in valued:
        fits = options[item.place] if item.is_detected else kind_of(item.type) == kind
        if not fits:
            raise _conflict(valued)
    groups = list(_groups(detected, options, required))
    readings = {
        position: reading
        for group in groups
        for position, reading in group.readings.items()
    }
    first = valued[0]
    return AgreedColumn(
        type=readings[first.place].type if first.is_detected else first.type,
        readings=readings,
        format=groups[0].format if groups else ISO,
        other_formats=tuple(
            dict.fromkeys(f for group in groups for f in group.other_formats)
        ),
        merges_as=next(
            (i.type for i in detected if i.shard.texts[i.name].merge_texts), ""
        ),
    )


def _kind(valued: Sequence[ShardColumn], required: TextReading | None) -> str | None:
    """Return the kind of values that the shards shall have; a declared type decides."""
    declared = {kind_of(item.type) for item in valued if not item.is_detected}
    if required is not None:
        kind = kind_of(required.type)
        detected = (item for item in valued if item.is_detected)
        if declared <= {kind} and all(item.of_kind(kind) for item in detected):
            return kind
    if declared:
        return next(iter(declared))
    return kind_of(valued[0].type)


def _conflict(valued: Sequence[ShardColumn]) -> SchemaError:
    """Return the error about two shards whose columns differ in kind."""
    first = valued[0]
    other = next(item for item in valued if kind_of(item.type) != kind_of(first.type))
    return SchemaError(
        f"table {first.shard.table!r}: column {first.name!r} is {first.type} at site "
        f"{first.shard.site!r} and {other.type} at site {other.shard.site!r}; declare "
        "its type in the tables file (types = { ... })"
    )


@dataclass(frozen=True)
class _Group:
    """Shards that write the days of a column in one format."""

    format: str
    other_formats: tuple[str, ...]
    readings: Mapping[Place, TextReading]


def _groups(
    detected: Sequence[ShardColumn],
    options: Mapping[Place, Sequence[TextReading]],
    required: TextReading | None,
) -> Iterator[_Group]:
    """Yield the fewest groups of shards, the largest first."""
    remaining = list(detected)
    while remaining:
        by_place = {
            item.place: {reading.day_format: reading for reading in options[item.place]}
            for item in remaining
        }
        counts = Counter(listed for formats in by_place.values() for listed in formats)
        is_required = required is not None and required.day_format in counts
        if required is not None and is_required:
            chosen = required.day_format
        else:
            # the first of those that most shards have
            chosen = min(counts, key=lambda name: (-counts[name], _preference(name)))
        members = [item for item in remaining if chosen in by_place[item.place]]
        common = [
            name for name in counts if all(name in by_place[m.place] for m in members)
        ]
        is_ambiguous = any(
            item.shard.texts[item.name].are_ambiguous for item in members
        )
        other_formats: tuple[str, ...] = ()
        if is_ambiguous and not is_required:
            other_formats = tuple(name for name in common if name != chosen)
        yield _Group(
            format=chosen,
            other_formats=other_formats,
            readings={item.place: by_place[item.place][chosen] for item in members},
        )
        remaining = [item for item in remaining if item not in members]


def _preference(day_format: str) -> int:
    """Return the rank of a format; one that an owner has named comes first."""
    if day_format in _PREFERENCE:
        return _PREFERENCE.index(day_format)
    return -1
