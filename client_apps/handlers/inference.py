"""Predicting at a site: score rows with its part of a saved model.

The rows are those that appear in joined rows; the part was left here by a training run.
The server names model, version and part. The site sends nothing unless the part belongs
to this table and to these features, because any other query would disclose the model
rather than the rows.

In a run of a resident scorer every request names rows of its own. Each is a query of
the table: its policy, its quota and its ledger count it like the one that has extracted
the rows.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from client_apps.data.database import cannot_write
from client_apps.data.row_effects import KeyNumbers, hash_keys, key_names
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.data.tables import encode_rows
from client_apps.operator.masks import Masked, MaskedRows, are_masked, score_masks
from client_apps.operator.pairs import are_distinct, check_own_regions
from client_apps.operator.participant import make_model, sent_scores
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import (
    admit_query,
    check_model,
    check_plan,
    check_rows,
    list_query,
)
from client_apps.privacy.keys import own_node
from client_apps.privacy.proposal_checks import (
    SCORED,
    agree_in_rows,
    check_begins,
    check_bins,
    check_named,
    check_protection,
    check_unmatched,
    rows_of_run,
)
from client_apps.privacy.score_limits import EncodedPart, admit_scores
from client_apps.rounds.site import PROPOSAL, Site
from tp_flower.arrays import AnyArray, FloatArray, IntArray
from tp_flower.errors import MessageError, ModelError, ScoreRangeError
from tp_flower.events import warn_owner
from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
from tp_flower.features.sparse import EncodedRows
from tp_flower.features.unfamiliar import unfamiliar_features
from tp_flower.files import PRIVATE
from tp_flower.keyed_hash import HashArray, KeyedHasher, hex_texts
from tp_flower.learning.models.local_model import Features, LocalModel, pair_features
from tp_flower.model_names import ModelVersion
from tp_flower.privacy.gradients import check_scores
from tp_flower.privacy.mechanisms import GIVEN_SAVED_MODEL, Release
from tp_flower.privacy.plan import PartPlan, plan_prediction
from tp_flower.privacy.score_masks import ScoreMasks
from tp_flower.protocol.codec import check_positions, check_sizes, required
from tp_flower.protocol.fields import CLEAR, LARGEST
from tp_flower.protocol.inference_messages import (
    DividedPart,
    DividePart,
    DivideReply,
    DivideRequest,
    ScoredPart,
    ScorePart,
    ScoreReply,
    ScoreRequest,
)
from tp_flower.protocol.inspection_messages import InspectPart, InspectRequest
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import row_numbers, unpack_bits
from tp_flower.protocol.training_messages import Masking
from tp_flower.query import Fragment
from tp_flower.query.fragment import Role, named_columns
from tp_flower.reports.predictions import (
    OCCURRENCE,
    ROW,
    ROW_HASH,
    row_keys_folder,
    write_predictions,
)
from tp_flower.sources.policy import FACTORS, SCORES


def divide(site: Site, request: DivideRequest) -> DivideReply:
    """Reply with the regions of the requested rows, which other tables' models read."""
    check_begins(site, Action.DIVIDE)
    check_named(site, request.model_name, request.model_version)
    divided = {
        number: DividedPart(_divide_part(site, number, body, request))
        for number, body in site.each(request.parts)
    }
    return DivideReply(divided)


def _divide_part(
    site: Site, number: int, body: DividePart, request: DivideRequest
) -> AnyArray:
    """Return the regions of a part's rows, uint8 (n,), as its policy allows."""
    site.source(number).policy.check_regions()
    rows = _requested_rows(site, number, body.rows)
    saved, model = load_model(site, number, body, request)
    features = _encode(site, number, saved, rows, is_private=False)
    regions = model.regions(features)
    if regions is None:
        raise MessageError("the saved model divides no rows of this table")
    most = int(regions.max(initial=0)) + 1
    ledger_entries.note_regions(site, number, Action.DIVIDE, most)
    return regions


def score(site: Site, request: ScoreRequest) -> ScoreReply:
    """Reply with the local scores of the requested rows, one each."""
    check_begins(site, Action.SCORE)
    scored = {
        number: _score_part(site, number, body, request)
        for number, body in site.each(request.parts)
    }
    check_protection(site, request.privacy, request.masking)
    check_named(site, request.model_name, request.model_version)
    ledger_entries.set_aside(site, ((planned, 1) for _, planned in scored.values()))
    site.pay()
    # a scorer that stays would be told of all requests so far by each of them
    is_resident = site.terms.is_resident
    return ScoreReply(
        ledger=[] if is_resident else site.ledger.lines(site.store.run),
        parts={number: part for number, (part, _) in scored.items()},
    )


