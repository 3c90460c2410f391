"""A site's part in the second moments of the joined rows.

One message brings counts and takes padded sums back
(:mod:`tp_flower.methods.moments.exchange`); nothing is kept of it but the encoded rows.
A second one brings the model. The site derives the joins from the run's proposal, and
works out from the counts in how many joined rows each of its rows is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

import numpy as np

from client_apps.data.features import forget
from client_apps.data.run_store import Entry
from client_apps.handlers.encoding import fitted_encoder
from client_apps.methods.site_method import SiteMethod
from client_apps.operator.participant import Participant, ShardData, body_of
from client_apps.operator.releases import Releaser
from client_apps.operator.state import Stateless
from client_apps.privacy.guard import (
    check_model,
    check_rows,
    counts_evenly,
    given_values,
)
from client_apps.privacy.keys import own_node
from client_apps.privacy.ledger_entries import note_scope, release, set_aside
from client_apps.privacy.local_labels import is_label_covered, local_label_facts
from client_apps.privacy.proposal_checks import agree, check_begins, check_trained
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import AnyArray, BoolArray, FloatArray, IntArray
from tp_flower.errors import MessageError, PolicyError, SiteError
from tp_flower.extraction.extracted import ExtractedShard, KeyColumn
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
from tp_flower.methods.moments.counts import CountedRows, EdgeRows, whole_weights
from tp_flower.methods.moments.exchange import (
    EdgeSecret,
    ShardMasks,
    SummedShard,
    ToldCounts,
)
from tp_flower.methods.moments.messages import (
    TRAIN_MOMENTS,
    CountedPart,
    MomentsReply,
    MomentsRequest,
    PaddedPart,
    SolutionReply,
    SolutionRequest,
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
from tp_flower.methods.moments.terms import (
    PASS_NAMES,
    TRAINED,
    entity_table,
    label_columns,
    label_width,
    norms_of,
    passes_without_partner,
    private_tables,
    splitting_table,
    tree_of,
)
from tp_flower.methods.moments.tree import JoinTree
from tp_flower.methods.moments.words import column_bits, fits
from tp_flower.privacy.mechanisms import (
    GIVEN_ENCODER,
    ClippedNoise,
    Gaussian,
)
from tp_flower.privacy.plan import SECOND_MOMENTS, PartPlan, Use
from tp_flower.protocol.codec import check_sizes, parse, required
from tp_flower.protocol.training_messages import Update
from tp_flower.sources.policy import SECOND_MOMENTS as RULE
from tp_flower.terms.groups import table_group

if TYPE_CHECKING:
    from tp_flower.sources.shards import ShardSource

_SUMMED: Final = "moments"  # entry: the request that was answered, by its digest
_SCOPE: Final = (
    "not covered: sums over all joined rows of the products of two columns, the label "
    "among them; what leaves of it is uniform words, of which the server reads these "
    "sums alone"
)
_NOISY_SCOPE: Final = (
    "covers a row's values, its label among them, in all that leaves of them: given "
    "how many rows there are, their keys and the label's classes"
)


class MomentsMethod(SiteMethod[Stateless]):
    """A method whose server solves from moments: a site adds up, once."""

    state = Stateless


@dataclass(frozen=True, eq=False)
class CountedShard:
    """The rows of a part with the counts that a request brings.

    Attributes:
        passes: the numbers of the run's passes.
        largest_weight: of a row, by the query's weight.
    """

    site: Site
    number: int
    tree: JoinTree
    passes: tuple[int, ...]
    body: CountedPart
    largest_weight: float

    @cached_property
    def table(self) -> str:
        """The alias of the table."""
        return self.site.terms.proposal.parts[self.number].table

    @cached_property
    def extracted(self) -> ExtractedShard:
        """The rows."""
        return self.site.extracted(self.number)

    @property
    def is_weighted(self) -> bool:
        """Whether joined rows have weights."""
        terms = self.site.terms
        has_weight = any(of.weight for of in terms.fragments.values())
        return has_weight or bool(entity_table(terms.proposal, terms.settings))

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
        terms = self.site.terms
        splitting = splitting_table(terms.proposal, terms.settings)
        edges = {
            number: EdgeRows(
                self._keys[number].codes,
                told.incoming.sum(axis=-1),
                passes_without_partner(
                    self.tree, number, self.table, splitting, self.passes
                ),
            )
            for number, told in self.told.items()
        }
        rows = CountedRows(edges, self._weights())
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
    def encoder(self) -> SiteEncoder:
        """The encoder of the table's features."""
        return fitted_encoder(self.site, self.number, self.body.encoder)

    @cached_property
    def masks(self) -> ShardMasks:
        """What the shard shares with the others of its table."""
        if len(self.shards) == 1:
            return ShardMasks()
        group = table_group(self.site.terms.proposal, self.table)
        place = self.shards.index(self.number)
        return ShardMasks(self.site.group_key(group), place, len(self.shards))

    def _weights(self) -> IntArray:
        """Return the rows' weights in every pass, (p, n); 0 or 1 without a weight."""
        rows = self.extracted.rows
        weights = np.ones(rows, np.int64)
        if self.extracted.weight is not None:
            weights = whole_weights(self.extracted.weight, self.largest_weight)
        if self.body.passes is None:
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
    def _keys(self) -> dict[int, KeyColumn]:
        """By join, the keys of the rows, in the order in which the server has them."""
        join_keys = self.site.join_keys(self.number)
        groups = self.site.terms.extract_parts[self.number].key_groups
        keys = {}
        for number in self.tree.edges_of(self.table):
            position = self.tree.edges[number].key(self.table)
            hasher = self.site.join_hasher(groups[position])
            keys[number] = join_keys[position].hashed(hasher)
        return keys

    @cached_property
    def secrets(self) -> dict[int, EdgeSecret]:
        """What the site shares with the other ends of its joins."""
        return {
            number: EdgeSecret(
                self.site.group_key(f"join-{number}"), self._keys[number].hashes
            )
            for number in self.tree.edges_of(self.table)
        }

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
    tree = parse(site.terms.proposal, "proposal", tree_of)
    node = own_node(site)
    at_site = [n for n, of in site.terms.proposal.parts.items() if of.node == node]
    # what the ledger says of one part depends on all
    agree("parts", sorted(at_site), sorted(request.parts))
    agree("columns", sorted(tree.tables), sorted(request.columns))
    passes = tuple(sorted(set(request.passes)))
    if list(passes) != request.passes or TRAINED not in passes:
        raise MessageError("'passes' must ascend from 0")
    shards = {
        number: CountedShard(site, number, tree, passes, body, request.largest_weight)
        for number, body in site.each(request.parts)
    }
    is_noisy = site.terms.settings.privacy.covers_features
    agree("bits", sorted(tree.tables) if is_noisy else [], sorted(request.bits))
    for number, shard in site.each(shards):
        _check_rows(site, number, shard)
        _reserve(site, number, shards)
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
    source.policy.check_release(RULE, is_private=shard.noise is not None)
    rows, trained = shard.taking_part
    is_trained = np.zeros(shard.extracted.rows, np.bool_)
    is_trained[rows[:trained]] = True
    check_trained(site, number, (is_trained, shard.is_held_out))
    purpose = f"the moments of table {shard.table!r}"
    subquery = site.fragment(number).subquery
    # with noise they are of one unit's rows, and leave with it
    is_shared = subquery is not None and bool(subquery.cutoffs or subquery.is_windowed)
    if shard.noise is None and is_shared:
        check_rows(source, 1, f"{purpose}, whose windows may all have one row,")
    for counts in shard.rows.multiplicity:
        check_rows(source, int(np.count_nonzero(counts)), purpose)
        if shard.is_weighted and not counts_evenly(counts, source.policy.min_rows):
            check_rows(source, 1, f"{purpose}, one of which weighs most")


