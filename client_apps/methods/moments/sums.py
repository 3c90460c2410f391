"""A site's part in training from the second moments of the joined rows.

One message brings counts and takes padded sums back
(:mod:`tp_flower.methods.moments.exchange`); nothing is kept of it but the encoded rows.
A second one brings the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np

from client_apps.data.features import forget
from client_apps.data.run_store import Entry
from client_apps.handlers.column_names import keep_names
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.moments.reading import SITE_MOMENTS, LabelReading
from client_apps.methods.moments.shards import (
    OTHERWISE,
    JoinedShard,
    check_columns,
    check_weightings,
    tree_of_sums,
)
from client_apps.methods.moments.splits import TableSplit
from client_apps.methods.site_method import SiteMethod
from client_apps.operator.participant import Participant, ShardData, body_of
from client_apps.operator.releases import Releaser
from client_apps.operator.state import Stateless
from client_apps.privacy.guard import (
    RowsOfParts,
    check_model,
    counts_evenly,
    given_values,
)
from client_apps.privacy.ledger_entries import note_scope, release, set_aside
from client_apps.privacy.local_labels import is_label_covered, local_label_facts
from client_apps.privacy.proposal_checks import agree, check_begins, check_trained
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import AnyArray, BoolArray, FloatArray, IntArray
from tp_flower.errors import MessageError
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.sparse import EncodedRows
from tp_flower.learning.models.local_model import (
    LINEAR,
    LinearModel,
    ModelSpec,
    host_features,
)
from tp_flower.methods.moments import MOMENTS
from tp_flower.methods.moments.columns import ColumnWords, TableColumns
from tp_flower.methods.moments.counts import CountedRows, whole_weights
from tp_flower.methods.moments.describe.settings import check_cells, column_advice
from tp_flower.methods.moments.exchange import RowWords, SummedShard
from tp_flower.methods.moments.messages import (
    TRAIN_MOMENTS,
    CountedPart,
    MomentsReply,
    MomentsRequest,
    PaddedPart,
    SolutionReply,
    SolutionRequest,
    SolvedPart,
    TakenPart,
)
from tp_flower.methods.moments.noise import (
    LabelUnit,
    Norms,
    clip_columns,
    entry_deviations,
    noise_words,
    planned_noise,
)
from tp_flower.methods.moments.reading.column_layout import ColumnLayout
from tp_flower.methods.moments.reading.label_site import checked_widths
from tp_flower.methods.moments.terms import (
    PASS_NAMES,
    TRAINED,
    entity_table,
    label_columns,
    label_width,
    norms_of,
    private_tables,
    splitting_table,
)
from tp_flower.privacy.mechanisms import (
    GIVEN_ENCODER,
    ClippedNoise,
    Gaussian,
    Release,
)
from tp_flower.privacy.plan import SECOND_MOMENTS, PartPlan, Use
from tp_flower.protocol.codec import check_sizes, required
from tp_flower.protocol.training_messages import Update
from tp_flower.sources.policy import REGRESSIONS
from tp_flower.sources.policy import SECOND_MOMENTS as RULE

_SUMMED: Final = "moments"  # entry: the request that was answered, by its digest
_SCOPE: Final = (
    "not covered: sums over all joined rows of the products of two columns, the label "
    "among them; what leaves of it is uniform words, of which the server reads these "
    "sums alone"
)
_SITE_SCOPE: Final = (
    "not covered: sums over all joined rows of the products of two columns, the label "
    "among them, which site {} alone reads; the server gets uniform words"
)
_NOISY_SCOPE: Final = (
    "covers a row's values, its label among them, in all that leaves of them: given "
    "how many rows there are, their keys and the label's classes"
)


class MomentsMethod(SiteMethod[Stateless]):
    """A method whose server solves from moments: a site adds up, once."""

    state = Stateless


@dataclass(frozen=True, eq=False)
class CountedShard(JoinedShard):
    """The rows of a part with their counts in every pass of a run by moments.

    Attributes:
        largest_weight: of a row, by the query's weight.
        label_rows: of each shard of the label's table.
        split_rows: of each shard of another table that is held out at random, those in
            joined rows.
    """

    body: CountedPart
    largest_weight: float
    label_rows: Sequence[int]
    split_rows: Sequence[int]

    @property
    def is_weighted(self) -> bool:
        """Whether joined rows have weights."""
        terms = self.site.terms
        has_weight = any(of.weight for of in terms.fragments.values())
        return has_weight or bool(entity_table(terms.proposal, terms.settings))

    @property
    def splitting(self) -> str:
        """The table by whose rows joined rows are held out."""
        return splitting_table(self.site.terms.proposal, self.site.terms.settings)

    def count_rows(self) -> CountedRows:
        """Return the rows; each counts once in all, if the run weighs them so."""
        rows = super().count_rows()
        terms = self.site.terms
        if self.body.passes is not None:
            counted = CountedRows(rows.edges, np.ones_like(rows.weights))
            takes_part = np.count_nonzero(counted.multiplicity, axis=0) > 0
            if self.extracted.weight is not None:
                takes_part = takes_part & (self.extracted.weight > 0.0)
            TableSplit(self.site, self.number, self.label_rows, self.split_rows).check(
                self.body.passes, takes_part, self.splitting
            )
        if self.table == entity_table(terms.proposal, terms.settings):
            return rows.of_equal_weight()
        return rows

    @cached_property
    def norms(self) -> Norms:
        """The norms that rows are clipped to where moments have noise."""
        return norms_of(self.site.terms.proposal, self.site.terms.settings)

    @cached_property
    def noise(self) -> ClippedNoise | None:
        """The noise on the moments of the table's columns; None without."""
        terms = self.site.terms
        if self.table not in private_tables(terms.proposal, terms.settings):
            return None
        policy = self.site.source(self.number).policy
        sensitivity = self.norms.sensitivity(
            self.table, self.rows.multiplicity, policy.rows_per_unit
        )
        return planned_noise(terms.privacy, sensitivity)

    @cached_property
    def plan(self) -> PartPlan:
        """The release of the moments with noise; none is planned without."""
        if self.noise is None:
            return PartPlan()
        mechanism = Gaussian(self.noise.noise_multiplier)
        return PartPlan(moments=self.noise, uses=(Use(SECOND_MOMENTS, 1, mechanism),))

    @cached_property
    def reading(self) -> LabelReading:
        """What the site shares with the label's, where that one reads the moments."""
        return LabelReading(self.site)

    def summed(
        self,
        rows: CountedRows,
        words: RowWords,
        columns: Mapping[str, int],
        bits: Mapping[str, int],
        label_rows: Sequence[int] = (),
    ) -> SummedShard:
        """Return the part in the exchange; with a check if the label's site reads."""
        summed = replace(
            super().summed(rows, words, columns, bits, label_rows),
            split_rows=self.split_rows,
        )
        if not self.reading.is_asked:
            return summed
        return replace(
            summed,
            columns=checked_widths(columns),
            check=self.reading.weights(self.table, columns[self.table]),
            reader=self.reading.pads if self.has_label else None,
        )

    @cached_property
    def encoder(self) -> SiteEncoder:
        """The encoder of the table's features."""
        return fitted_encoder(self.site, self.number, self.body.encoder)

    def own_weights(self) -> IntArray:
        """Return the rows' weights in every pass, (p, n); 0 or 1 without a weight."""
        rows = self.extracted.rows
        weights = np.ones(rows, np.int64)
        if self.extracted.weight is not None:
            weights = whole_weights(self.extracted.weight, self.largest_weight)
        if self.body.passes is None:
            if self.table == self.splitting:
                raise MessageError(f"'passes' of table {self.table!r} is missing")
            return np.repeat(weights[None, :], len(self.passes), axis=0)
        check_sizes(self.body, rows=rows)
        bits = self.body.passes
        self._check_passes(bits)
        return np.stack([(bits >> number & 1) * weights for number in self.passes])

    def _check_passes(self, bits: AnyArray) -> None:
        """Refuse passes that differ in single rows, whose moments would follow.

        A row of the table that holds rows out is in one pass at most; of the label's,
        some rows may be in none.
        """
        terms = self.site.terms
        every = sum(1 << number for number in self.passes)
        if self.table == splitting_table(terms.proposal, terms.settings):
            are_apart = not np.any(bits & ~np.uint8(every))
            are_apart = are_apart and int(np.bitwise_count(bits).max(initial=0)) <= 1
        elif self.table == terms.proposal.label_table:
            are_apart = bool(np.isin(bits, (0, every)).all())
        else:
            raise MessageError(f"'passes' holds out rows of table {self.table!r}")
        if not are_apart:
            raise MessageError("'passes' has a row in several passes")

    @cached_property
    def taking_part(self) -> tuple[IntArray, int]:
        """The rows in joined rows, first those trained on, and how many these are."""
        multiplicity = self.rows.multiplicity
        is_trained = multiplicity[self.passes.index(TRAINED)] > 0
        is_tested = (multiplicity > 0).any(axis=0) & ~is_trained
        rows = np.concatenate([np.flatnonzero(is_trained), np.flatnonzero(is_tested)])
        return rows, int(np.count_nonzero(is_trained))

    @cached_property
    def is_held_out(self) -> BoolArray:
        """Which rows are in joined rows that are held out, (n,)."""
        others = [k for k, number in enumerate(self.passes) if number != TRAINED]
        total: IntArray = self.rows.multiplicity[others].sum(axis=0)
        return total > 0


