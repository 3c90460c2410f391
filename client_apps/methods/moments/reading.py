"""The label's site as the reader of the second moments, in place of the server.

The server brings blocks of words (:mod:`tp_flower.methods.moments.reading.label_site`).
The site takes its pads off, compares the checks, solves, and seals every table's
parameters for the table's sites. It tells the server how well the model does.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Final, overload

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.privacy.ledger_entries import note_scope
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import MessageError, SiteError
from tp_flower.methods.moments.messages import (
    SIGNIFICANT_DIGITS,
    PaddedBlocks,
    PassMetrics,
    SolvedBlocks,
    SolveReply,
    SolveRequest,
)
from tp_flower.methods.moments.penalties import (
    TOLERANCE,
    Fit,
    Penalty,
    chosen_fit,
    fit_path,
    violation,
)
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.reading.label_site import (
    ALTERED_BLOCKS,
    ReaderPads,
    check_weights,
    checked_widths,
    read_blocks,
)
from tp_flower.methods.moments.settings import label_site_reads
from tp_flower.methods.moments.solve import JoinedMoments
from tp_flower.methods.moments.terms import PASS_NAMES, TRAINED, tree_of
from tp_flower.methods.moments.tree import Pair
from tp_flower.methods.moments.words import LEAST_BITS, MOST_BITS, WordArray
from tp_flower.privacy.shard_seals import ShardSeal
from tp_flower.protocol.codec import parse
from tp_flower.terms.groups import label_group

SITE_MOMENTS: Final = "site-moments"
MOMENT_METRICS: Final = "moment-metrics"
"""What the ledger calls the moments that the label's site reads, and what it tells."""

_READING: Final = "moments-reading"  # entry of the label's site: what it reads with
_SOLVED: Final = "moments-solved"  # entry: the request that was answered
_BITS: Final = "bits"
_PARAMETERS: Final = "parameters"
_SCOPE: Final = (
    "not covered: half the mean square and R2 of the model and of a constant, in six "
    "digits, the penalty that rows which validate have chosen, and the magnitude of "
    "the label"
)