def _reserve(site: Site, number: int, shards: Mapping[int, CountedShard]) -> None:
    """Set aside what the noise of a shard costs; note a release without."""
    shard = shards[number]
    if shard.noise is None:
        note_scope(site, number, SECOND_MOMENTS, _SCOPE)
        return
    (use,) = shard.plan.uses
    conditions = [_NOISY_SCOPE, *given_values(site, number, shards)]
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
    set_aside(site, [(planned, use.limit)])


def _padded(
    site: Site, number: int, shard: CountedShard, request: MomentsRequest
) -> PaddedPart:
    """Encode the rows, make the model, and return the padded sums."""
    source = site.source(number)
    has_label = shard.table == site.terms.proposal.label_table
    spec = ModelSpec(kind=LINEAR, outputs=request.outputs, intercept=has_label)
    check_model(source, spec, shard.encoder.encoder.width)
    rows, trained = shard.taking_part
    features = site.tables.encode(number, shard.encoder, rows)
    encoded = host_features(features)
    if shard.noise is None:
        _check_columns(
            source,
            shard.encoder,
            TableColumns(encoded[:trained]),
            shards=len(shard.shards),
        )
    columns = _columns(site, number, shard, request, encoded)
    agree("columns", columns.width, request.columns[shard.table])
    counted = shard.rows.select(rows)
    bits = _bits(shard, request, counted.multiplicity.sum(axis=0), columns)
    releaser = site.releaser(number, shard.plan)
    sums, products = _contributions(
        shard, counted, ColumnWords(columns, bits), request, releaser
    )
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
        is_even=counts_evenly(counts, source.policy.min_rows),
    )
    model = LinearModel(features.shape[1], spec.outputs, intercept=spec.intercept)
    site.start(
        Participant(number, data, model, Stateless(), releaser), MOMENTS.family, {}
    )
    return PaddedPart(
        features=features.shape[1],
        deviation=0.0 if shard.noise is None else shard.noise.deviation,
        bits=bits,
        sums=sums,
        products=products,
    )


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


