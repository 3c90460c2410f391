"""Coresets: the joined rows that are trained on are drawn, and weighed (DIS).

Three rounds, as in the paper: ``measure`` brings what the sensitivities of every part's
rows sum to; ``draw`` tells each part how many rows to draw, and brings their numbers;
``weigh`` tells it which rows the sample has, and brings the sum of all parts' scores of
each joined row. What is drawn, and with which weights, is
:mod:`tp_flower.coresets.sampling`'s. A uniform sample takes no round.

A part's total is bounded by what the server knows (the columns of its encoding, or the
number of clusters): a larger one is capped, and its site told to scale its scores alike
and named in the report. A joined row's sum of scores that no rows can have stops the
run. Within these bounds a dishonest site can have its rows drawn more often, and a
weight wrong by at most total / (m T / N), the uniform share's.

Reference:
    Huang, Li, Sun, Zhao 2022, Coresets for Vertical Federated Learning, Algorithms 1-3.
"""

from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from strategies.coresets.importance import (
    Party,
    label_order,
    measured_parties,
    penalty_of,
)
from strategies.run.exchange import Part, Replies, Request, ask
from strategies.run.replies import array_of, refuse
from strategies.setup.joined_rows import JoinedRows
from strategies.setup.problem import (
    CoresetSample,
    PartRows,
    TableLayout,
    compact_tables,
    weighted_tables,
)
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.coresets.importance import CLUSTERS, REGRESSION
from tp_flower.coresets.sampling import (
    Sample,
    draw_joined,
    draw_uniform,
    party_counts,
    uniform_sample,
    weigh_sample,
)
from tp_flower.errors import ReplyError, SettingsError
from tp_flower.features.encoder import TableEncoder
from tp_flower.joins.mapping import RowWeights
from tp_flower.learning.losses import KMEANS
from tp_flower.privacy.key_agreement import MOST_PARTS, from_fixed
from tp_flower.protocol import (
    DrawPart,
    DrawRequest,
    MeasurePart,
    MeasureRequest,
    WeighPart,
    WeighRequest,
)
from tp_flower.randomness import Stream, generator
from tp_flower.settings import IMPORTANCE, UNIFORM, Settings

IntArray = npt.NDArray[np.int64]

MOST_PER_ROW: Final = {REGRESSION: 1.0, CLUSTERS: 8.0}
"""What a row's score is at most, times what its joined rows weigh: a leverage is at
most 1, and the terms of k-means are alpha, alpha and 2 alpha with alpha = 2."""
TOLERANCE: Final = 1e-2


Sampling = Generator[Request, Replies, CoresetSample]


def draw_coreset(
    joined: JoinedRows, encoders: Mapping[str, TableEncoder], settings: Settings
) -> Sampling:
    """Draw ``settings.coreset_rows`` of the joined training rows.

    Raises:
        ReplyError: a site's answer is none that it could give.
        SettingsError: there are more shards than can be summed.
    """
    rng = generator(settings.seed, Stream.CORESET)
    if settings.coreset_kind == UNIFORM:
        return sample_uniformly(joined, settings)
    if (shards := len(_parts(joined))) > MOST_PARTS:
        raise SettingsError(
            f"coreset-kind is {IMPORTANCE!r}, which sums the masked numbers of at most "
            f"{MOST_PARTS} shards; the query has {shards}: use {UNIFORM!r}"
        )
    wanted = CLUSTERS if settings.method.is_clustering else REGRESSION
    parties = yield from _measure(joined, encoders, wanted, settings)
    draws = yield from _draw(joined, parties, settings.coreset_rows, rng)
    drawn = np.unique(draws)
    scores = yield from _weigh(joined, parties, drawn)
    check_scores(joined, drawn, scores, MOST_PER_ROW[wanted])
    rows, uniform = joined.train.joined_rows, float(len(joined.compact))
    total = sum(party.capped for party in parties) + uniform
    totals: defaultdict[str, float] = defaultdict(float)
    shares: defaultdict[str, float] = defaultdict(float)
    for party in parties:
        totals[party.part.table] += party.total
        shares[party.part.table] += party.capped / total
    return CoresetSample(
        IMPORTANCE,
        weigh_sample(draws, scores + uniform / rows, total),
        rows,
        totals,
        shares,
        tuple(party.words for party in parties if party.scale < 1.0),
    )