def moments(site: Site, request: MomentsRequest) -> MomentsReply:
    """Add up the rows by join key, padded; reply with the sums and their corrections.

    Pads hide one answer: another request of the run is refused.
    """
    check_begins(site, TRAIN_MOMENTS)
    site.check_once(_SUMMED, "this run's moments have left, and leave once")
    tree = tree_of_sums(site, request)
    passes = tuple(sorted(set(request.passes)))
    if list(passes) != request.passes or TRAINED not in passes:
        raise MessageError("'passes' must ascend from 0")
    shards = {
        number: CountedShard(
            site,
            number,
            tree,
            passes,
            body,
            request.largest_weight,
            request.label_rows,
            request.split_rows,
        )
        for number, body in site.each(request.parts)
    }
    is_noisy = site.terms.settings.privacy.covers_features
    agree("bits", sorted(tree.tables) if is_noisy else [], sorted(request.bits))
    rows = RowsOfParts.of(site, shards)
    planned: list[tuple[Release, int]] = []
    for number, shard in site.each(shards):
        _check_rows(site, number, shard)
        planned += _plan_releases(site, number, shard, rows)
    # what a round reserves is one payment
    set_aside(site, planned)
    site.round.arrays.clear()
    parts = {
        number: _padded(site, number, shard, request)
        for number, shard in site.each(shards)
    }
    site.pay()
    site.store.save(_SUMMED, Entry({}, {REQUEST: site.round.digest}))
    return MomentsReply(ledger=site.ledger.lines(site.store.run), parts=parts)


