"""Scores of joined rows by a saved model, whose parts are at the sites."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from strategies.inference.manifest import (
    Manifest,
    Missing,
    ModelPart,
    model_parts,
    resolve,
)
from strategies.ranks import ask_ranks, asks_ranks
from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.replies import addends_of, array_of, bins_of
from strategies.run.sites import Inventory
from strategies.setup.columns import Columns
from strategies.setup.extract import Extracted, extract
from strategies.setup.masking import (
    ScoreMasking,
    check_masks,
    mask_scores,
    unmatched_rows,
)
from strategies.setup.problem import SCORES, LocalArray
from tp_flower.arrays import NO_BIN, AnyArray, BoolArray, FloatArray, IntArray
from tp_flower.errors import SettingsError
from tp_flower.features.bins import BinArray
from tp_flower.files import home_folder
from tp_flower.joins.joining import JoinStep, RowLimits, build_mapping
from tp_flower.joins.mapping import TableMapping, number_type
from tp_flower.joins.pairs import NO_REGION, TablePairs, pair_rows
from tp_flower.joins.rows import Vectors
from tp_flower.joins.spread_rows import joined_rows
from tp_flower.joins.workers import Workers
from tp_flower.learning.joint_trees import share_of
from tp_flower.learning.key_factors import add_products
from tp_flower.protocol.inference_messages import (
    DividePart,
    DivideRequest,
    ScorePart,
    ScoreRequest,
)
from tp_flower.protocol.packet import pack_bits
from tp_flower.protocol.rank_messages import RankPart, RankRequest
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings

STAND_IN: Final = "stand-in"  # the mean vectors of tables with missing sites


@dataclass(frozen=True)
class Joined:
    """The joined rows of a query, as far as the server knows them.

    Vectors over them are at the ``workers``, if there are some.
    """

    bound: BoundQuery
    extracted: Extracted
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    missing: Missing
    workers: Workers | None = None

    @property
    def is_partial(self) -> BoolArray:
        """(N,), joined rows that lack a row of a table with missing sites."""
        partial = np.zeros(self.mapping.joined_rows, np.bool_)
        for table in self.missing.joined_only(self.bound.label_table).sites:
            partial |= self.mapping.tables[table].is_absent
        return partial

    @cached_property
    def unmatched(self) -> Mapping[int, dict[str, AnyArray]]:
        """By part and by group, the rows that a LEFT JOIN finds no partner for."""
        return unmatched_rows(self.bound, self.extracted, self.mapping)

    @property
    def label_rows(self) -> IntArray:
        """(N,), the row of the label table behind each joined row."""
        rows = self.mapping.tables[self.bound.label_table]
        return rows.expand(np.arange(rows.rows, dtype=number_type(rows.rows)))

    @property
    def offset(self) -> FloatArray | None:
        """(N,), what the query adds to the scores of joined rows; None for nothing."""
        return self.extracted.offset_of(self.mapping.tables[self.bound.label_table])


def join_rows(
    bound: BoundQuery,
    columns: Columns,
    missing: Missing,
    settings: Settings,
    inventory: Inventory,
    workers: Workers | None = None,
) -> Generator[Requests, Replies, Joined]:
    """Run the fragments and return the joined rows."""
    extracted = yield from extract(bound, settings, inventory, columns)
    lacking = missing.joined_only(bound.label_table).sites
    rows = extracted.table_rows
    # if joined last, they change nothing in the joins without them
    mapping, steps = build_mapping(
        bound.joins,
        extracted.keys,
        {
            table: rows[table]
            for table in sorted(rows, key=lambda table: table in lacking)
        },
        bound.label_table,
        bound.outer,
        RowLimits(settings.max_joined_rows, settings.memory_bytes),
        filters=extracted.filters,
        answering=extracted.answering,
    )
    return Joined(bound, extracted, mapping, steps, missing, workers)


def score(
    joined: Joined,
    manifest: Manifest,
    settings: Settings,
    inventory: Inventory,
    whole: Joined | None = None,
) -> Generator[Requests, Replies, FloatArray]:
    """Return the scores of the joined rows by a saved model, (N, d_c).

    Of a model that was boosted from another, the other's are added. If they are some of
    the run's joined rows, ``whole`` has all: a row has a partner in a LEFT JOIN or none
    in all rounds of a run.
    """
    whole = whole or joined
    start = np.array(manifest.base_score)
    if manifest.start:
        first = resolve(home_folder(), manifest.start)
        start = yield from score(joined, first, settings, inventory, whole)
    all_parts = joined.extracted.all_parts
    part_numbers = model_parts(manifest, all_parts, inventory)
    # by part, which of its rows are in some joined row
    masks = {
        part.number: rows.is_joined[span]
        for table, rows in joined.mapping.tables.items()
        for part, span in joined.extracted.shards_of(table)
    }
    parts = [part for part in all_parts if masks[part.number].any()]
    pairs: Mapping[str, TablePairs] = {}
    if manifest.divided:
        pairs = yield from _divide(joined, manifest, part_numbers, masks, settings)
    cover: dict[str, AnyArray] = {}
    if asks_ranks(inventory):
        cover = yield from _cover(manifest, part_numbers, masks, all_parts)
    head = manifest.scorer
    unit = manifest.score_unit
    check_masks(type(head), settings)
    tables = len(joined.bound.tables)
    masking = mask_scores(settings, tables, unit, lambda: whole.unmatched)
    request = ScoreRequest(
        model_name=manifest.name,
        model_version=manifest.model_version,
        privacy=PrivacyTerms.of(settings.privacy),
        masking=masking.terms,
        device=settings.device,
        parts={
            part.number: ScorePart(
                model_part=part_numbers[part.number].number,
                digest=part_numbers[part.number].digest,
                rows=pack_bits(masks[part.number]),
                **_pair_fields(joined, part, pairs, masks[part.number]),
                unmatched=masking.unmatched.get(part.number, {}),
                cover=cover,
                takes_bins=bool(manifest.table(part.table).bins),
            )
            for part in parts
        },
    )
    replies = yield ask(request, parts)
    scored = joined
    if pairs:
        mapping = TableMapping({table: each.train for table, each in pairs.items()})
        scored = replace(joined, mapping=mapping)
    local = _gather(scored, replies, pairs, masks, head.width, masking)
    scores = _combine_tables(scored, manifest, start, local, masking)
    scores = _add_trees(scores, joined, manifest, replies, masks)
    # products were fitted to what tables and trees leave: no share of them counts
    return _add_products(scores, joined, manifest, replies, masks)


def _places(
    joined: Joined, table: str, masks: Mapping[int, BoolArray]
) -> Iterator[tuple[Part, IntArray]]:
    """Yield a table's shards with rows in some joined row, and where these rows are."""
    for part, span in joined.extracted.shards_of(table):
        places = span.start + np.flatnonzero(masks[part.number])
        if len(places):
            yield part, places


