"""The outcome of a run, from the replies to its last message."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from strategies.run.exchange import Part, Replies
from strategies.run.replies import array_of, refuse
from strategies.setup.problem import PreparedRun, TrainedTable
from tp_flower.arrays import FloatArray
from tp_flower.errors import ReplyError
from tp_flower.heads import Contribution

INTERCEPT: Final = "(intercept)"
GAIN: Final = "gain"  # of the splits by a feature


class DividedTable(NamedTuple):
    """The table whose regions the models of all others read.

    Attributes:
        first: by part of the table, the number of the shard's first region.
    """

    table: str
    first: Mapping[int, int]


@dataclass(frozen=True)
class Outcome:
    """The result of a run, besides its metrics.

    Digests identify the parts that sites keep, by number; "" for a site without a state
    folder, or without an answer. Coefficients are (d [+ 1], d_c) by table, if allowed,
    and so are statistics of them, by name; ``names`` are those of their columns, by
    table, where sites have sent some. The comparison is with a constant, and of
    predictions with labels. Where a table is ``divided``, models read its regions.
    ``factors`` are, by table, how many each key has.
    """

    digests: Mapping[int, str] = field(default_factory=dict)
    coefficients: Mapping[str, FloatArray] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    coefficient: str = ""
    statistics: Mapping[str, Mapping[str, FloatArray]] = field(default_factory=dict)
    contributions: Mapping[str, Contribution] = field(default_factory=dict)
    factors: Mapping[str, int] = field(default_factory=dict)
    comparison: Mapping[str, object] = field(default_factory=dict)
    divided: DividedTable | None = None

    def coefficients_entry(
        self, problem: PreparedRun
    ) -> dict[str, list[dict[str, object]]]:
        """Return the report's entry about the coefficients of the encoded features.

        For a standardised number they are per standard deviation. The output is a
        class, if there are several, or what ``coefficient`` says.
        """
        coefficients = {}
        for table, weights in self.coefficients.items():
            names = [*self.names.get(table, problem.encoders[table].names), INTERCEPT]
            # differences from a class have none of its own
            outputs = problem.head.columns(problem.classes)[-weights.shape[1] :]
            if self.coefficient:
                outputs = (self.coefficient,)
            values = {"value": weights, **self.statistics.get(table, {})}
            coefficients[table] = [
                {
                    "feature": names[row],
                    "output": outputs[column],
                    **{name: float(each[row, column]) for name, each in values.items()},
                }
                for row, column in np.ndindex(weights.shape)
            ]
        return coefficients


def read_digests(replies: Replies, parts: Iterable[Part]) -> dict[int, str]:
    """Return the digests that the sites report, by part."""
    bodies = {part.number: replies.parts.get(part.number) for part in parts}
    return {n: getattr(body, "digest", None) or "" for n, body in bodies.items()}


def coefficients_of(
    replies: Replies, table: TrainedTable, shape: tuple[int, int] | None
) -> FloatArray | None:
    """Return a table's coefficients of a shape, the mean over shards that show them.

    Shards that agree through statistics or gradients have equal coefficients. The shape
    is None if the model has none.
    """
    expected = shape or (table.width, table.outputs)
    blocks = [
        array_of(replies, part, "coefficients", expected).astype(np.float64)
        for part in table.parts
        if getattr(replies.parts.get(part.number), "coefficients", None) is not None
    ]
    if blocks and shape is None:
        raise ReplyError(f"table {table.name} sent coefficients; its model has none")
    return np.mean(blocks, axis=0) if blocks else None


def names_of(
    replies: Replies, table: TrainedTable, numbered: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of a table's columns, as sites show them with coefficients.

    A shard names what is in enough of its own rows. A column that none names keeps its
    number, of ``numbered`` (d,), and so do columns that would have one name. Shards
    encode alike, so those that name a column agree: where they do not, one of them
    departs from the protocol, and its coefficients may be of other columns too.

    Raises:
        ReplyError: names that no report can show, or on which shards disagree.
    """
    named: dict[int, tuple[str, Part]] = {}
    for part in table.parts:
        for position, name in enumerate(_names_of(replies, part, len(numbered))):
            if not name:
                continue
            first_name, other = named.setdefault(position, (name, part))
            if first_name != name:
                raise refuse(
                    part,
                    f"another name of column {numbered[position]} than site "
                    f"{other.site!r}: one of them departs from the protocol",
                )
    times = Counter([INTERCEPT, *(name for name, _ in named.values())])
    names = list(numbered)
    for position, (name, _) in named.items():
        if times[name] == 1:
            names[position] = name
    return tuple(names)


def _names_of(replies: Replies, part: Part, columns: int) -> list[str]:
    """Return the names that a part has sent of its columns, [] for none."""
    body = replies.parts.get(part.number)
    declared: list[str] = getattr(body, "names", None) or []
    of_values: list[str] = getattr(body, "categories", None) or []
    if not (declared or of_values):
        return []
    if getattr(body, "coefficients", None) is None:
        raise refuse(part, "names of columns without their coefficients")
    for names in (declared, of_values):
        if names and len(names) != columns:
            raise refuse(part, f"{len(names)} names of {columns} columns")
        if not all(map(str.isprintable, names)):
            raise refuse(part, "a name of a column that is not printable")
    unnamed = [""] * columns
    pairs = zip(of_values or unnamed, declared or unnamed, strict=True)
    return [one or other for one, other in pairs]


def score_sums_of(replies: Replies, table: TrainedTable) -> FloatArray | None:
    """Return the sums of a table's scores; None where a shard has not sent them."""
    bodies = (replies.parts.get(part.number) for part in table.parts)
    if any(getattr(body, "score_sums", None) is None for body in bodies):
        return None
    shape = (2, table.outputs)
    sums = [array_of(replies, part, "score_sums", shape) for part in table.parts]
    total: FloatArray = np.sum(sums, axis=0)
    return total
