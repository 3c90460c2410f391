"""The rows of a part in sums over joined rows, and what its site shares for the pads.

A request brings counts of the tuples behind each join; the site derives the joins from
the run's proposal, and works out from the counts in how many joined rows each of its
rows is, or what these weigh.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from client_apps.privacy.guard import check_rows, counts_evenly
from client_apps.privacy.keys import own_node
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, BoolArray, IntArray
from tp_flower.errors import PolicyError, SiteError
from tp_flower.extraction.extracted import ExtractedShard, KeyColumn
from tp_flower.features.encoder import SiteEncoder
from tp_flower.methods.moments.columns import TableColumns, most_told_rows
from tp_flower.methods.moments.counts import Codes, CountedRows, EdgeRows
from tp_flower.methods.moments.describe.settings import described
from tp_flower.methods.moments.exchange import (
    Contribution,
    EdgeSecret,
    RowWords,
    ShardMasks,
    SummedShard,
    ToldCounts,
)
from tp_flower.methods.moments.messages import (
    CountedPart,
    InformationPart,
    InformationRequest,
    MomentsRequest,
)
from tp_flower.methods.moments.terms import passes_without_partner, tree_of
from tp_flower.methods.moments.tree import JoinTree
from tp_flower.methods.moments.words import LEAST_BITS, column_bits, fits
from tp_flower.protocol.codec import check_sizes, parse, required
from tp_flower.terms.groups import join_group, table_group

if TYPE_CHECKING:
    from tp_flower.sources.shards import ShardSource

OTHERWISE: Final = "leave it out, or encode it otherwise"
AddNoise = Callable[[tuple[str, str], AnyArray], AnyArray]


@dataclass(frozen=True, eq=False)
class JoinedShard(ABC):
    """The rows of a part with the counts that a request brings.

    Attributes:
        passes: the numbers of the run's passes, or of its weightings.
    """

    site: Site
    number: int
    tree: JoinTree
    passes: tuple[int, ...]
    body: CountedPart | InformationPart

    @property
    @abstractmethod
    def splitting(self) -> str:
        """The table by whose rows joined rows are held out."""

    @property
    @abstractmethod
    def encoder(self) -> SiteEncoder:
        """The encoder of the table's features."""

    @abstractmethod
    def own_weights(self) -> IntArray:
        """Return the rows' own weights in every pass, (p, n); 0 or 1 without any."""

    @cached_property
    def table(self) -> str:
        """The alias of the table."""
        return self.site.terms.proposal.parts[self.number].table

    @property
    def has_label(self) -> bool:
        """Whether it is the label's table, to which the intercept belongs."""
        return self.table == self.site.terms.proposal.label_table

    @cached_property
    def extracted(self) -> ExtractedShard:
        """The rows."""
        return self.site.extracted(self.number)

    @cached_property
    def shards(self) -> list[int]:
        """The numbers of the table's shards, of which this is one."""
        return sorted(self.site.terms.proposal.shards_of(self.table))

    @cached_property
    def told(self) -> dict[int, ToldCounts]:
        """By join, the counts of the shards on both sides."""
        numbers = self.tree.edges_of(self.table)
        names = sorted(map(str, numbers))
        agree("incoming", names, sorted(self.body.incoming))
        agree("beside", names if len(self.shards) > 1 else [], sorted(self.body.beside))
        return {number: self._told(number) for number in numbers}

    def _told(self, number: int) -> ToldCounts:
        """Return the counts of the shards on both sides of a join, of checked size."""
        name = str(number)
        other = self.tree.edges[number].other(self.table)
        check_sizes(
            self.body,
            **{
                "passes": len(self.passes),
                f"keys-{name}": len(self._keys[number].hashes),
                f"across-{name}": len(self.site.terms.proposal.shards_of(other)),
                f"beside-{name}": len(self.shards),
            },
        )
        incoming = self.body.incoming[name]
        shape = (*incoming.shape[:2], len(self.shards))
        beside = self.body.beside.get(name, np.zeros(shape, np.int64))
        return ToldCounts(incoming, beside)

    @cached_property
    def rows(self) -> CountedRows:
        """All rows of the shard, with their counts."""
        return self.count_rows()

    def count_rows(self) -> CountedRows:
        """Return the rows, by the counts that the request brings."""
        edges = {
            number: EdgeRows(
                self._codes(number),
                told.incoming.sum(axis=-1),
                passes_without_partner(
                    self.tree, number, self.table, self.splitting, self.passes
                ),
            )
            for number, told in self.told.items()
        }
        return CountedRows(edges, self.own_weights())

    def _codes(self, number: int) -> Codes:
        """Return the position of each row's key of a join, (n,); -1 for NULL.

        Keys that the other side lacks are that of its answer about no rows, the last.
        """
        codes = self._keys[number].codes
        if not self._is_answered(number):
            return codes
        incoming = self.told[number].incoming
        is_lacking: BoolArray = incoming.sum(axis=(0, 2)) == 0
        answer = np.int32(incoming.shape[1] - 1)
        return np.where((codes >= 0) & is_lacking[codes], answer, codes)

    def _is_answered(self, number: int) -> bool:
        """Return whether the other side of a join answers for keys that it lacks."""
        return self.site.terms.answering_tables.get(number, self.table) != self.table

    @cached_property
    def masks(self) -> ShardMasks:
        """What the shard shares with the others of its table."""
        if len(self.shards) == 1:
            return ShardMasks()
        group = table_group(self.site.terms.proposal, self.table)
        place = self.shards.index(self.number)
        return ShardMasks(self.site.group_key(group), place, len(self.shards))

    @cached_property
    def _keys(self) -> dict[int, KeyColumn]:
        """By join, the keys of the rows, in the order in which the server has them."""
        join_keys = self.site.join_keys(self.number)
        groups = self.site.terms.extract_parts[self.number].key_groups
        keys = {}
        for number in self.tree.edges_of(self.table):
            position = self.tree.edges[number].key(self.table)
            hasher = self.site.join_hasher(groups[position])
            keys[number] = join_keys[position].hashed(hasher)
            if self._is_answered(number):
                keys[number] = keys[number].with_no_rows(hasher)
        return keys

    @cached_property
    def secrets(self) -> dict[int, EdgeSecret]:
        """What the site shares with the other ends of its joins."""
        return {
            number: EdgeSecret(
                self.site.group_key(join_group(number)), self._keys[number].hashes
            )
            for number in self.tree.edges_of(self.table)
        }

    def check_multiplicity(self, *, is_weighted: bool, shares_rows: bool) -> None:
        """Refuse sums over fewer rows than the table's policy asks for.

        Args:
            is_weighted: whether some joined rows may count more than others.
            shares_rows: whether one row below may be in the features of many.
        """
        source = self.site.source(self.number)
        purpose = f"the moments of table {self.table!r}"
        if shares_rows and self.has_windows:
            check_rows(source, 1, f"{purpose}, whose windows may all have one row,")
        for counts in self.rows.multiplicity:
            check_rows(source, int(np.count_nonzero(counts)), purpose)
            if is_weighted and not counts_evenly(counts, source.policy.min_rows):
                check_rows(source, 1, f"{purpose}, one of which weighs most")

    @property
    def has_windows(self) -> bool:
        """Whether features are of windows, which may all have one row of a table."""
        subquery = self.site.fragment(self.number).subquery
        return subquery is not None and bool(subquery.cutoffs or subquery.is_windowed)

    def column_bits(self, counts: AnyArray, columns: TableColumns) -> IntArray:
        """Return the bits of every column: those of its only shard, or as told to all.

        Columns that do not fit are refused.
        """
        second_moments = columns.second_moments(counts)
        if len(self.shards) == 1:
            least = np.full(columns.width, LEAST_BITS, np.int64)
            self.check_fits(second_moments, least)
            return column_bits(second_moments)
        bits = required(self.body.bits, "bits")
        check_sizes(self.body, columns=columns.width)
        self.check_fits(second_moments, bits)
        return bits

    def check_fits(self, second_moments: AnyArray, bits: IntArray) -> None:
        """Refuse columns whose sums of squares over the join (d,) might wrap around."""
        misfits = np.flatnonzero(~fits(second_moments, bits, len(self.shards)))
        if misfits.size:
            features = [_feature_of(self.encoder, n) for n in misfits.tolist()]
            names = dict.fromkeys(name or "the label" for name in features)
            raise SiteError(
                f"table {self.table}: the moments of {', '.join(names)} are out of "
                f"range: {self._scale_advice(dict.fromkeys(filter(None, features)))}"
            )

    def _scale_advice(self, features: Iterable[str]) -> str:
        """Return what gives the columns of these features, or the label, a scale."""
        ranges = [f"{self.table}.{name}=range(<low>, <high>)" for name in features]
        if ranges and described(self.site.terms.settings):
            return f"declare where numbers lie, encoders = '{'; '.join(ranges)}'"
        return "encode numbers as 'standard', or divide the label in the query"

    def padded(
        self, summed: SummedShard, names: Sequence[str], add_noise: AddNoise
    ) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
        """Return the padded sums and corrections of all passes, by name.

        ``names`` are those of the passes.
        """
        sums: dict[str, AnyArray] = {}
        products: dict[str, AnyArray] = {}
        for position, (number, name) in enumerate(zip(self.passes, names, strict=True)):
            tables, contribution = self.contribution(summed, position, name)
            for (edge, source), block in contribution.sums.items():
                sums[f"{number}-{edge}-{tables.index(source)}"] = block
            for (first, second), block in contribution.products.items():
                pair = f"{tables.index(first)}-{tables.index(second)}"
                products[f"{number}-{pair}"] = add_noise((first, second), block)
        return sums, products

    def contribution(
        self, summed: SummedShard, position: int, name: str
    ) -> tuple[tuple[str, ...], Contribution]:
        """Return what the part sends in a pass, and the tables that it is about."""
        return self.tree.tables, summed.in_pass(position, name).contribution()

    def summed(
        self,
        rows: CountedRows,
        words: RowWords,
        columns: Mapping[str, int],
        bits: Mapping[str, int],
        label_rows: Sequence[int] = (),
    ) -> SummedShard:
        """Return the part in the exchange, by rows that take part and their words."""
        return SummedShard(
            self.table,
            self.tree,
            rows,
            words,
            columns,
            self.told,
            self.secrets,
            self.masks,
            bits,
            label_rows=label_rows,
        )


