"""Predicting at a site: score rows with its part of a saved model.

The rows are those in joined rows, and a training run left the part here. The server
names model, version and part; the site sends nothing unless the part is of this very
table and of these very features, as any other query would disclose the model, not the
rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from client_apps.data.database import cannot_write
from client_apps.data.saved_models import SavedModel, part_folder
from client_apps.operator.participant import make_model
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Shard, scored
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.errors import ModelError, SiteError
from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
from tp_flower.keyed_hash import HashArray, KeyedHasher
from tp_flower.learning.models.local_model import LocalModel
from tp_flower.model_names import ModelVersion
from tp_flower.privacy.gradients import check_scores
from tp_flower.privacy.mechanisms import Reservation
from tp_flower.privacy.plan import PartPlan, plan_prediction
from tp_flower.protocol.codec import check_sizes, parse
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
from tp_flower.protocol.packet import unpack_bits
from tp_flower.protocol.setup_messages import RowKeyColumns
from tp_flower.protocol.training_messages import PrivacyTerms
from tp_flower.query import Fragment
from tp_flower.reports.predictions import (
    OCCURRENCE,
    ROW,
    ROW_HASH,
    Outputs,
    Scored,
    hex_texts,
    prediction_table,
    write_predictions,
)
from tp_flower.sources.policy import SCORES


@dataclass(frozen=True)
class _Ready:
    """A part whose model is there, and whose releases are planned.

    Attributes:
        rows: (k,), positions of the rows to score.
    """

    model: LocalModel
    saved: SavedModel
    rows: np.ndarray[Any, np.dtype[np.int64]]
    plan: PartPlan


def score(site: Site, request: ScoreRequest) -> ScoreReply:
    """Reply with the local scores of the rows that are named, each once."""
    ready = {
        number: _ready(site, number, body, request)
        for number, body in site.each(request.parts)
    }
    _set_aside(site, ready)
    scored_parts: dict[int, ScoredPart] = {}
    for number, part in site.each(ready):
        scores = _scores(site, number, part, request.privacy)
        outgoing = site.outgoing(number, part.plan)
        scored_parts[number] = ScoredPart(
            rows=len(part.rows), scores=outgoing.scores(scores)
        )
    site.pay()
    return ScoreReply(ledger=site.ledger.lines(site.store.run), parts=scored_parts)


def _ready(
    site: Site,
    number: int,
    body: ScorePart,
    request: ScoreRequest,
) -> _Ready:
    guard, source, extracted = Guard(site), site.source(number), site.extracted(number)
    guard.check_plan(source, (SCORES,), request.privacy)
    rows = np.flatnonzero(unpack_bits(body.rows, extracted.rows))
    guard.check_rows(source, len(rows), f"the scores of table {extracted.table!r}")
    saved = _saved(site, body, ModelVersion(request.model_name, request.model_version))
    _check_fits(saved, Fragment.from_json(site.fragment(number)))
    width = saved.encoder.encoder.width
    model = make_model(saved.spec, width, request.device)
    model.parameters = saved.parameters
    if request.privacy.covers_predictions:
        check_scores(model, width)
    plan = plan_prediction(request.privacy, saved.spec.output_scale or 1.0)
    return _Ready(model, saved, rows, plan)


def _saved(site: Site, body: ScorePart, model: ModelVersion) -> SavedModel:
    """Return the part of the model that a request names."""
    root = site.state_folder
    if root is None:
        raise ModelError("this site keeps no models: its state-dir is ':memory:'")
    folder = part_folder(root, model, body.model_part)
    if not folder.is_dir():
        raise ModelError(f"this site has no part {body.model_part} of model {model}")
    return SavedModel.load(folder, body.digest)


def _check_fits(saved: SavedModel, fragment: Fragment) -> None:
    """Refuse rows that are not made as those that the model was trained on."""
    trained = saved.fragment
    for aspect, queried, saved_one in (
        ("table", fragment.name.lower(), trained.name.lower()),
        ("alias", fragment.table, trained.table),
        ("features", fragment.features, trained.features),
        ("grouping", _grouping(fragment), _grouping(trained)),
    ):
        if queried != saved_one:
            raise ModelError(
                f"the model's part is of another table or query: its {aspect} differs "
                f"from that of {fragment.table!r} in this one"
            )


def _grouping(fragment: Fragment) -> object:
    """Return the columns and groups of a sub-query; its filters may differ."""
    own = fragment.subquery
    return None if own is None else (own.columns, own.groups)


def _set_aside(site: Site, ready: Mapping[int, _Ready]) -> None:
    """Reserve the covered releases, and note the others."""
    sources = {number: site.source(number) for number in ready}
    releases = [
        scored(Shard.of(site, number, sources[number]), part.plan)
        for number, part in ready.items()
    ]
    budgets = Guard(site).budgets(list(sources.values()))
    covered = [
        Reservation(release, 1) for release in releases if release.mechanism is not None
    ]
    site.reserve(covered, budgets)
    site.ledger.note(
        site.store.run, [release for release in releases if release.mechanism is None]
    )


def _scores(site: Site, number: int, part: _Ready, privacy: PrivacyTerms) -> FloatArray:
    """Return the scores (k, d_c) of a part's rows, without noise."""
    features = site.tables.encode(
        number,
        part.saved.encoder,
        part.rows,
        is_private=privacy.covers_predictions,
    )
    return part.model.scores(features)


