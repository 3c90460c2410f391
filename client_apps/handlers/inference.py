"""Predicting at a site: score rows with its part of a saved model.

The rows are those that appear in joined rows; the part was left here by a training run.
The server names model, version and part. The site sends nothing unless the part belongs
to this table and to these features, because any other query would disclose the model
rather than the rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from client_apps.data.database import cannot_write
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.operator.masks import are_masked, score_masks
from client_apps.operator.participant import make_model, sent_scores
from client_apps.privacy.guard import check_plan, check_rows
from client_apps.privacy.ledger_entries import (
    note_unmatched,
    release,
    score_scope,
    set_aside,
)
from client_apps.rounds.site import Site
from tp_flower.errors import MessageError, ModelError, SiteError
from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
from tp_flower.files import PRIVATE
from tp_flower.keyed_hash import HashArray, KeyedHasher, hex_texts
from tp_flower.learning.models.local_model import LocalModel
from tp_flower.model_names import ModelVersion
from tp_flower.privacy.gradients import check_scores
from tp_flower.privacy.mechanisms import Release
from tp_flower.privacy.plan import plan_prediction
from tp_flower.protocol.codec import check_positions, check_sizes, parse
from tp_flower.protocol.inference_messages import (
    DeliveredPart,
    DeliverPart,
    DeliverReply,
    DeliverRequest,
    ScoredPart,
    ScorePart,
    ScoreReply,
    ScoreRequest,
)
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.setup_messages import RowKeyColumns
from tp_flower.query import Fragment
from tp_flower.reports.predictions import (
    OCCURRENCE,
    ROW,
    ROW_HASH,
    Outputs,
    Scored,
    prediction_table,
    write_predictions,
)
from tp_flower.sources.policy import SCORES


def score(site: Site, request: ScoreRequest) -> ScoreReply:
    """Reply with the local scores of the requested rows, one each."""
    scored = {
        number: _scored(site, number, body, request)
        for number, body in site.each(request.parts)
    }
    set_aside(site, ((planned, 1) for _, planned in scored.values()))
    site.pay()
    return ScoreReply(
        ledger=site.ledger.lines(site.store.run),
        parts={number: part for number, (part, _) in scored.items()},
    )


def _scored(
    site: Site, number: int, body: ScorePart, request: ScoreRequest
) -> tuple[ScoredPart, Release]:
    """Return the scores of a part's rows, and how their plan protects them."""
    source, extracted = site.source(number), site.extracted(number)
    is_masked = are_masked(request.masking, body)
    check_plan(source, (SCORES,), request.privacy, is_masked=is_masked)
    rows = np.flatnonzero(unpack_bits(body.rows, extracted.rows))
    check_rows(source, len(rows), f"the scores of table {extracted.table!r}")
    saved, model = _loaded(site, number, body, request)
    is_private = request.privacy.covers_predictions
    if is_private:
        check_scores(model, saved.encoder.encoder.width)
    scale, rows_per_unit = saved.spec.output_scale or 1.0, source.policy.rows_per_unit
    plan = plan_prediction(request.privacy, scale, rows_per_unit)
    join_keys = site.join_keys(number)
    masks = score_masks(request.masking, body, join_keys, rows, site.group_key)
    note_unmatched(site, number, masks)
    features = site.tables.encode(number, saved.encoder, rows, is_private=is_private)
    scores = site.releaser(number, plan).scores(model.scores(features))
    sent = sent_scores(scores, masks, slice(None), "scores")
    (use,) = plan.uses
    scope = "given the model and its encoder, which come from an earlier run"
    if use.mechanism is None:
        scope = score_scope(masks)
    planned = release(site, number, Action.SCORE, use.what, scope, use.mechanism)
    return ScoredPart(rows=len(rows), scores=sent), planned


def _loaded(
    site: Site, number: int, body: ScorePart, request: ScoreRequest
) -> tuple[SavedModel, LocalModel]:
    """Return the part of the saved model that a request names, and its model."""
    root = site.state_folder
    version = ModelVersion(request.model_name, request.model_version)
    if root is None:
        raise ModelError("this site keeps no models: its state-dir is ':memory:'")
    folder = part_folder(root, version, body.model_part)
    if not folder.is_dir():
        raise ModelError(f"this site has no part {body.model_part} of model {version}")
    saved = SavedModel.load(folder, body.digest)
    _check_fits(saved, site.fragment(number))
    site.source(number).policy.check_model(saved.spec.kind)
    model = make_model(saved.spec, saved.encoder.encoder.width, request.device)
    model.parameters = saved.parameters
    return saved, model


def _check_fits(saved: SavedModel, fragment: Fragment) -> None:
    """Refuse rows that are built differently from the model's training rows."""
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
    """Return the columns and groups of a sub-query, whose filters may differ."""
    subquery = fragment.subquery
    return None if subquery is None else (subquery.columns, subquery.groups)


PREDICTIONS: Final = "predictions"
"""Subfolder of the state folder."""
NAMES: Final = "row-keys"
_RUN_DIGITS: Final = 8
PURPOSE: Final = "row keys of predictions"
_NULL: Final = "null"
_HEAD: Final = r"^[a-z]+[0-9]+:"
"""The start of a key's canonical text: its kind and its length."""
_WHOLE: Final = r"^-?[0-9]{1,18}$"
"""The numbers that fit into an int64."""