def tree_of_sums(site: Site, request: MomentsRequest | InformationRequest) -> JoinTree:
    """Return the tree of the run's joins, along which a request's rows are added up.

    The request must name all of the site's parts, and every table's columns.
    """
    tree = parse(site.terms.proposal, "proposal", tree_of)
    node = own_node(site)
    at_site = [n for n, of in site.terms.proposal.parts.items() if of.node == node]
    # what the ledger says of one part depends on all
    agree("parts", sorted(at_site), sorted(request.parts))
    agree("columns", sorted(tree.tables), sorted(request.columns))
    return tree


def check_weightings(
    source: "ShardSource",
    rows: int,
    *,
    columns: int,
    weightings: int,
    shards: int,
    otherwise: str,
) -> None:
    """Refuse rows so few that sums of all ``columns``, so often, may tell them."""
    min_rows = source.policy.min_rows
    if shards > 1 or weightings == 1 or min_rows == 1:
        return
    if rows <= most_told_rows(weightings, columns):
        raise PolicyError(
            f"the table's policy (min-rows = {min_rows}) refuses: moments of {columns} "
            f"columns in {weightings} weightings may tell so few rows; use encoders of "
            f"fewer columns, {otherwise}"
        )


def check_columns(
    source: "ShardSource",
    encoder: SiteEncoder,
    columns: TableColumns,
    counts: IntArray,
    *,
    shards: int,
    advice: str = OTHERWISE,
) -> None:
    """Refuse a column that is the same in nearly all rows, and tables of hardly any.

    Both hold for the rows of every pass that count in it, ``counts`` (p, n); the
    label's columns are columns as others. The moments of a column with few nonzero rows
    are those rows; so are those of one with two values, less its common value times the
    others' sums. Of a table with no more rows than columns, moments are all of its
    rows, up to a rotation; in several shards the others' rows are added to them.
    """
    policy = source.policy
    for of_pass in counts:
        rows = np.flatnonzero(of_pass)
        if not len(rows):
            continue
        if policy.min_count > 1:
            odd = columns.odd_rows(rows)
            is_rare = (odd > 0) & (odd < policy.min_count)
            if is_rare.any():
                feature = _feature_of(encoder, int(np.argmax(is_rare)))
                what = "the label, or of a class of it"
                if feature:
                    what = f"column {feature!r}"
                raise PolicyError(
                    f"the table's policy (min-count = {policy.min_count}) refuses: "
                    f"moments of {what}, which is the same in all but fewer rows; "
                    f"{advice}"
                )
        is_alone = shards == 1 and policy.min_rows > 1
        if is_alone and columns.width >= len(rows):
            raise PolicyError(
                f"the table's policy (min-rows = {policy.min_rows}) refuses: moments "
                f"of {columns.width} columns of no more rows, which tell these rows; "
                "use encoders of fewer columns"
            )


def _feature_of(encoder: SiteEncoder, column: int) -> str:
    """Return the feature that a column is of; "" of the label's, beyond them."""
    features = encoder.encoder
    return features.feature_of(column) if column < features.width else ""
