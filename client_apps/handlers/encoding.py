"""Encoders at a site: fitted to rows that the server learns nothing of but columns.

A table in one shard fits its own. The shards of another send each other statistics,
sealed under the table's key (:mod:`tp_flower.privacy.shard_seals`): whichever of them
the server asks to merges them, fits the encoder, and seals it for the others, which
open it with the first message that encodes rows.
"""

import json
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from client_apps.data.run_store import Entry
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import check_rows, counts_evenly, visible_schema
from client_apps.privacy.ledger_entries import note
from client_apps.privacy.proposal_checks import (
    TRAINED,
    agree_in_rows,
    check_aliases,
    check_begins,
    check_encoders,
    check_folds,
)
from client_apps.rounds.site import REQUEST, Site
from tp_flower.arrays import AnyArray
from tp_flower.duckdb_engine import quote_name
from tp_flower.errors import MessageError, SchemaError, TPFlowerError
from tp_flower.features.choice import TableChoice
from tp_flower.features.columns import nearly_numbers
from tp_flower.features.encoder import SiteEncoder, TableEncoder
from tp_flower.features.fitting import fit
from tp_flower.features.statistics import (
    ColumnStatistics,
    CountedRows,
    declared_statistics,
    feature_statistics,
    merge_tables,
)
from tp_flower.features.statistics_codec import from_wire, summary_of, to_wire
from tp_flower.privacy.shard_seals import ENCODER, STATISTICS, ShardSeal
from tp_flower.protocol.codec import check_sizes, decode, encode, parse, required
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import bytes_of, packet_of, unpack_bits
from tp_flower.protocol.setup_messages import (
    Detail,
    EncodedColumns,
    FitPart,
    FitReply,
    FitRequest,
    FittedPart,
    ShardStatistics,
    StatisticsPart,
    StatisticsReply,
    StatisticsRequest,
    TableShards,
)
from tp_flower.sources.policy import NEVER

Statistics = dict[str, ColumnStatistics]

FEWEST_ROWS: Final = 500  # that features are described of, where a policy has min-rows
FEW_TEXTS: Final = 0.01
"""Share of texts that may be no plain digits in a column of plain digits, described in
steps."""
_STATISTICS: Final = "statistics-{}"
_ENCODER: Final = "encoder-{}"
"""Entries of a part: what its encoder is fitted to, and the encoder."""


def statistics(site: Site, request: StatisticsRequest) -> StatisticsReply:
    """Fit the encoders of tables in one shard; reply with others' sealed statistics.

    A shard does so for one choice of rows in a run, and in each fold of a search: the
    columns of encoders that were fitted to different rows tell the server how these
    differ.
    """
    check_begins(site, Action.STATISTICS)
    parts = {n: _statistics_of(site, n, body) for n, body in site.each(request.parts)}
    check_aliases(site, request.parts)
    check_folds(site, request.parts)
    return StatisticsReply(parts)


def forget_encoder(site: Site, number: int) -> None:
    """Forget a part's encoder and what it was fitted to: another fold begins."""
    for name in (_STATISTICS, _ENCODER):
        site.store.drop(name.format(number))


def _statistics_of(site: Site, number: int, body: StatisticsPart) -> FittedPart:
    """Return a shard's statistics, sealed, or those of a table in one shard."""
    name = _STATISTICS.format(number)
    digest = site.round.digest
    site.check_once(name, "another request has already fitted this run's encoders")
    choice = _choice(body.encoders)
    computed = _compute_statistics(site, number, body, choice)
    check_encoders(site, number, choice, body)
    shards = msgspec.to_builtins(body.shards)
    meta = {REQUEST: digest, "encoders": body.encoders, "shards": shards}
    site.store.save(name, Entry({}, meta))
    is_fitted = not all(column.is_declared for column in computed.values())
    describes = None
    if body.describes and is_fitted:
        describes = _description(site, number, body)
    if describes is not None:
        note(site, number, ledger_entries.FEATURES)
    if shards is None:
        return _fit(site, number, choice, [computed], describes)[1]
    statistics = msgspec.structs.replace(to_wire(computed), describes=describes)
    text = bytes_of(encode(ShardStatistics({number: statistics})))
    seal, _ = seal_and_encoders(site, number)
    return FittedPart(sealed=seal.seal(text, STATISTICS, number, digest))