def _score_part(
    site: Site, number: int, body: ScorePart, request: ScoreRequest
) -> tuple[ScoredPart, Release]:
    """Return the scores of a part's rows, and how their plan protects them."""
    source = site.source(number)
    is_masked = are_masked(request.masking, site.terms.join_sides(number))
    check_plan(source, (SCORES,), request.privacy, is_masked=is_masked)
    rows = _requested_rows(site, number, body.rows)
    saved, model = load_model(site, number, body, request)
    is_private = request.privacy.covers_predictions
    if is_private:
        check_scores(model, saved.encoder.encoder.width)
    scale = saved.spec.output_scale or 1.0
    rows_per_unit = source.policy.rows_per_unit
    plan = plan_prediction(request.privacy, scale, rows_per_unit)
    features = _encode(site, number, saved, rows, is_private=is_private)
    pairs = _read_pairs(site, number, body, model, features, is_private=is_private)
    masks = _masks_of(site, number, body, request.masking, rows, pairs)
    encoded = EncodedPart(saved.encoder.encoder, features, rows)
    outputs = saved.spec.outputs
    limit = admit_scores(
        site, number, encoded, body.cover, outputs, has_noise=is_private
    )
    if limit is not None:
        site.scored[number, limit] += outputs * (pairs.most if pairs else 1)
    own_scores = _scores_of(
        model, features, by_key(site, number, saved.effects, rows), pairs
    )
    scores = site.releaser(number, plan).scores(own_scores)
    check_range(scores, masks)
    # a run may score by several models: no two rounds have the same masks
    name = f"scores of round {site.round.number}"
    score_array = sent_scores(scores, masks, slice(None), name)
    if masks is not None:
        site.masked.append(Masked(number, name, score_array))
    release = _release_of(site, number, plan, masks)
    scored = ScoredPart(
        rows=len(rows),
        scores=score_array,
        factors=_factors(site, number, saved, rows, request),
        numbers=_bins_of(site, number, body, saved, features),
    )
    return scored, release


def _encode(
    site: Site, number: int, saved: SavedModel, rows: IntArray, *, is_private: bool
) -> EncodedRows:
    """Return the features of rows (n, d); those of a request are not cached.

    Of rows that are all there at once, the owner is warned where they are unlike those
    that the model was trained on.
    """
    extracted = site.extracted(number)
    if site.terms.is_resident:
        return encode_rows(extracted, saved.encoder, rows, is_private=is_private)
    if not is_private:
        for text in unfamiliar_features(saved.encoder, extracted.column, rows):
            warn_owner(f"table {saved.table}: {text}")
    return site.tables.encode(number, saved.encoder, rows, is_private=is_private)


def _bins_of(
    site: Site,
    number: int,
    body: ScorePart,
    saved: SavedModel,
    features: EncodedRows,
) -> AnyArray | None:
    """Return the bin numbers of rows, by the bins of a model's training, if asked."""
    if not body.takes_bins:
        return None
    if saved.bins is None or site.terms.privacy.covers_predictions:
        raise ModelError(
            "the model's part has no bins of its rows, or its scores have noise, which "
            "bin numbers have not"
        )
    check_bins(site, number, saved.bins.most)
    ledger_entries.note_bins(site, number, Action.SCORE, saved.bins.most)
    return saved.bins.apply(saved.encoder.encoder, features)


def by_key(
    site: Site, number: int, numbers: KeyNumbers | None, rows: IntArray
) -> FloatArray:
    """Return the numbers of the rows' keys that a model has, (n, c); 0 for none."""
    if numbers is None or not len(rows):
        return np.zeros((len(rows), 1))
    names, keys = site.join_key_names(number), site.join_keys(number)
    numbers.check_keys(key_names(names, keys))
    return numbers.find(hash_keys(names, keys, rows))