def _check_rows(site: Site, number: int, shard: CountedShard) -> None:
    """Refuse sums over fewer rows than the table's policy asks for."""
    source = site.source(number)
    rule = REGRESSIONS if shard.reading.is_asked else RULE
    source.policy.check_release(rule, is_private=shard.noise is not None)
    check_cells(site.terms.settings, source.min_count, source.policy.min_cell)
    rows, trained = shard.taking_part
    is_trained = np.zeros(shard.extracted.rows, np.bool_)
    is_trained[rows[:trained]] = True
    check_trained(site, number, (is_trained, shard.is_held_out))
    # with noise they are of one unit's rows, and leave with it
    shard.check_multiplicity(
        is_weighted=shard.is_weighted, shares_rows=shard.noise is None
    )


def _plan_releases(
    site: Site, number: int, shard: CountedShard, rows: RowsOfParts
) -> list[tuple[Release, int]]:
    """Return what the noise of a shard covers, with its limit; note a release without.

    ``rows`` are those of all parts.
    """
    if shard.reading.is_asked:
        note_scope(
            site, number, SITE_MOMENTS, _SITE_SCOPE.format(shard.reading.site_name)
        )
        return []
    if shard.noise is None:
        note_scope(site, number, SECOND_MOMENTS, _SCOPE)
        return []
    (use,) = shard.plan.uses
    conditions = [_NOISY_SCOPE, *given_values(site, number, rows)]
    if shard.encoder.encoder.fitted:
        conditions.append(GIVEN_ENCODER)
    planned = release(
        site,
        number,
        TRAIN_MOMENTS,
        use.what,
        "; ".join(conditions),
        use.mechanism,
    )
    return [(planned, use.limit)]


