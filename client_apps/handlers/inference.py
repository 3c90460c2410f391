"""Predicting at a site: score rows with its part of a saved model.

The rows are those that appear in joined rows; the part was left here by a training run.
The server names model, version and part. The site sends nothing unless the part belongs
to this table and to these features, because any other query would disclose the model
rather than the rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from client_apps.data.database import cannot_write
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.operator.masks import are_masked, score_masks
from client_apps.operator.participant import Releaser, make_model, sent_scores
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
from tp_flower.features.encoder import SiteEncoder
from tp_flower.files import PRIVATE
from tp_flower.keyed_hash import HashArray, KeyedHasher, hex_texts
from tp_flower.learning.models.local_model import LocalModel
from tp_flower.model_names import ModelVersion
from tp_flower.privacy.gradients import check_scores
from tp_flower.privacy.mechanisms import Release
from tp_flower.privacy.plan import plan_prediction
from tp_flower.privacy.score_masks import ScoreMasks
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


class _Ready(NamedTuple):
    """A loaded part of a model, and the positions (k,) of the rows that it scores."""

    model: LocalModel
    encoder: SiteEncoder
    rows: np.ndarray[Any, np.dtype[np.int64]]
    releaser: Releaser
    masks: ScoreMasks | None


def score(site: Site, request: ScoreRequest) -> ScoreReply:
    """Reply with the local scores of the requested rows, one each."""
    ready = {
        number: _ready(site, number, body, request)
        for number, body in site.each(request.parts)
    }
    set_aside(site, (_planned(site, part) for part in ready.values()))
    parts: dict[int, ScoredPart] = {}
    is_private = request.privacy.covers_predictions
    for number, (model, encoder, rows, releaser, masks) in site.each(ready):
        features = site.tables.encode(number, encoder, rows, is_private=is_private)
        scores = releaser.scores(model.scores(features))
        parts[number] = ScoredPart(
            rows=len(rows),
            scores=sent_scores(scores, masks, slice(None), "scores"),
        )
    site.pay()
    return ScoreReply(ledger=site.ledger.lines(site.store.run), parts=parts)


def _ready(site: Site, number: int, body: ScorePart, request: ScoreRequest) -> _Ready:
    source, extracted = site.source(number), site.extracted(number)
    is_masked = are_masked(request.masking, body)
    check_plan(source, (SCORES,), request.privacy, is_masked=is_masked)
    rows = np.flatnonzero(unpack_bits(body.rows, extracted.rows))
    check_rows(source, len(rows), f"the scores of table {extracted.table!r}")
    saved = _saved(site, body, ModelVersion(request.model_name, request.model_version))
    _check_fits(saved, site.fragment(number))
    source.policy.check_model(saved.spec.kind)
    width = saved.encoder.encoder.width
    model = make_model(saved.spec, width, request.device)
    model.parameters = saved.parameters
    if request.privacy.covers_predictions:
        check_scores(model, width)
    scale, rows_per_unit = saved.spec.output_scale or 1.0, source.policy.rows_per_unit
    plan = plan_prediction(request.privacy, scale, rows_per_unit)
    join_keys = site.join_keys(number)
    masks = score_masks(request.masking, body, join_keys, rows, site.group_key)
    note_unmatched(site, number, masks)
    return _Ready(model, saved.encoder, rows, site.releaser(number, plan), masks)


def _saved(site: Site, body: ScorePart, model: ModelVersion) -> SavedModel:
    root = site.state_folder
    if root is None:
        raise ModelError("this site keeps no models: its state-dir is ':memory:'")
    folder = part_folder(root, model, body.model_part)
    if not folder.is_dir():
        raise ModelError(f"this site has no part {body.model_part} of model {model}")
    return SavedModel.load(folder, body.digest)


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


def _planned(site: Site, part: _Ready) -> tuple[Release, int]:
    """Return the scores of rows to predict, protected by their plan."""
    (use,), number = part.releaser.plan.uses, part.releaser.number
    scope = "given the model and its encoder, which come from an earlier run"
    if use.mechanism is None:
        scope = score_scope(part.masks)
    return release(site, number, Action.SCORE, use.what, scope, use.mechanism), 1


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
        scored = _scored(body, extracted.rows, outputs)
        row_key = check_row_key(body.row_key, len(extracted.keys))
        rows = pa.array(scored.rows)
        in_clear = _plain_key(row_key, extracted).items()
        names = {ROW: rows, **{name: column.take(rows) for name, column in in_clear}}
        table = prediction_table(names, scored, outputs)
        file = _write(table, folder, number, facts).relative_to(root).as_posix()
        parts[number] = DeliveredPart(rows=len(scored.rows), file=file)
    return DeliverReply(parts)


def _scored(body: DeliverPart, total: int, outputs: Outputs) -> Scored:
    """Return the joined rows that the server sent for a part of ``total`` rows."""
    rows = body.rows.astype(np.int64)
    check_positions(rows, "rows", total)
    if (np.diff(rows) < 0).any():
        raise MessageError("array 'rows' must ascend")
    check_sizes(body, outputs=outputs.count)
    return Scored(rows, body.scores, unpack_bits(body.partial, len(rows)))