def _factors(
    site: Site, number: int, saved: SavedModel, rows: IntArray, request: ScoreRequest
) -> AnyArray | None:
    """Return the factors of the rows' keys as they leave, (n, d); None for none.

    Raises:
        ModelError: scores are to leave with noise, and nothing covers factors.
        PolicyError: the policy lets no factors leave.
    """
    if saved.factors is None or not len(rows):
        return None
    if request.privacy.covers_predictions:
        raise ModelError(
            f"the model has factors of the keys of table {saved.table!r}, which no "
            "noise of privacy.predictions covers: train it with factors = 'none'"
        )
    site.source(number).policy.check_release(FACTORS, is_private=False)
    ledger_entries.note(site, number, FACTORS)
    of_rows = by_key(site, number, saved.factors, rows)
    return row_numbers(of_rows)


def _release_of(
    site: Site, number: int, plan: PartPlan, masks: ScoreMasks | None
) -> Release:
    """Return the ledger's entry of a part's scores."""
    (use,) = plan.uses
    scope = f"given {GIVEN_SAVED_MODEL}"
    if use.mechanism is None:
        scope = ledger_entries.score_scope(masks)
    return ledger_entries.release(
        site, number, Action.SCORE, use.what, scope, use.mechanism
    )


class _Pairs(NamedTuple):
    """Distinct pairs of row and region, (m,) each, that are scored in the rows' place.

    ``most`` are the pairs of a row, at most.
    """

    rows: IntArray
    regions: AnyArray
    most: int


def _masks_of(
    site: Site,
    number: int,
    body: ScorePart,
    masking: Masking | None,
    rows: IntArray,
    pairs: _Pairs | None,
) -> ScoreMasks | None:
    """Return the masks of the rows' scores, or of pairs'; None without masking."""
    check_unmatched(site, number, body.unmatched)
    sides = site.terms.join_sides(number)
    answered = site.terms.answered_groups(number)
    masked = MaskedRows(rows, site.join_keys(number), sides, body.unmatched, answered)
    masks = score_masks(masking, masked, site.group_key)
    ledger_entries.note_unmatched(site, number, masks)
    if masks is None or pairs is None:
        return masks
    return masks.split(pairs.rows, pairs.regions)


def _read_pairs(
    site: Site,
    number: int,
    body: ScorePart,
    model: LocalModel,
    features: Features,
    *,
    is_private: bool,
) -> _Pairs | None:
    """Return the pairs that are to be scored, if there are some in the rows' place.

    They are of rows (n, d), whose model reads regions or divides the rows into some.

    Raises:
        MessageError: they are not those of all rows, the model knows no regions, or
            scores have noise.
        PolicyError: the table's rows may not be scored by regions.
    """
    if body.pair_rows is None:
        return None
    if is_private:
        # several draws for one row would tell more than the one that is paid for
        raise MessageError("a row has one score with noise, and not one for each pair")
    pair_rows = body.pair_rows.astype(np.int64)
    regions = required(body.regions, "regions")
    check_sizes(body, pairs=len(pair_rows), rows=site.extracted(number).rows)
    check_positions(pair_rows, "pair_rows", len(features))
    is_whole = len(np.unique(pair_rows)) == len(features)
    if not (is_whole and are_distinct(pair_rows, regions)):
        raise MessageError("'pair-rows' are not those of distinct pairs of all rows")
    if model.takes_regions:
        site.source(number).policy.check_seen_regions()
    else:
        table = site.fragment(number).table
        check_own_regions(model, features, pair_rows, regions, table)
    return _Pairs(pair_rows, regions, int(np.bincount(pair_rows).max(initial=1)))


def _scores_of(
    model: LocalModel, features: Features, effects: FloatArray, pairs: _Pairs | None
) -> FloatArray:
    """Return a model's scores of rows with their effects, or of pairs of them."""
    if pairs is None:
        if model.takes_regions:
            raise MessageError("the saved model reads the regions of another table")
        return model.scores(features) + effects
    regions = pairs.regions if model.takes_regions else None
    paired = pair_features(features, pairs.rows, regions)
    return model.scores(paired) + effects[pairs.rows]


def _requested_rows(site: Site, number: int, bits: AnyArray) -> IntArray:
    """Return the positions of the rows to score.

    They must be the same in all messages of the run, unless a resident scorer asks for
    some at a time.
    """
    extracted = site.extracted(number)
    source = site.source(number)
    is_scored = unpack_bits(bits, extracted.rows)
    rows = np.flatnonzero(is_scored)
    if site.terms.is_resident:
        list_query(site, number, source, site.fragment(number))
        admit_query(site, number, source)
        site.queries[number]["rows"] = len(rows)
    check_rows(source, len(rows), f"the scores of table {extracted.table!r}")
    if not site.terms.is_resident:
        agree_in_rows(site, number, SCORED, is_scored)
    return rows