def _description(site: Site, number: int, body: StatisticsPart) -> Detail | None:
    """Return how detailed a noiseless description of the rows may be.

    It leaves besides the encoder.

    Where a policy has ``min-rows``, a row, or a unit's rows, must count for a
    ``FEWEST_ROWS``-th at most, which moves a share by a tenth of a step.
    """
    policy = site.source(number).policy
    if policy.epsilon is not None or policy.releases.statistics == NEVER:
        return None
    if policy.min_rows <= 1:
        return Detail.PERCENT
    fewest = max(FEWEST_ROWS, policy.min_rows) * policy.rows_per_unit
    counts = body.multiplicity
    if counts is None:
        is_even = _count_selected(site, number, body) >= fewest
    else:
        is_even = counts_evenly(counts, fewest)
    return Detail.STEPS if is_even else None


def _count_selected(site: Site, number: int, body: StatisticsPart) -> int:
    """Return how many of a part's rows a request selects."""
    rows = site.extracted(number).rows
    if body.trained is None:
        return rows
    return int(np.count_nonzero(unpack_bits(body.trained, rows)))


def _choice(encoders: object) -> TableChoice:
    return parse(encoders, "encoders", lambda it: msgspec.convert(it, TableChoice))


def _compute_statistics(
    site: Site, number: int, body: StatisticsPart, choice: TableChoice
) -> Statistics:
    """Return the statistics of the requested rows, as far as encoders need them."""
    source = site.source(number)
    extracted = site.extracted(number)
    sample = _counted_rows(site, number, body)
    rows = sample.rows
    is_trained = np.ones(extracted.rows, np.bool_) if rows is None else rows
    agree_in_rows(site, number, TRAINED, is_trained)
    kinds = _kinds(site, number, choice)
    fitted = [
        name for name, kind in kinds.items() if not choice.is_declared(name, kind)
    ]
    is_shard = body.shards is not None
    if is_shard or source.policy.epsilon is not None:
        for name in fitted:
            spec = choice.spec_for(name, kinds[name])
            source.policy.check_statistics(choice.table, name, kinds[name], spec)
    if fitted:
        count = _count_selected(site, number, body)
        check_rows(source, count, f"the statistics of table {extracted.table!r}")
    if fitted and is_shard:
        note(site, number, ledger_entries.STATISTICS)
    features = {}
    for info in extracted.features:
        name = info.name
        kind = kinds[info.name]
        if name in fitted:
            column = extracted.column(name)
            features[name] = feature_statistics(choice, name, kind, column, sample)
        else:
            features[name] = declared_statistics(choice, name, kind, info.width)
    return features


def _counted_rows(site: Site, number: int, body: StatisticsPart) -> CountedRows:
    """Return the rows that a request selects, and how often each of them counts."""
    rows = None
    if body.trained is not None:
        rows = unpack_bits(body.trained, site.extracted(number).rows)
        check_sizes(body, trained=int(np.count_nonzero(rows)))
    elif body.multiplicity is not None:
        raise MessageError("it has no 'trained'")
    return CountedRows(
        site.hasher(), site.source(number).min_count, rows, body.multiplicity
    )


def _kinds(site: Site, number: int, choice: TableChoice) -> dict[str, str]:
    """Return the kind of each feature, "" if only a declaration could tell.

    A column that is all NULL at its source has no type there, which the server learns
    with the column names. A column that is NULL in the run's rows only has a type.
    """
    extracted = site.extracted(number)
    fragment = site.fragment(number)
    plain_features = () if fragment.subquery is not None else fragment.features
    empty = [
        feature
        for feature in plain_features
        if choice.is_declared(feature.name, "")
        and extracted.column(feature.name).is_missing.all()
    ]
    kinds = {info.name: info.kind for info in extracted.features}
    if empty:
        # this reads the source, so only if necessary
        all_null = visible_schema(site, site.source(number)).all_null
        untyped = {quote_name(column) for column in all_null}
        kinds |= {feature.name: "" for feature in empty if feature.sql in untyped}
    return kinds


def fit_shards(site: Site, request: FitRequest) -> FitReply:
    """Merge the shards' statistics, and reply with the encoder, sealed for them all."""
    return FitReply(
        {n: _fit_shards(site, n, body) for n, body in site.each(request.parts)}
    )