@dataclass(frozen=True)
class LabelReading:
    """What a site shares with the label's, in a run whose moments that one reads."""

    site: Site

    @property
    def is_asked(self) -> bool:
        """Whether the run is one of these."""
        return label_site_reads(self.site.terms.settings)

    @cached_property
    def label_part(self) -> int:
        """The number of the part of the label's table.

        Raises:
            SiteError: the table has several shards.
        """
        proposal = self.site.terms.proposal
        parts = sorted(proposal.shards_of(proposal.label_table))
        if len(parts) > 1:
            raise SiteError(
                "moments-to: the label's table has several shards, and one site reads "
                "the moments: set moments-to = 'server'"
            )
        return parts[0]

    @property
    def site_name(self) -> str:
        """The name of the label's site."""
        return repr(self.site.terms.proposal.parts[self.label_part].site)

    @property
    def pads(self) -> ReaderPads:
        """The pads of the label's site, which is this one."""
        return ReaderPads(self.site.private_hasher().purpose("moments reader").secret)

    def weights(self, table: str, columns: int) -> WordArray:
        """Return the weights of a table's check, (d,)."""
        return check_weights(self._key(table), table, columns)

    def seal_bits(self, number: int, bits: IntArray) -> AnyArray:
        """Return the bits (d,) of a part's columns, sealed for the label's site."""
        seal = self._seal(self.site.terms.proposal.parts[number].table)
        text = bits.astype("<i8").tobytes()
        return seal.seal(text, _BITS, number, self.site.round.digest)

    def open_bits(self, number: int, sealed: AnyArray, columns: int) -> IntArray:
        """Return the bits (d,) of another part's columns."""
        table = self.site.terms.proposal.parts[number].table
        text = self._seal(table).open(sealed, _BITS, number)
        bits = np.frombuffer(text, "<i8").astype(np.int64)
        if len(bits) != columns or ((bits < LEAST_BITS) | (bits > MOST_BITS)).any():
            raise SiteError(f"the bits of table {table!r} are not of its columns")
        return bits

    def seal_parameters(self, table: str, parameters: FloatArray) -> AnyArray:
        """Return the parameters of a table's model, sealed for its sites."""
        text = parameters.astype("<f8").tobytes()
        digest = self.site.round.digest
        return self._seal(table).seal(text, _PARAMETERS, self.label_part, digest)

    def open_parameters(self, table: str, sealed: AnyArray) -> FloatArray:
        """Return the parameters of the model of a table of this site, (p,)."""
        text = self._seal(table).open(sealed, _PARAMETERS, self.label_part)
        return np.frombuffer(text, "<f8").astype(np.float64)

    def keep(
        self,
        layout: ColumnLayout,
        bits: IntArray,
        rows: Mapping[int, int],
        classes: int,
    ) -> None:
        """Store at the label's site what it will read the moments with.

        Args:
            layout: of the columns.
            bits: of the label's table, (d,).
            rows: by pass, the weight of its joined rows.
            classes: of the label.
        """
        meta = {
            "columns": dict(layout.columns),
            "outputs": layout.outputs,
            "passes": list(rows),
            "classes": classes,
        }
        weights = np.array(list(rows.values()), np.int64)
        self.site.store.save(_READING, Entry({_BITS: bits, "rows": weights}, meta))

    @property
    def kept(self) -> Entry:
        """What was stored; MessageError at another site, or before the moments."""
        if not self.site.store.has(_READING):
            raise MessageError("this site does not read the moments of this run")
        return self.site.store.load(_READING)

    def _key(self, table: str) -> bytes:
        return self.site.group_key(label_group(self.site.terms.proposal, table))

    def _seal(self, table: str) -> ShardSeal:
        """Return the seals between the sites of a table and the label's."""
        proposal = self.site.terms.proposal
        parts = tuple(sorted({self.label_part, *proposal.shards_of(table)}))
        return ShardSeal(self._key(table), self.site.run, f"label and {table}", parts)


@dataclass(frozen=True, eq=False)
class ReadMoments:
    """The moments of every pass, as the label's site has read them.

    Attributes:
        classes: of the label.
    """

    layout: ColumnLayout
    by_pass: Mapping[int, JoinedMoments]
    classes: int

    @classmethod
    def of(cls, reading: LabelReading, body: PaddedBlocks) -> "ReadMoments":
        """Return the moments of the blocks that the server has brought.

        Raises:
            SiteError: they are not those of the sites' sums.
        """
        kept = reading.kept
        proposal = reading.site.terms.proposal
        tables = parse(proposal, "proposal", tree_of).tables
        widths: Mapping[str, int] = kept.meta["columns"]
        columns = {table: widths[table] for table in tables}
        layout = ColumnLayout(columns, proposal.label_table, int(kept.meta["outputs"]))
        weights = {table: reading.weights(table, columns[table]) for table in tables}
        bits = {proposal.label_table: kept.arrays[_BITS]}
        bits |= _bits_of_others(reading, body, columns)
        moments = {}
        for number, rows in zip(kept.meta["passes"], kept.arrays["rows"], strict=True):
            blocks = _blocks_of(body, number, columns)
            read = read_blocks(blocks, reading.pads, PASS_NAMES[number], weights)
            moments[number] = layout.moments(layout.matrix(read, bits))
            if not moments[number].are_of(int(rows)):
                raise SiteError(ALTERED_BLOCKS)
        return cls(layout, moments, int(kept.meta["classes"]))

    @property
    def trained(self) -> JoinedMoments:
        """Those of the training rows."""
        return self.by_pass[TRAINED]

    def parameters(self, fit: Fit) -> dict[str, FloatArray]:
        """Return the parameters of every table's model, (p,), by a penalised fit."""
        solution = fit.solution
        if self.classes:
            solution = self.trained.discriminant(fit.penalty.l2)
        blocks = self.layout.parameters(solution)
        return {table: block.ravel() for table, block in blocks.items()}

    def metrics(self, fit: Fit) -> dict[str, PassMetrics]:
        """Return what the server is told of a fit, by pass."""
        constant = self.trained.constant()
        told = {}
        for number, moments in self.by_pass.items():
            fitted = moments.metrics(fit.solution)
            of_constant = moments.metrics(constant)
            told[str(number)] = PassMetrics(
                loss=_rounded(fitted["loss"]),
                r2=_rounded(fitted.get("r2")),
                constant_loss=_rounded(of_constant["loss"]),
                constant_r2=_rounded(of_constant.get("r2")),
            )
        return told

    @property
    def magnitude(self) -> int | None:
        """The power of two above the label's root mean square; None for classes."""
        if self.classes:
            return None
        (label,) = self.layout.labels
        square = self.trained.matrix[label, label] / self.trained.joined_rows
        return math.frexp(math.sqrt(max(square, 0.0)))[1]