def check_range(scores: FloatArray, masks: ScoreMasks | None) -> None:
    """Refuse scores (n, d_c) that cannot be sent.

    The server reads the error: it has no score's value.
    """
    limit = LARGEST if masks is None else masks.point.limit
    # false for NaN
    if np.abs(scores).max(initial=0.0) < limit:
        return
    remedy = ""
    if masks is not None:
        remedy = f', or set privacy.scores = "{CLEAR}" if the policies allow it'
    raise ScoreRangeError(
        f"a score is out of range, which for this model is up to {limit:.4g}: a row is "
        "far outside of those that the model was trained on. Look for a column whose "
        "unit or kind has changed, and for extreme values; leave such rows out by "
        f"WHERE{remedy}"
    )


def load_model(
    site: Site,
    number: int,
    body: ScorePart | DividePart | InspectPart,
    request: ScoreRequest | DivideRequest | InspectRequest,
) -> tuple[SavedModel, LocalModel]:
    """Return a saved part, and its model ready to score."""
    version = ModelVersion(request.model_name, request.model_version)
    model_part = required(body.model_part, "model_part")
    digest = required(body.digest, "digest")

    def load() -> tuple[SavedModel, LocalModel]:
        saved = saved_part(site, number, version, model_part, digest)
        model = make_model(saved.spec, saved.encoder.encoder.width, request.device)
        model.parameters = saved.parameters
        return saved, model

    # by its digest: a model that was boosted from another is scored with that one
    saved, model = site.kept(f"model-{number}-{digest}", load)
    check_model(site.source(number), saved.spec, saved.encoder.encoder.width)
    return saved, model


def saved_part(
    site: Site, number: int, version: ModelVersion, part: int, digest: str
) -> SavedModel:
    """Return a part of a saved model, which must fit a part of the run."""
    root = site.state_folder
    if root is None:
        raise ModelError(
            "this site keeps no models: its state-dir is ':memory:'; give it a folder "
            "(in Python, InProcessGrid(..., state=folder))"
        )
    folder = part_folder(root, version, part)
    if not folder.is_dir():
        raise ModelError(f"this site has no part {part} of model {version}")
    saved = SavedModel.load(folder, digest)
    _check_fits(saved, site.fragment(number))
    return saved


def _check_fits(saved: SavedModel, fragment: Fragment) -> None:
    """Refuse a saved part that was trained on another table or query."""
    trained = saved.fragment
    for aspect, queried, saved_one in (
        ("table", fragment.name.lower(), trained.name.lower()),
        ("alias", fragment.table, trained.table),
        ("features", fragment.features, trained.features),
        ("grouping", _grouping(fragment), _grouping(trained)),
    ):
        if queried != saved_one:
            raise ModelError(
                f"the model's part is for another table or query: its {aspect} differs "
                f"from that of {fragment.table!r} in this query"
            )


def _grouping(fragment: Fragment) -> object:
    """Return what a sub-query computes; its filters may differ, and its last cutoff.

    Of one with windows, these are the columns that features read: it has those that the
    query uses, and a prediction has no label.
    """
    subquery = fragment.subquery
    if subquery is None:
        return None
    columns = subquery.columns
    if subquery.is_windowed:
        pieces = (p for p in fragment.pieces() if p.role is Role.FEATURE)
        names = named_columns(pieces)
        columns = tuple(column for column in columns if column.name in names)
    timed = {*subquery.filters} - {*subquery.filters_of_rows}
    grid = subquery.cutoffs and subquery.cutoffs.grid
    step = grid and (grid.step, grid.first, grid.type)
    return (
        columns,
        subquery.groups,
        timed,
        subquery.last,
        step or subquery.has_sealed_cutoffs,
    )


PURPOSE: Final = "row keys of predictions"
_NULL: Final = "null"
_HEAD: Final = r"^[a-z]+[0-9]+:"  # of a key's canonical text: its kind and length
_WHOLE: Final = r"^-?[0-9]{1,18}$"  # the numbers that fit into an int64


def check_row_key(names: Sequence[str], keys: int) -> None:
    """Refuse names that cannot be those of the last of a fragment's ``keys``."""
    reserved = {name.lower() for name in names} & {ROW, OCCURRENCE, ROW_HASH}
    if reserved or len(set(names)) < len(names) or len(names) > keys:
        raise MessageError(
            f"'row-key' must be at most {keys} names that differ "
            "from each other and from the columns of predictions"
        )