def _fit_shards(site: Site, number: int, body: FitPart) -> FittedPart:
    """Fit a table's encoder to the statistics of all its shards; return it sealed."""
    seal, choice = seal_and_encoders(site, number)
    shards = []
    described = list[Detail | None]()
    for shard in seal.shards:
        sealed = required(body.statistics.get(str(shard)), f"statistics/{shard}")
        other = required(body.shards.get(str(shard)), f"shards/{shard}")
        try:
            packet = parse(seal.open(sealed, STATISTICS, shard), "text", packet_of)
            statistics = required(
                decode(ShardStatistics, packet).parts.get(shard), "part"
            )
            shards.append(from_wire(statistics, choice, other.rows))
            described.append(statistics.describes)
        except TPFlowerError as error:
            raise SchemaError(
                f"the statistics of site {other.site!r} cannot be used: {error}"
            ) from None
    encoder, fitted = _fit(site, number, choice, shards, _coarsest_detail(described))
    text = json.dumps(encoder.to_json()).encode()
    sealed = seal.seal(text, ENCODER, seal.shards[0], site.round.digest)
    return msgspec.structs.replace(fitted, sealed=sealed)


def _coarsest_detail(described: Sequence[Detail | None]) -> Detail | None:
    """Return the detail in which all shards may be described, None if one may not."""
    if None in described:
        return None
    if Detail.STEPS in described:
        return Detail.STEPS
    return Detail.PERCENT


def seal_and_encoders(site: Site, number: int) -> tuple[ShardSeal, TableChoice]:
    """Return the seal of a part's table, and the encoders that its features get."""
    name = _STATISTICS.format(number)
    meta = site.store.load(name).meta if site.store.has(name) else {}
    if meta.get("shards") is None:
        raise MessageError(
            f"part {number} has no statistics of a table in several shards, or not at "
            "this point of the run"
        )
    shards = msgspec.convert(meta["shards"], TableShards)
    key = site.group_key(shards.group)
    table = site.fragment(number).table
    return ShardSeal(key, site.run, table, tuple(shards.numbers)), _choice(
        meta["encoders"]
    )


def _fit(
    site: Site,
    number: int,
    choice: TableChoice,
    shards: list[Statistics],
    describes: Detail | None,
) -> tuple[TableEncoder, FittedPart]:
    """Fit and store the encoder of a table; return it, and the reply about it."""
    statistics = merge_tables(shards)
    encoder = fit(choice.table, statistics)
    _store(site, number, encoder)
    columns = dict.fromkeys(choice.specs, 0)
    for encoding in encoder.encodings:
        columns[encoding.name] += len(encoding.feature_names)
    reply = FittedPart(columns=EncodedColumns(columns, bool(encoder.fitted)))
    if describes is not None:
        features = [
            summary_of(*item, encoder.encodings, describes)
            for item in statistics.items()
        ]
        extracted = site.extracted(number)
        least_share = 0.0
        if describes is Detail.STEPS:
            least_share = FEW_TEXTS
        for index, feature in enumerate(features):
            if feature.listed is not None and nearly_numbers(
                extracted.column(feature.column), least_share
            ):
                features[index] = msgspec.structs.replace(feature, nearly_numbers=True)
        reply = msgspec.structs.replace(reply, features=features)
    return encoder, reply


def _store(site: Site, number: int, encoder: TableEncoder) -> None:
    site.store.save(
        _ENCODER.format(number), Entry({}, encoder.for_site(site.hasher()).to_json())
    )


def fitted_encoder(
    site: Site, number: int, sealed: AnyArray | None = None
) -> SiteEncoder:
    """Return the encoder of a part's table; ``sealed`` if another shard has fitted it.

    Raises:
        SiteError: no shard of the table has sealed it in this run.
        SchemaError: it is not an encoder.
    """
    name = _ENCODER.format(number)
    if not site.store.has(name):
        seal, _ = seal_and_encoders(site, number)
        text = seal.open(required(sealed, "encoder"), ENCODER, seal.shards[0])
        document = parse(text, "encoder", json.loads)
        _store(site, number, parse(document, "encoder", TableEncoder.from_json))
    return SiteEncoder.from_json(site.store.load(name).meta)