PREDICTIONS: Final = "predictions"
"""Folder below the state folder."""
NAMES: Final = "row-keys"
RUN_SHOWN: Final = 8
PRIVATE_FILE: Final = 0o600
PURPOSE: Final = "row keys of predictions"
_NULL: Final = "null"
_HEAD: Final = r"^[a-z]+[0-9]+:"
"""What a key's canonical text begins with: its kind and its length."""
_WHOLE: Final = r"^-?[0-9]{1,18}$"
"""Numbers that int64 has."""


@dataclass(frozen=True)
class RowKey:
    """The row key of a part: the columns that name its rows.

    Attributes:
        names: of its columns, which are the fragment's last keys.
        leaves: whether its keyed hash leaves the site.
    """

    names: tuple[str, ...] = ()
    leaves: bool = False

    @property
    def columns(self) -> int:
        """How many of the fragment's last keys it consists of."""
        return len(self.names)

    @classmethod
    def of(cls, columns: RowKeyColumns | None, keys: int) -> Self:
        """Return the row key of a request."""
        if columns is None:
            return cls()
        names = columns.names
        taken = {name.lower() for name in names} & {ROW, OCCURRENCE, ROW_HASH}
        if taken or len(set(names)) < len(names) or not 0 < len(names) <= keys:
            raise SiteError(
                f"malformed request: 'names' of a row key must be 1 to {keys} that "
                "differ from each other and from the columns of predictions"
            )
        return cls(names, columns.leaves)

    def of_shard(self, extracted: ExtractedShard) -> tuple[ExtractedKey, ...]:
        """Return the keys that name the rows."""
        keys = extracted.keys
        return keys[len(keys) - self.columns :]

    def plain(self, extracted: ExtractedShard) -> dict[str, pa.Array]:
        """Return its columns in the clear, (n,) each."""
        keys = zip(self.names, self.of_shard(extracted), strict=True)
        return {name: _on_rows(key, _values(key)) for name, key in keys}

    def hashes(self, extracted: ExtractedShard, hasher: KeyedHasher) -> HashArray:
        """Return 128 bits of keyed hash of each row's key, uint64 (n, 2).

        A column that is NULL is a value like others.
        """
        texts = [
            pc.fill_null(_on_rows(key, _whole(key.texts)), _NULL)
            for key in self.of_shard(extracted)
        ]
        # each text carries its length: no two keys are one text
        joined = pc.binary_join_element_wise(*texts, "").dictionary_encode()
        hashes = hasher.purpose(PURPOSE).hash_texts(joined.dictionary)[:, :2]
        return np.ascontiguousarray(hashes[joined.indices.to_numpy()])


def leave_hashes(
    site: Site, number: int, row_key: RowKey, extracted: ExtractedShard
) -> HashArray:
    """Return the hashes of a part's row keys, and keep which row each of them is."""
    hashes = row_key.hashes(extracted, site.hasher())
    root, run = site.state_folder, site.store.run
    if root is None:
        return hashes
    columns = {
        ROW_HASH: hex_texts(hashes),
        ROW: pa.array(np.arange(extracted.rows)),
        **row_key.plain(extracted),
    }
    folder = root / PREDICTIONS / f"{NAMES}-{run[:RUN_SHOWN]}"
    path = folder / f"part-{number}.parquet"
    try:
        write_predictions(pa.table(columns), path, {}, PRIVATE_FILE)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return hashes


def _whole(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    return texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts


def _on_rows(key: ExtractedKey, values: pa.Array) -> pa.Array:
    """Return each row's value of the distinct ones; missing where it is NULL."""
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
    root, run = site.state_folder, site.store.run[:RUN_SHOWN]
    if root is None:
        raise SiteError(
            "this site can keep no predictions: its state-dir is ':memory:'"
        )
    classes = tuple(request.classes)
    if len(set(classes)) != len(classes):
        raise SiteError("malformed request: 'classes' must differ")
    outputs = parse(request.loss, "loss", lambda loss: Outputs(loss, classes))
    model = ModelVersion(request.model_name, request.model_version)
    folder = root / PREDICTIONS / f"{model.name}-{model.version}-{run}"
    facts = {"model": str(model), "query": request.query, "run": run}
    parts: dict[int, DeliveredPart] = {}
    for number, body in site.each(request.parts):
        extracted = site.extracted(number)
        scored = _scored(body, extracted.rows, outputs)
        table = prediction_table(_named(body, extracted, scored), scored, outputs)
        path = folder / f"part-{number}.parquet"
        try:
            write_predictions(table, path, facts, PRIVATE_FILE)
        except OSError as error:
            raise cannot_write(folder, error) from error
        file = path.relative_to(root).as_posix()
        parts[number] = DeliveredPart(rows=len(scored.rows), file=file)
    return DeliverReply(parts)


def _scored(body: DeliverPart, total: int, outputs: Outputs) -> Scored:
    """Return the joined rows of a part of ``total`` rows that the server has sent."""
    rows = body.rows.astype(np.int64)
    if rows.size and rows.max() >= total:
        raise SiteError(
            f"malformed request: array 'rows' must hold numbers from 0 to {total - 1}"
        )
    if (np.diff(rows) < 0).any():
        raise SiteError("malformed request: array 'rows' must ascend")
    check_sizes(body, outputs=outputs.count)
    return Scored(rows, body.scores, unpack_bits(body.partial, len(rows)))


def _named(
    body: DeliverPart, extracted: ExtractedShard, scored: Scored
) -> dict[str, pa.Array]:
    """Return the names of the joined rows: the row of the table, and its key."""
    row_key = RowKey.of(body.row_key, len(extracted.keys))
    rows = pa.array(scored.rows)
    columns = row_key.plain(extracted).items()
    return {ROW: rows, **{name: column.take(rows) for name, column in columns}}