def _row_keys(
    row_key: Sequence[str], extracted: ExtractedShard
) -> tuple[ExtractedKey, ...]:
    keys = extracted.keys
    return keys[len(keys) - len(row_key) :]


def _hashed_key(
    row_key: Sequence[str], extracted: ExtractedShard, hasher: KeyedHasher
) -> HashArray:
    """Return 128 bits of keyed hash of each row's key, uint64 (n, 2).

    A NULL is hashed like any other value.
    """
    texts = [
        pc.fill_null(_spread_over_rows(key, _as_one_array(key.texts)), _NULL)
        for key in _row_keys(row_key, extracted)
    ]
    # each text is preceded by its length, so that no two keys give the same text
    joined = pc.binary_join_element_wise(*texts, "").dictionary_encode()
    hashes = hasher.purpose(PURPOSE).tag_texts(joined.dictionary)
    of_rows: HashArray = hashes[joined.indices.to_numpy()]
    return of_rows


def leave_hashes(
    site: Site, number: int, row_key: Sequence[str], extracted: ExtractedShard
) -> HashArray:
    """Return the hashes of a part's row keys, and store which row each belongs to."""
    hashes = _hashed_key(row_key, extracted, site.private_hasher())
    if (root := site.state_folder) is not None:
        keys = zip(row_key, _row_keys(row_key, extracted), strict=True)
        columns = {
            ROW_HASH: hex_texts(hashes),
            ROW: pa.array(np.arange(extracted.rows)),
            **{name: _spread_over_rows(key, key_values(key)) for name, key in keys},
        }
        folder = row_keys_folder(root, site.store.run)
        try:
            write_predictions(
                pa.table(columns), folder / f"part-{number}.parquet", {}, PRIVATE
            )
        except OSError as error:
            raise cannot_write(folder, error) from error
    return hashes


def drop_unused_keys(site: Site) -> None:
    """Remove the row keys of a run's parts of which no prediction was made.

    Nor are those of a run that served of use: its predictions are in no file, and the
    rows that it has scored are not stored.
    """
    root = site.state_folder
    if root is None or not site.store.has(PROPOSAL):
        return
    folder = row_keys_folder(root, site.store.run)
    node = own_node(site)
    # sites of a simulation may have one state folder
    unused = [
        file
        for number, part in site.terms.proposal.parts.items()
        if part.node == node and SCORED not in rows_of_run(site, number)
        if (file := folder / f"part-{number}.parquet").exists()
    ]

    def remove() -> None:
        for file in unused:
            file.unlink(missing_ok=True)
        with suppress(OSError):
            # others of the run are in use
            folder.rmdir()

    if unused:
        site.changes.add(then=remove)


def _as_one_array(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(texts, pa.ChunkedArray):
        return texts.combine_chunks()
    return texts


def _spread_over_rows(key: ExtractedKey, values: pa.Array) -> pa.Array:
    """Return each row's value from the distinct values; missing where it is NULL."""
    return values.take(pa.array(key.codes, mask=key.codes < 0))


def key_values(key: ExtractedKey) -> pa.Array:
    """Return the distinct values behind a key's canonical texts."""
    texts = pc.replace_substring_regex(
        _as_one_array(key.texts), _HEAD, "", max_replacements=1
    )
    if key.kind == "boolean":
        return pc.equal(texts, "true")
    if key.kind == "time":
        return _times(texts)
    if key.kind != "number":
        return texts
    is_whole = pc.all(pc.match_substring_regex(texts, _WHOLE)).as_py()
    return pc.cast(texts, pa.int64() if is_whole else pa.float64())


def _times(texts: pa.Array) -> pa.Array:
    """Return times from microseconds as text; infinite ones are missing."""
    is_finite = pc.invert(pc.match_substring(texts, "infinity"))
    texts = pc.if_else(is_finite, texts, pa.scalar(None, pa.string()))
    if not pc.any(pc.match_substring(texts, ".")).as_py():
        return pc.cast(pc.cast(texts, pa.int64()), pa.timestamp("us", "UTC"))
    thousand = pa.scalar(1000, pa.decimal128(4, 0))
    nanoseconds = pc.multiply(pc.cast(texts, pa.decimal128(22, 3)), thousand)
    return pc.cast(pc.cast(nanoseconds, pa.int64()), pa.timestamp("ns", "UTC"))