def _gather(
    joined: Joined,
    replies: Replies,
    pairs: Mapping[str, TablePairs],
    masks: Mapping[int, BoolArray],
    width: int,
    masking: ScoreMasking,
) -> dict[str, LocalArray]:
    """Return the vectors of each table's rows, or pairs; 0 in no joined row."""
    is_masked = masking.point is not None
    dtype = np.uint32 if is_masked else np.float64
    local: dict[str, LocalArray] = {}
    for table in joined.bound.tables:
        local[table] = np.zeros((joined.mapping.tables[table].rows, width), dtype)
        for part, span in joined.extracted.shards_of(table):
            if pairs:
                scored = pairs[table].of_rows(span)
            else:
                scored = span.start + np.flatnonzero(masks[part.number])
            if len(scored):
                shape = len(scored), width
                local[table][scored] = addends_of(
                    replies, part, "scores", shape, is_masked=is_masked
                )
    return local


def _divide(
    joined: Joined,
    manifest: Manifest,
    part_numbers: Mapping[int, ModelPart],
    masks: Mapping[int, BoolArray],
    settings: Settings,
) -> Generator[Requests, Replies, Mapping[str, TablePairs]]:
    """Return, by table, the pairs of rows and regions of the model's divided table.

    Raises:
        SettingsError: a site of the divided table is missing.
    """
    divided = manifest.divided
    if divided in joined.missing.joined_only(joined.bound.label_table).sites:
        raise SettingsError(
            f"model {manifest.model} reads regions of table {divided!r}, a site of "
            "which is missing: no mean stands in for them; wait for it"
        )
    shards = list(_places(joined, divided, masks))
    request = DivideRequest(
        model_name=manifest.name,
        model_version=manifest.model_version,
        device=settings.device,
        parts={
            part.number: DividePart(
                model_part=part_numbers[part.number].number,
                digest=part_numbers[part.number].digest,
                rows=pack_bits(masks[part.number]),
            )
            for part, _ in shards
        },
    )
    replies = yield ask(request, [part for part, _ in shards])
    tables = joined.mapping.tables
    of_rows = np.full(tables[divided].rows, NO_REGION, np.uint8)
    for part, places in shards:
        regions = array_of(replies, part, "regions", (len(places),))
        of_rows[places] = part_numbers[part.number].first_region + regions
    of_joined = tables[divided].expand(of_rows, absent=NO_REGION)
    return {
        table: pair_rows(
            rows,
            None,
            (of_joined, of_joined),
            [span.stop for _, span in joined.extracted.shards_of(table)],
        )
        for table, rows in tables.items()
    }