def _padded(
    site: Site, number: int, shard: CountedShard, request: MomentsRequest
) -> PaddedPart:
    """Encode the rows, make the model, and return the padded sums."""
    source = site.source(number)
    has_label = shard.has_label
    spec = ModelSpec(kind=LINEAR, outputs=request.outputs, intercept=has_label)
    check_model(source, spec, shard.encoder.encoder.width)
    rows, trained = shard.taking_part
    features = site.tables.encode(number, shard.encoder, rows)
    encoded = host_features(features)
    columns = _columns(site, number, shard, request, encoded)
    agree("columns", columns.width, request.columns[shard.table])
    counted = shard.rows.select(rows)
    if shard.noise is None:
        source.policy.check_freedom(shard.encoder.encoder.width, trained)
        check_columns(
            source,
            shard.encoder,
            columns,
            counted.multiplicity,
            shards=len(shard.shards),
            advice=column_advice(site.terms.settings) or OTHERWISE,
        )
        check_weightings(
            source,
            trained,
            columns=sum(request.columns.values()),
            weightings=len(shard.passes),
            shards=len(shard.shards),
            otherwise="or test-fraction = 0 and validation-fraction = 0",
        )
    bits = _bits(shard, request, counted.multiplicity.sum(axis=0), columns)
    releaser = site.releaser(number, shard.plan)
    words = ColumnWords(columns, bits)
    sums, products = shard.padded(
        shard.summed(counted, words, request.columns, request.bits, request.label_rows),
        [PASS_NAMES[of_pass] for of_pass in shard.passes],
        _Noise(shard, request.bits, releaser).add,
    )
    keep_names(site, number, shard.encoder, shard.extracted, rows[:trained])
    forget(site.store, number)
    counts = counted.multiplicity[shard.passes.index(TRAINED), :trained]
    data = ShardData(
        features=features,
        multiplicity=counts,
        tested=shard.is_held_out[rows],
        joined_rows=max(int(counts.sum()), 1),
        l2=site.terms.settings.l2,
        table=shard.table,
        spec=spec,
        update=Update.GIVEN,
        plan=shard.plan,
        device="cpu",
        # means and variances of scores are for whoever reads the moments
        is_even=not shard.reading.is_asked
        and counts_evenly(counts, source.policy.min_rows),
    )
    model = LinearModel(features.shape[1], spec.outputs, intercept=spec.intercept)
    site.start(
        Participant(number, data, model, Stateless(), releaser), MOMENTS.family, {}
    )
    return PaddedPart(
        features=features.shape[1],
        deviation=0.0 if shard.noise is None else shard.noise.deviation,
        sums=sums,
        products=products,
        **_told_bits(shard, request, bits),
    )


def _told_bits(
    shard: CountedShard, request: MomentsRequest, bits: IntArray
) -> dict[str, AnyArray]:
    """Return the field with the bits of a shard's columns, (d,).

    What the label's site reads with, it keeps.
    """
    reading = shard.reading
    if not reading.is_asked:
        return {"bits": bits}
    if not shard.has_label:
        return {"sealed_bits": reading.seal_bits(shard.number, bits)}
    layout = ColumnLayout(request.columns, shard.table, request.outputs)
    weights = shard.rows.multiplicity.sum(axis=1).tolist()
    rows = dict(zip(shard.passes, weights, strict=True))
    reading.keep(layout, bits, rows, len(request.classes))
    return {}


def _columns(
    site: Site,
    number: int,
    shard: CountedShard,
    request: MomentsRequest,
    encoded: EncodedRows,
) -> TableColumns:
    """Return the columns (n, d) of the rows that take part, clipped where noise is."""
    terms = site.terms
    privacy = terms.settings.privacy
    has_label = shard.table == terms.proposal.label_table
    rows, _ = shard.taking_part
    clip = None
    if privacy.covers_features:
        squared = shard.norms.squared[shard.table] - has_label
        clip = partial(
            clip_columns, squared_norm=squared, bits=request.bits[shard.table]
        )
    if not has_label:
        return TableColumns(encoded, clip)
    labels = _labels(site, number, request)[rows]
    if privacy.covers_features and not request.classes:
        labels = LabelUnit.of(privacy.label_range).clip(labels)
    return TableColumns(encoded, clip, labels)