def check_row_key(columns: RowKeyColumns | None, keys: int) -> RowKeyColumns:
    """Return the row key of a request: the last ``keys`` of a fragment's keys."""
    if columns is None:
        return RowKeyColumns()
    names = columns.names
    reserved = {name.lower() for name in names} & {ROW, OCCURRENCE, ROW_HASH}
    if reserved or len(set(names)) < len(names) or not 0 < len(names) <= keys:
        raise MessageError(
            f"'names' of a row key must be 1 to {keys} that differ "
            "from each other and from the columns of predictions"
        )
    return columns


def _keys_of_rows(
    row_key: RowKeyColumns, extracted: ExtractedShard
) -> tuple[ExtractedKey, ...]:
    return extracted.keys[len(extracted.keys) - row_key.columns :]


def _plain_key(
    row_key: RowKeyColumns, extracted: ExtractedShard
) -> dict[str, pa.Array]:
    """Return the columns of a row key in the clear, (n,) each."""
    keys = zip(row_key.names, _keys_of_rows(row_key, extracted), strict=True)
    return {name: _on_rows(key, _values(key)) for name, key in keys}


def _hashed_key(
    row_key: RowKeyColumns, extracted: ExtractedShard, hasher: KeyedHasher
) -> HashArray:
    """Return 128 bits of keyed hash of each row's key, uint64 (n, 2).

    A NULL is hashed like any other value.
    """
    texts = [
        pc.fill_null(_on_rows(key, _whole(key.texts)), _NULL)
        for key in _keys_of_rows(row_key, extracted)
    ]
    # each text is preceded by its length, so that no two keys give the same text
    joined = pc.binary_join_element_wise(*texts, "").dictionary_encode()
    hashes = hasher.purpose(PURPOSE).hash_texts(joined.dictionary)[:, :2]
    return np.ascontiguousarray(hashes[joined.indices.to_numpy()])


def leave_hashes(
    site: Site, number: int, row_key: RowKeyColumns, extracted: ExtractedShard
) -> HashArray:
    """Return the hashes of a part's row keys, and store which row each belongs to."""
    hashes = _hashed_key(row_key, extracted, site.hasher())
    root = site.state_folder
    if root is not None:
        columns = {
            ROW_HASH: hex_texts(hashes),
            ROW: pa.array(np.arange(extracted.rows)),
            **_plain_key(row_key, extracted),
        }
        name = f"{NAMES}-{site.store.run[:_RUN_DIGITS]}"
        _write(pa.table(columns), root / PREDICTIONS / name, number, {})
    return hashes


def _write(
    table: pa.Table, folder: Path, number: int, facts: Mapping[str, str]
) -> Path:
    path = folder / f"part-{number}.parquet"
    try:
        write_predictions(table, path, facts, PRIVATE)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return path


def _whole(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _on_rows(key: ExtractedKey, values: pa.Array) -> pa.Array:
    """Return each row's value from the distinct values; missing where it is NULL."""
    return values.take(pa.array(key.codes, mask=key.codes < 0))


def _values(key: ExtractedKey) -> pa.Array:
    """Return the distinct values behind a key's canonical texts."""
    texts = pc.replace_substring_regex(_whole(key.texts), _HEAD, "", max_replacements=1)
    if key.kind == "boolean":
        return pc.equal(texts, "true")
    if key.kind == "time":
        return pc.cast(pc.cast(texts, pa.int64()), pa.timestamp("us", "UTC"))
    if key.kind != "number":
        return texts
    is_whole = pc.all(pc.match_substring_regex(texts, _WHOLE)).as_py()
    return pc.cast(texts, pa.int64() if is_whole else pa.float64())


def deliver(site: Site, request: DeliverRequest) -> DeliverReply:
    """Write the predictions of the parts' rows, a file for each."""
    root, run = site.state_folder, site.store.run[:_RUN_DIGITS]
    if root is None:
        raise SiteError(
            "this site can keep no predictions: its state-dir is ':memory:'"
        )
    classes = tuple(request.classes)
    if len(set(classes)) != len(classes):
        raise MessageError("'classes' must differ")
    outputs = parse(request.loss, "loss", lambda loss: Outputs(loss, classes))
    model = ModelVersion(request.model_name, request.model_version)
    folder = root / PREDICTIONS / f"{model.name}-{model.version}-{run}"
    facts = {"model": str(model), "query": request.query, "run": run}
    parts: dict[int, DeliveredPart] = {}
    for number, body in site.each(request.parts):
        extracted = site.extracted(number)
        scored = _joined_rows(body, extracted.rows, outputs)
        row_key = check_row_key(body.row_key, len(extracted.keys))
        rows = pa.array(scored.rows)
        in_clear = _plain_key(row_key, extracted).items()
        names = {ROW: rows, **{name: column.take(rows) for name, column in in_clear}}
        table = prediction_table(names, scored, outputs)
        file = _write(table, folder, number, facts).relative_to(root).as_posix()
        parts[number] = DeliveredPart(rows=len(scored.rows), file=file)
    return DeliverReply(parts)


def _joined_rows(body: DeliverPart, total: int, outputs: Outputs) -> Scored:
    """Return the joined rows that the server sent for a part of ``total`` rows."""
    rows = body.rows.astype(np.int64)
    check_positions(rows, "rows", total)
    if (np.diff(rows) < 0).any():
        raise MessageError("array 'rows' must ascend")
    check_sizes(body, outputs=outputs.count)
    return Scored(rows, body.scores, unpack_bits(body.partial, len(rows)))