def _pair_fields(
    joined: Joined, part: Part, pairs: Mapping[str, TablePairs], is_joined: BoolArray
) -> dict[str, AnyArray]:
    """Return the pairs that stand for a part's rows, if there are some."""
    if not pairs:
        return {}
    table = pairs[part.table]
    span = dict(joined.extracted.shards_of(part.table))[part]
    chosen = table.of_rows(span)
    position = np.cumsum(is_joined) - 1
    return {
        "pair_rows": position[table.rows[chosen] - span.start].astype(np.int32),
        "regions": table.regions[chosen],
    }


def _add_trees(
    scores: FloatArray,
    joined: Joined,
    manifest: Manifest,
    replies: Replies,
    masks: Mapping[int, BoolArray],
) -> FloatArray:
    """Return scores (N, d_c) with those of the model's trees of bins, if it has any."""
    trees = manifest.joint
    if trees is None:
        return scores
    base = np.array(manifest.base_score)
    of_tables = share_of(scores, base, manifest.tables_share)
    of_trees = trees.scores(_gather_bins(joined, manifest, replies, masks))
    total: FloatArray = of_tables + of_trees
    return total


def _gather_bins(
    joined: Joined,
    manifest: Manifest,
    replies: Replies,
    masks: Mapping[int, BoolArray],
) -> BinArray:
    """Return the bins of the joined rows (N, c), where the model's trees read some."""
    tables: dict[str, BinArray] = {}
    for entry in manifest.tables:
        if not entry.bins:
            continue
        rows = joined.mapping.tables[entry.table].rows
        numbers = np.full((rows, entry.bin_columns), NO_BIN, np.uint8)
        for part, places in _places(joined, entry.table, masks):
            shape = (len(places), entry.bin_columns)
            numbers[places] = bins_of(replies, part, shape, entry.bins)
        tables[entry.table] = numbers
    return joined.mapping.beside(tables, NO_BIN)


def _combine_tables(
    joined: Joined,
    manifest: Manifest,
    start: FloatArray,
    local: Mapping[str, LocalArray],
    masking: ScoreMasking,
) -> FloatArray:
    """Return the scores of the joined rows, from a ``start``, (N, d_c).

    Where a table lacks a row because sites are missing, its mean vector stands in.
    """
    head = manifest.scorer
    rows = joined_rows(joined.mapping, workers=joined.workers)
    rows.fill(SCORES, start)
    means = {
        table: np.array(manifest.table(table).mean_score)
        for table in joined.missing.joined_only(joined.bound.label_table).sites
    }
    if means:
        stand_in = joined.mapping.stand_in(means, by_table=head.needs_tables)
        rows.fill(STAND_IN, stand_in)

    def combine(stored: Vectors, words: AnyArray) -> tuple[Vectors, Sequence[float]]:
        vectors = masking.read(words)
        if means:
            vectors = vectors + stored[STAND_IN]
        return {SCORES: head.combine(stored[SCORES], vectors)}, ()

    rows.run(combine, local, by_table=head.needs_tables)
    return rows.whole(SCORES)


def _add_products(
    scores: FloatArray,
    joined: Joined,
    manifest: Manifest,
    replies: Replies,
    masks: Mapping[int, BoolArray],
) -> FloatArray:
    """Return scores (N, 1) with the products of two tables' factors, if it has any.

    A product is 0 where a joined row lacks a row of either table.
    """
    factors = {}
    for table in manifest.multiplied:
        name, width = table.table, table.factors
        factors[name] = np.zeros((joined.mapping.tables[name].rows, width))
        for part, places in _places(joined, name, masks):
            shape = (len(places), width)
            factors[name][places] = array_of(replies, part, "factors", shape)
    if not factors:
        return scores
    rows = joined_rows(joined.mapping, workers=joined.workers)
    rows.fill(SCORES, np.zeros(1))
    add_products(rows, factors)
    total: FloatArray = scores + rows.whole(SCORES)
    return total


def _cover(
    manifest: Manifest,
    model_parts: Mapping[int, ModelPart],
    masks: Mapping[int, BoolArray],
    parts: Sequence[Part],
) -> Generator[Requests, Replies, dict[str, AnyArray]]:
    """Return the statements of the parts about their rows, for each other's sites.

    Raises:
        SettingsError: a policy lets no more scores leave.
    """
    request = RankRequest(
        model_name=manifest.name,
        model_version=manifest.model_version,
        parts={
            part.number: RankPart(
                rows=pack_bits(masks[part.number]),
                model_part=model_parts[part.number].number,
                digest=model_parts[part.number].digest,
            )
            for part in parts
        },
    )
    ranks = yield from ask_ranks(request, parts)
    width = manifest.scorer.width
    for part, left in ranks.left.items():
        if left < width:
            raise SettingsError(
                f"the policy of table {part.table!r} at site {part.site!r} "
                f"(scores-per-rank) lets {left} more score vectors leave, and a "
                f"prediction takes {width}: ask its owner to raise "
                "scores-per-rank"
            )
    return ranks.cover