def sample_uniformly(joined: JoinedRows, settings: Settings) -> CoresetSample:
    """Return ``settings.coreset_rows`` of the joined training rows, all as likely."""
    rng = generator(settings.seed, Stream.CORESET)
    rows = joined.train.joined_rows
    own = joined.weighting.train_rows
    sample = uniform_sample(rows, settings.coreset_rows, own, rng)
    return CoresetSample(UNIFORM, sample, rows)


def _measure(
    joined: JoinedRows,
    encoders: Mapping[str, TableEncoder],
    wanted: str,
    settings: Settings,
) -> Generator[Request, Replies, list[Party]]:
    """Return what every part's sensitivities sum to."""
    bodies: dict[int, MeasurePart] = {}
    label = label_order(joined) if wanted == REGRESSION else None
    for table, own in joined.compact.items():
        order: dict[str, Any] = {
            "encoder": encoders[table].to_json(),
            "is_shard": len(own.parts) > 1,
        }
        if wanted == REGRESSION:
            order["penalty"] = penalty_of(joined, settings)
        if label is not None and table == joined.bound.label_table:
            order["label"] = label
        for number, arrays in measured_rows(own).items():
            bodies[number] = MeasurePart(**order, **arrays)
    request = MeasureRequest(
        sensitivities=wanted,
        clusters=settings.clusters,
        joined_rows=joined.train.joined_rows,
        parts=bodies,
    )
    replies = yield ask(request, _parts(joined))
    return measured_parties(joined, encoders, replies, wanted, settings)


def _draw(
    joined: JoinedRows, parties: list[Party], size: int, rng: np.random.Generator
) -> Generator[Request, Replies, IntArray]:
    """Return the joined rows that are drawn, (m,)."""
    totals = [party.capped for party in parties]
    counts = party_counts(np.array([*totals, float(len(joined.compact))]), size, rng)
    weights = joined.weighting.train_rows
    bodies = {
        party.part.number: DrawPart(
            count=int(count), scale=party.scale, cost=party.cost, gram=party.gram
        )
        for party, count in zip(parties, counts, strict=False)
    }
    replies = yield ask(DrawRequest(bodies), _parts(joined))
    rows = joined.train.joined_rows
    drawn = [draw_uniform(int(counts[-1]), rows, weights, rng)]
    for party, count in zip(parties, counts, strict=False):
        found = _positions(replies, party, int(count)) + party.rows.start
        table = joined.train.tables[party.part.table]
        drawn.append(draw_joined(table, found, weights, rng))
    return np.concatenate(drawn)


def _positions(replies: Replies, party: Party, count: int) -> IntArray:
    """Return which of a part's trained rows were drawn, (count,)."""
    part = party.part
    found = array_of(replies, part, "drawn", (count,)).astype(np.int64)
    if found.max(initial=0) >= max(party.rows.trained, 1):
        raise refuse(part, f"rows that it has drawn beyond its {party.rows.trained}")
    return found


def _weigh(
    joined: JoinedRows, parties: list[Party], drawn: IntArray
) -> Generator[Request, Replies, FloatArray]:
    """Return the sum of all parts' scores of each joined row, (k,)."""
    rows = joined.train.joined_rows
    bodies: dict[int, WeighPart] = {}
    for place, party in enumerate(parties):
        behind = joined.train.tables[party.part.table].row_of[drawn]
        bodies[party.part.number] = WeighPart(
            place=place, rows=own_rows(behind, party.rows)
        )
    request = WeighRequest(joined_rows=rows, summed=len(parties), parts=bodies)
    replies = yield ask(request, _parts(joined))
    total = np.zeros(len(drawn), np.uint64)
    for party in parties:
        shape = (len(drawn),)
        total += array_of(replies, party.part, "masked", shape)
    return from_fixed(total, rows)


