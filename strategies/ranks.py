"""The round ``rank``: how many score vectors may leave, and what hides them.

It takes place where some table's policy asks for it. Each site says how many more score
vectors its policies let leave of the rows that take part, and seals a statement of how
much these vary for the other sites, which the server passes on with the first request
for scores.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import array_of
from strategies.run.sites import Inventory
from strategies.setup.encoding import TableEncoding
from strategies.setup.joined_rows import JoinedTables, TableLayout
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.features.ranks import LEAST_RANK
from tp_flower.protocol.fields import Document
from tp_flower.protocol.packet import pack_bits, unpack_bits
from tp_flower.protocol.rank_messages import RankedPart, RankPart, RankRequest
from tp_flower.reports.blocks import count_text


@dataclass(frozen=True)
class Ranks:
    """The sites' answers about the rows that take part.

    Attributes:
        left: score vectors, of the parts whose policies limit them.
        cover: by part, the sealed statements, as all sites get them.
    """

    left: Mapping[Part, int] = field(default_factory=dict)
    cover: dict[str, AnyArray] = field(default_factory=dict)

    @property
    def by_number(self) -> dict[int, int]:
        """The score vectors that are left, by part number."""
        return {part.number: left for part, left in self.left.items()}


@dataclass(frozen=True)
class ScoreForecast:
    """How many epochs' scores a part may release.

    Attributes:
        left: score vectors, of which the start of training takes ``first``.
        per_epoch: those of an epoch.
        columns: encoded ones, of the part's table.
    """

    part: Part
    left: int
    first: int
    per_epoch: int
    columns: int

    @property
    def epochs(self) -> int:
        """The number of epochs that are possible."""
        return max(self.left - self.first, 0) // self.per_epoch

    def report_entry(self) -> Document:
        """Return the entry of `score-vectors` in a report."""
        return {
            "table": self.part.table,
            "site": self.part.site,
            "left": self.left,
            "epoch": self.per_epoch,
            "epochs": self.epochs,
        }

    def __str__(self) -> str:
        return (
            f"the policy of table {self.part.table!r} at site {self.part.site!r} "
            f"(scores-per-rank) lets {self.left} more score vectors leave, and an "
            f"epoch takes {self.per_epoch}"
        )

    @property
    def refusal(self) -> str:
        """Why training needs more epochs than these, and what to do about it."""
        wider = "read more columns of the table that vary"
        raised = f"{wider}, or ask its owner to raise scores-per-rank"
        if self.epochs:
            return f"{self}: set num-epochs = {self.epochs} or less, {raised}"
        if self.left:
            return f"{self}: no epoch fits; read no feature of the table, {raised}"
        if self.columns < LEAST_RANK:
            reason = (
                f"the query reads {count_text(self.columns, 'encoded column')} of the "
                "table, and"
            )
        else:
            reason = "earlier runs have used them up, or its rows vary too little:"
        return (
            f"{self}: {reason} no scores leave of rows that vary in fewer than "
            f"{LEAST_RANK} directions (constants, copies and a column beside which "
            "little else varies do not count). Leave the table's features out of the "
            f"query, {wider}, or ask its owner to "
            'write scores-per-rank = "any", which sets no bound'
        )


def epochs_of(forecast: ScoreForecast) -> int:
    """Return the number of epochs that are possible, to order forecasts by."""
    return forecast.epochs


def asks_ranks(inventory: Inventory) -> bool:
    """Whether a policy limits scores by ranks, or asks for cover."""
    return any(shard.ranks for shard in inventory.shards)


def rank_rows(
    joined: JoinedTables, encoders: Mapping[str, TableEncoding]
) -> Generator[Requests, Replies, Ranks]:
    """Ask how much participating rows vary, as encoded by their tables' encoders."""
    bodies = {
        part.number: RankPart(
            rows=pack_bits(
                _participating_rows(layout, part, joined.extracted.rows[part.number])
            ),
            encoder=encoders[layout.name].sealed,
        )
        for layout in joined.layouts.values()
        for part in layout.parts
    }
    return (yield from ask_ranks(RankRequest(parts=bodies), joined.parts))


def ask_ranks(
    request: RankRequest, parts: Sequence[Part]
) -> Generator[Requests, Replies, Ranks]:
    """Send a request about all parts, and return the sites' answers."""
    replies = yield ask(request, parts)
    left = {part: replies.body(part, RankedPart).left for part in parts}
    return Ranks(
        {part: count for part, count in left.items() if count is not None},
        {
            str(part.number): array_of(replies, part, "statement", (None,))
            for part in parts
        },
    )


def _participating_rows(layout: TableLayout, part: Part, rows: int) -> BoolArray:
    """Return which rows of a shard take part, (rows,)."""
    fields = layout.fields[part.number]
    return unpack_bits(fields["trained"] | fields["tested"], rows)


def ends_early(method: str, usual_epochs: int, short: Sequence[ScoreForecast]) -> str:
    """Return a warning that policies allow fewer epochs than training takes.

    ``short`` are their forecasts, that of the fewest epochs first.
    """
    places: dict[tuple[int, str], list[str]] = {}
    for item in short[1:]:
        places.setdefault((item.epochs, item.part.table), []).append(item.part.site)
    others = ""
    for (fewest, table), sites in places.items():
        shards = ", ".join(map(repr, sites))
        epochs = count_text(fewest, "epoch")
        others += f"; that of {table!r} at {shards} allows {epochs}"
    return (
        f"training by {method} will end after {count_text(short[0].epochs, 'epoch')}, "
        f"most likely before its optimum, which usually takes about {usual_epochs}: "
        f"{short[0]}{others}. More columns that vary allow more epochs, and so may an "
        "owner who raises scores-per-rank"
    )