@dataclass(frozen=True, eq=False)
class _Noise:
    """The noise of a shard on what it sends of the moments.

    Attributes:
        bits: of every table's columns, after the point.
    """

    shard: CountedShard
    bits: Mapping[str, int]
    releaser: Releaser

    def add(self, pair: tuple[str, str], block: AnyArray) -> AnyArray:
        """Return a block (d_i, d_k) of words, with noise where the table's values are.

        The server takes a correction off: noise of either sign is the same.
        """
        noise = self.shard.noise
        table = self.shard.table
        if noise is None or table not in pair:
            return block
        has_intercept = table == self.shard.site.terms.proposal.label_table
        deviations = noise.deviation * entry_deviations(
            pair, table, block.shape, has_intercept=has_intercept
        )
        use = (self.shard.number, SECOND_MOMENTS, 0)
        if use not in self.releaser.uses:
            self.releaser.uses.append(use)
        words: AnyArray = block + noise_words(
            self.releaser.noise,
            deviations,
            self.bits[pair[0]] + self.bits[pair[1]],
            is_symmetric=pair[0] == pair[1],
        )
        return words


def _bits(
    shard: CountedShard,
    request: MomentsRequest,
    counts: IntArray,
    columns: TableColumns,
) -> IntArray:
    """Return the bits of every column: those of its only shard, or as told to all."""
    if shard.table in request.bits:
        # as large as clipped rows can be: whether bits are refused says nothing of them
        # whole numbers might wrap around
        joined_rows = counts.sum(dtype=np.float64)
        second_moments = np.full(
            columns.width, joined_rows * shard.norms.squared[shard.table]
        )
        bits = np.full(columns.width, request.bits[shard.table])
        shard.check_fits(second_moments, bits)
        return bits
    return shard.column_bits(counts, columns)


def _labels(site: Site, number: int, request: MomentsRequest) -> FloatArray:
    """Return the label's columns of all rows, (n, k)."""
    label = site.extracted(number).label
    task = site.terms.extract_parts[number].local_label
    if label is None or task is None:
        raise MessageError("the part has no label")
    sql = site.fragment(number).label or "label"
    is_covered = is_label_covered(site, number)
    facts = local_label_facts(
        site.source(number), label, task, sql, is_covered=is_covered
    )
    classes = request.classes
    agree("outputs", label_width(len(classes)), request.outputs)
    is_alone = len(site.terms.proposal.shards_of(site.fragment(number).table)) == 1
    # other shards have more classes, but none has classes of what is numbers here
    if is_alone or facts.classes is None:
        agree("classes", facts.classes or [], classes)
    if not classes:
        return label_columns(label.values, 0)
    numbers = label.positions_in(classes)
    # a label that is NULL, which noise covers, is of no class
    if np.isnan(numbers[~np.isnan(label.values)]).any():
        raise MessageError("'classes' lacks one of the site's")
    return label_columns(numbers, len(classes))


def take_solution(site: Site, request: SolutionRequest) -> SolutionReply:
    """Take the parameters that the server has solved for."""
    taken = {}
    for part in site.parts(Stateless):
        body = body_of(request.parts, part)
        parameters = _parameters_of(LabelReading(site), part, body)
        part.model.parameters = parameters
        # the moments of scores tell of rows, too
        if not part.data.plan.is_private:
            part.sum_scores()
        taken[part.number] = TakenPart(parameters=len(parameters))
        site.save(part)
    return SolutionReply(parts=taken)


def _parameters_of(
    reading: LabelReading, part: Participant[Stateless], body: SolvedPart
) -> FloatArray:
    """Return the parameters (p,) that a part is sent, by whoever has solved."""
    size = len(part.model.penalised)
    agree("sealed", reading.is_asked, body.sealed is not None)
    if body.sealed is None:
        parameters = required(body.parameters, "parameters")
        check_sizes(body, parameters=size)
        return parameters
    agree("parameters", None, body.parameters)
    parameters = reading.open_parameters(part.data.table, body.sealed)
    if len(parameters) != size:
        raise MessageError(f"the sealed parameters are {len(parameters)}, not {size}")
    return parameters