def own_rows(behind: npt.NDArray[np.int32], rows: PartRows) -> npt.NDArray[np.int32]:
    """Return the part's trained row behind each joined row; -1 where it is no row's.

    >>> own = PartRows(start=2, trained=3, total=4, tested=np.zeros(4, bool))
    >>> own_rows(np.array([1, 2, 4, 5, -1], np.int32), own).tolist()
    [-1, 0, 2, -1, -1]
    """
    found = behind - np.int32(rows.start)
    is_own = (behind >= rows.start) & (found < rows.trained)
    return np.where(is_own, found, -1).astype(np.int32)


def check_scores(
    joined: JoinedRows, drawn: IntArray, scores: FloatArray, most: float
) -> None:
    """Refuse sums of scores that the tables' rows cannot have.

    A row's score is at most ``most`` over what its joined rows weigh.

    Raises:
        ReplyError: a sum is beyond that of all tables.
    """
    bound = np.zeros(len(drawn))
    masses = joined.weighting.masses
    for name, rows in joined.train.tables.items():
        own = rows.multiplicity if masses is None else masses[name]
        inverse = np.append(most / np.maximum(own, np.finfo(np.float32).tiny), 0.0)
        bound += inverse[rows.row_of[drawn]]
    is_beyond = scores > bound * (1.0 + TOLERANCE)
    if count := int(np.count_nonzero(is_beyond)):
        sites = ", ".join(dict.fromkeys(part.site for part in _parts(joined)))
        raise ReplyError(
            f"the sensitivities of {count} of {len(drawn)} drawn rows sum to more "
            f"than rows can have: one of the sites {sites} sent others than its own. "
            "coreset-kind = 'uniform' asks none of them"
        )


def _parts(joined: JoinedRows) -> list[Part]:
    return [part for own in joined.compact.values() for part in own.parts]


def measured_rows(own: TableLayout) -> dict[int, dict[str, Any]]:
    """Return which rows a table's parts are to measure, and what those weigh.

    Where all weigh 1, as where no row is joined twice, nothing is said of it.
    """
    arrays: dict[int, dict[str, Any]] = {}
    for number, sent in own.set_up_arrays().items():
        arrays[number] = {"trained": sent["trained"]}
        for name in ("multiplicity", "masses"):
            if name in sent and (sent[name] != 1).any():
                arrays[number][name] = _small(sent[name])
    return arrays


def _small(masses: AnyArray) -> AnyArray:
    """Return what rows weigh in the fewest bytes that hold it."""
    if masses.dtype.kind == "f":
        return masses
    fits = masses.max(initial=0) <= np.iinfo(np.uint8).max
    return masses.astype(np.uint8 if fits else np.uint32)


def restrict_to_sample(joined: JoinedRows, sample: Sample) -> JoinedRows:
    """Return the alignment with a sample of its training rows.

    A sample of all of them, with the weights that they have, is the same alignment.

    Args:
        joined: the joined rows.
        sample: of those to train on, by their numbers among these; they stay in this
            order, and the held-out rows in theirs. A clustering holds no row out: it is
            tested on all of them.
    """
    is_clustering = joined.loss.name == KMEANS
    train = np.flatnonzero(~joined.is_test)[sample.joined]
    tested = np.flatnonzero(joined.is_test | is_clustering)
    chosen = np.concatenate([train, tested])
    mapping = joined.mapping.select(chosen)
    is_test = np.arange(len(chosen)) >= len(train)
    extracted = joined.extracted
    drawn, test, compact = compact_tables(
        mapping, is_test, extracted.parts, extracted.rows
    )
    weights = sample.weights
    # equal weights are none: such a run is the same to the bit
    own = None if np.all(weights[:1] == weights) else RowWeights.of(weights, drawn)
    if own is not None:
        compact = weighted_tables(compact, own.masses)
    return replace(
        joined,
        mapping=mapping,
        is_test=is_test,
        train=drawn,
        test=test,
        compact=compact,
        values=joined.values[chosen],
        weighting=replace(
            joined.weighting,
            train=own,
            test=joined.weighting.train_rows
            if is_clustering
            else joined.weighting.test,
        ),
    )