def _contributions(
    shard: CountedShard,
    rows: CountedRows,
    words: ColumnWords,
    request: MomentsRequest,
    releaser: Releaser,
) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
    """Return the table's padded sums and corrections of all passes, by name."""
    sums: dict[str, AnyArray] = {}
    products: dict[str, AnyArray] = {}
    tables = shard.tree.tables
    summed = SummedShard(
        shard.table,
        shard.tree,
        rows,
        words,
        request.columns,
        shard.told,
        shard.secrets,
        shard.masks,
        request.bits,
    )
    noise = _Noise(shard, request.bits, releaser)
    for position, number in enumerate(shard.passes):
        contribution = summed.in_pass(position, PASS_NAMES[number]).contribution()
        for (edge, source), block in contribution.sums.items():
            sums[f"{number}-{edge}-{tables.index(source)}"] = block
        for (first, second), block in contribution.products.items():
            pair = f"{tables.index(first)}-{tables.index(second)}"
            products[f"{number}-{pair}"] = noise.add((first, second), block)
    return sums, products


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
    shards = len(shard.shards)
    if shard.table in request.bits:
        # as large as clipped rows can be: whether bits are refused says nothing of them
        # whole numbers might wrap around
        joined_rows = counts.sum(dtype=np.float64)
        second_moments = np.full(
            columns.width, joined_rows * shard.norms.squared[shard.table]
        )
        bits = np.full(columns.width, request.bits[shard.table])
    else:
        second_moments = columns.second_moments(counts)
        if shards == 1:
            return column_bits(second_moments)
        bits = required(shard.body.bits, "bits")
        check_sizes(shard.body, columns=len(second_moments))
    if not fits(second_moments, bits, shards).all():
        raise SiteError(
            f"table {shard.table}: a column has no scale, and its moments are out of "
            "range: encode numbers as 'standard', or divide the label in the query"
        )
    return bits


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


def _check_columns(
    source: "ShardSource", encoder: SiteEncoder, columns: TableColumns, *, shards: int
) -> None:
    """Refuse a column that is 0 in nearly all rows, and tables of hardly any rows.

    The moments of a column with few nonzero rows are those rows. Of a table with no
    more rows than columns, they are all of its rows, up to a rotation; in several
    shards the others' rows are added to them.
    """
    policy = source.policy
    nonzero = columns.nonzero()
    few = np.flatnonzero((nonzero > 0) & (nonzero < policy.min_count))
    if few.size and policy.min_count > 1:
        name = encoder.encoder.feature_of(int(few[0]))
        raise PolicyError(
            f"the table's policy (min-count = {policy.min_count}) refuses: moments of "
            f"column {name!r}, which is 0 in all but fewer rows; leave it out, or "
            "encode it otherwise"
        )
    is_alone = shards == 1 and policy.min_rows > 1
    if is_alone and columns.width >= len(columns):
        raise PolicyError(
            f"the table's policy (min-rows = {policy.min_rows}) refuses: moments of "
            f"{columns.width} columns of no more rows, which tell these rows; use "
            "encoders of fewer columns"
        )


def take_solution(site: Site, request: SolutionRequest) -> SolutionReply:
    """Take the parameters that the server has solved for."""
    taken = {}
    for part in site.parts(Stateless):
        body = body_of(request.parts, part)
        check_sizes(body, parameters=len(part.model.penalised))
        part.model.parameters = body.parameters
        # the moments of scores tell of rows, too
        if not part.data.plan.is_private:
            part.sum_scores()
        taken[part.number] = TakenPart(parameters=len(body.parameters))
        site.save(part)
    return SolutionReply(parts=taken)