def solve(site: Site, request: SolveRequest) -> SolveReply:
    """Read the moments, solve, and seal the tables' parameters for their sites.

    One request of a run is answered: of two the server would learn how what it is told
    differs.
    """
    reading = LabelReading(site)
    # at another site, or too early, there is nothing to read with
    _ = reading.kept
    site.check_once(_SOLVED, "this run's moments have been read, and are read once")
    number = reading.label_part
    agree("parts", [number], sorted(request.parts))
    moments = ReadMoments.of(reading, request.parts[number])
    settings = site.terms.settings
    asked = Penalty(settings.l1, settings.l2)
    fit = chosen_fit(fit_path(moments.trained, moments.by_pass, asked), asked)
    for part, _ in site.each(request.parts):
        note_scope(site, part, MOMENT_METRICS, _SCOPE)
    site.store.save(_SOLVED, Entry({}, {REQUEST: site.round.digest}))
    solved = SolvedBlocks(
        sealed={
            str(position): reading.seal_parameters(table, parameters)
            for position, (table, parameters) in enumerate(
                moments.parameters(fit).items()
            )
        },
        metrics=moments.metrics(fit),
        l1=fit.penalty.l1,
        l2=fit.penalty.l2,
        magnitude=moments.magnitude,
        is_optimal=not asked.l1 or violation(moments.trained, fit) <= TOLERANCE,
    )
    return SolveReply(parts={number: solved})


def _bits_of_others(
    reading: LabelReading, body: PaddedBlocks, columns: Mapping[str, int]
) -> dict[str, IntArray]:
    """Return the bits (d,) of the columns of all tables but the label's."""
    parts = reading.site.terms.proposal.parts
    others = {n: part.table for n, part in parts.items() if n != reading.label_part}
    agree("sealed_bits", sorted(map(str, others)), sorted(body.sealed_bits))
    bits: dict[str, IntArray] = {}
    for number, table in others.items():
        sealed = body.sealed_bits[str(number)]
        of_part = reading.open_bits(number, sealed, columns[table])
        if not np.array_equal(bits.setdefault(table, of_part), of_part):
            raise SiteError(f"the shards of table {table!r} have different bits")
    return bits


def _blocks_of(
    body: PaddedBlocks, number: int, columns: Mapping[str, int]
) -> dict[Pair, WordArray]:
    """Return the blocks of a pass by pair of tables, each of the right shape."""
    tables = list(columns)
    widths = checked_widths(columns)
    blocks = {}
    for first, second in combinations_with_replacement(tables, 2):
        name = f"{number}-{tables.index(first)}-{tables.index(second)}"
        block = body.products.get(name)
        if block is None or block.shape != (widths[first], widths[second]):
            raise MessageError(
                f"array 'products/{name}' is missing, or of another size"
            )
        blocks[first, second] = block
    return blocks


@overload
def _rounded(value: float) -> float: ...
@overload
def _rounded(value: None) -> None: ...
def _rounded(value: float | None) -> float | None:
    """Return a number in as many digits as the server is told."""
    return None if value is None else float(f"{value:.{SIGNIFICANT_DIGITS}g}")
