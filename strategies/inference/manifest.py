"""What the server keeps of a trained model: the manifest, and where manifests lie.

The parts of a model stay at their sites. The manifest names them by digest, and has
what the server needs to predict with them: base score, loss, classes, the query, the
tables' columns, encoders and mean scores.

The file is JSON, ``{"format", "version", "sha256", "model"}``; the digest is of the
content of ``model``, so that a file that was damaged or edited is refused.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from sqlglot import exp

from strategies.run.exchange import Part
from strategies.run.sites import Inventory
from strategies.training.base import Outcome, RelationalStrategy
from tp_flower.arrays import FloatArray
from tp_flower.errors import ModelError, SchemaError
from tp_flower.features.encoder import TableEncoder
from tp_flower.files import write_file
from tp_flower.learning.models.local_model import NUMPY_KINDS
from tp_flower.model_names import ModelVersion, delete_version, find_version, software
from tp_flower.query.expressions import parse_aggregate, render
from tp_flower.query.fragment import Fragment

LARGEST: Final = sys.float_info.max


class Fields:
    """The fields of a JSON object; each method checks one field's type.

    Every method raises ``ModelError`` where the field is missing or of another type.

    Args:
        data: the object.
        what: it is, for messages.
    """

    def __init__(self, data: object, what: str) -> None:
        if not isinstance(data, Mapping):
            raise ModelError(f"the manifest is damaged: {what} is no object of names")
        self._data: Mapping[str, Any] = data
        self._what = what

    def text(self, name: str) -> str:
        """Return a text."""
        return str(self._checked(name, self._get(name), str, "a text"))

    def count(self, name: str) -> int:
        """Return a whole number from 0 on."""
        value = self._get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a whole number from 0 on")
        return value

    def number(self, name: str) -> float:
        """Return a finite number."""
        return self._numbers(name, [self._get(name)])[0]

    def items(self, name: str) -> list[Any]:
        """Return a list of anything."""
        found: list[Any] = self._checked(name, self._get(name), list, "a list")
        return found

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object of names."""
        found: Mapping[str, Any] = self._checked(
            name, self._get(name), dict, "an object of names"
        )
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        found = self.items(name)
        return tuple(self._checked(name, x, str, "a list of texts") for x in found)

    def texts_by_name(self, name: str) -> dict[str, str]:
        """Return texts by name."""
        found = self.mapping(name)
        for value in found.values():
            self._checked(name, value, str, "texts by name")
        return dict(found)

    def numbers(self, name: str, length: int | None = None) -> list[float]:
        """Return a list of finite numbers, of a given length or not empty."""
        found = self.items(name)
        if not found or length not in (None, len(found)):
            wanted = "at least one" if length is None else str(length)
            raise self._wrong(name, f"a list of {wanted} numbers")
        return self._numbers(name, found)

    def numbers_by_name(self, name: str) -> dict[str, float]:
        """Return finite numbers by name."""
        found = self.mapping(name)
        values = self._numbers(name, list(found.values()))
        return dict(zip(found, values, strict=True))

    def _numbers(self, name: str, values: list[Any]) -> list[float]:
        for value in values:
            # false for NaN and infinity, and for a whole number beyond any float
            is_finite = type(value) in (int, float) and abs(value) <= LARGEST
            if not is_finite:
                raise self._wrong(name, "made of finite numbers")
        return [float(value) for value in values]

    def _get(self, name: str) -> Any:
        if name not in self._data:
            raise ModelError(f"the manifest is damaged: {self._what} has no {name!r}")
        return self._data[name]

    def _checked(self, name: str, value: object, kind: type, wanted: str) -> Any:
        if type(value) is not kind:
            raise self._wrong(name, wanted)
        return value

    def _wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(
            f"the manifest is damaged: {name!r} of {self._what} is not {wanted}"
        )


__all__ = [
    "Manifest",
    "ModelPart",
    "ModelTable",
    "delete_version",
    "manifest_path",
    "read_manifest",
    "resolve",
    "write_manifest",
]

FORMAT: Final = "tp_flower model"
VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"


@dataclass(frozen=True)
class ModelPart:
    """One part of a model: what one shard's site keeps.

    Attributes:
        number: of the part, in the run that trained it.
        site: the organisation.
        name: of the table at the site.
        index: of the shard among the table's in the site's tables file.
        digest: SHA-256 of the part's files, hexadecimal; "" where the site keeps none.
    """

    number: int
    site: str
    name: str
    index: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read what ``to_json`` wrote; raise ``ModelError`` if it is malformed."""
        fields = Fields(data, "a part")
        return cls(
            number=fields.count("number"),
            site=fields.text("site"),
            name=fields.text("name"),
            index=fields.count("index"),
            digest=fields.text("digest"),
        )


@dataclass(frozen=True)
class ModelTable:
    """One table of a model.

    Attributes:
        table: alias in the query.
        name: at the sites, as reports write it.
        columns: column -> DuckDB type by name at the sites; a UNION ALL has several
            names.
        features: what the features are made of, in order
            (:func:`strategies.inference.manifest.feature_texts`).
        kind: of the model: "linear", "mlp" or a factory.
        encoder: of the features.
        parts: in the order of the shards.
        mean_score: (d_c,), the table's local score in the mean over the joined training
            rows; a row without a match counts as 0.
        share: cov(h_i, h) / var(h) over the same rows; sums to 1 over the tables.
    """

    table: str
    name: str
    columns: Mapping[str, Mapping[str, str]]
    features: tuple[str, ...]
    kind: str
    encoder: TableEncoder
    parts: tuple[ModelPart, ...]
    mean_score: FloatArray
    share: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "table": self.table,
            "name": self.name,
            "columns": {name: dict(own) for name, own in self.columns.items()},
            "features": list(self.features),
            "kind": self.kind,
            "encoder": self.encoder.to_json(),
            "parts": [part.to_json() for part in self.parts],
            "mean-score": self.mean_score.tolist(),
            "share": self.share,
        }

    @classmethod
    def from_json(cls, data: object, outputs: int) -> Self:
        """Read what ``to_json`` wrote; raise ``ModelError`` if it is malformed."""
        fields = Fields(data, "a table")
        columns = fields.mapping("columns")
        try:
            encoder = TableEncoder.from_json(fields.mapping("encoder"))
        except SchemaError as error:
            raise ModelError(f"the manifest is damaged: {error}") from None
        return cls(
            table=fields.text("table"),
            name=fields.text("name"),
            columns={n: Fields(columns, "columns").texts_by_name(n) for n in columns},
            features=fields.texts("features"),
            kind=fields.text("kind"),
            encoder=encoder,
            parts=tuple(map(ModelPart.from_json, fields.items("parts"))),
            mean_score=np.array(fields.numbers("mean-score", outputs)),
            share=fields.number("share"),
        )


@dataclass(frozen=True)
class Manifest:
    """A trained model, as the server keeps it.

    Attributes:
        model: name and version.
        created: when the run started, ISO 8601, UTC.
        status: of the run, "completed".
        query: canonical SQL.
        settings: ``Settings.to_dict()``.
        label_table: alias of the table that has the label.
        label: its expression over the table's columns.
        loss: name of the loss.
        classes: names of the label's classes; empty in regression.
        base_score: (d_c,).
        tables: in the order of the query.
        train: metrics on the training rows, those that are finite.
        test: metrics on the held-out rows.
        joined_rows: number of training rows.
        versions: of the software that trained it, by package.
    """

    model: ModelVersion
    created: str
    status: str
    query: str
    settings: Mapping[str, object]
    label_table: str
    label: str
    loss: str
    classes: tuple[str, ...]
    base_score: FloatArray
    tables: tuple[ModelTable, ...]
    train: Mapping[str, float]
    test: Mapping[str, float]
    joined_rows: int
    versions: Mapping[str, str]

    @property
    def outputs(self) -> int:
        """The number of scores of a row, d_c."""
        return len(self.base_score)

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """The parts of all tables."""
        return tuple(part for table in self.tables for part in table.parts)

    def table(self, alias: str) -> ModelTable:
        """Return a table by its alias.

        Raises:
            KeyError: the model has no such table.
        """
        found = [own for own in self.tables if own.table == alias]
        if not found:
            raise KeyError(alias)
        return found[0]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types, with format, version and digest."""
        content = {
            "name": self.model.name,
            "model-version": self.model.version,
            "created": self.created,
            "status": self.status,
            "query": self.query,
            "settings": dict(self.settings),
            "label-table": self.label_table,
            "label": self.label,
            "loss": self.loss,
            "classes": list(self.classes),
            "base-score": self.base_score.tolist(),
            "tables": [table.to_json() for table in self.tables],
            "train": dict(self.train),
            "test": dict(self.test),
            "joined-rows": self.joined_rows,
            "versions": dict(self.versions),
        }
        head = {"format": FORMAT, "version": VERSION, "sha256": _digest(content)}
        return {**head, "model": content}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ModelError: it is of another version, was changed, or is malformed.
        """
        fields = Fields(_content(data), "the model")
        base_score = fields.numbers("base-score")
        outputs = len(base_score)
        return cls(
            model=ModelVersion(fields.text("name"), fields.text("model-version")),
            created=fields.text("created"),
            status=fields.text("status"),
            query=fields.text("query"),
            settings=fields.mapping("settings"),
            label_table=fields.text("label-table"),
            label=fields.text("label"),
            loss=fields.text("loss"),
            classes=fields.texts("classes"),
            base_score=np.array(base_score),
            tables=tuple(
                ModelTable.from_json(own, outputs) for own in fields.items("tables")
            ),
            train=fields.numbers_by_name("train"),
            test=fields.numbers_by_name("test"),
            joined_rows=fields.count("joined-rows"),
            versions=fields.texts_by_name("versions"),
        )


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are numbers: JSON has no other.

    >>> finite({"auc": float("nan"), "loss": 0.5})
    {'loss': 0.5}
    """
    return {name: float(x) for name, x in metrics.items() if math.isfinite(x)}


def manifest_path(home: Path, model: ModelVersion) -> Path:
    """Return where a manifest lies below a home folder."""
    return model.folder(home) / MANIFEST_FILE


def read_manifest(home: Path, model: ModelVersion) -> Manifest:
    """Return the manifest of one version.

    Raises:
        ModelError: there is none, or it is damaged or of another version.
    """
    path = manifest_path(home, model)
    try:
        found = Manifest.from_json(json.loads(path.read_bytes()))
        if found.model != model:
            raise ModelError(f"it is the manifest of {found.model}")
    except ModelError as error:
        raise ModelError(f"model {model}: {error} (in {path})") from None
    except FileNotFoundError:
        raise ModelError(
            f"model {model} has no {MANIFEST_FILE} in {path.parent}"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"model {model}: {path} is damaged: it is no JSON") from None
    return found


def resolve(home: Path, text: str) -> Manifest:
    """Return the manifest that ``name@version`` names, or the latest of ``name``.

    Raises:
        ModelError: there is none (says what is close), or it cannot be used.
    """
    return read_manifest(home, find_version(home, text))


def write_manifest(home: Path, manifest: Manifest) -> Path:
    """Write a manifest, whole or not at all, and return its path.

    Raises:
        ModelError: it cannot be written.
    """
    path = manifest_path(home, manifest.model)
    text = json.dumps(manifest.to_json(), indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, [text.encode()], is_durable=True)
        return path
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}") from None


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _content(data: object) -> Mapping[str, Any]:
    """Return the model of a file whose format, version and digest are right."""
    head = Fields(data, "the file")
    if head.text("format") != FORMAT:
        raise ModelError(f"the file is no {FORMAT}")
    if (version := head.count("version")) != VERSION:
        raise ModelError(f"the manifest is of version {version}, expected {VERSION}")
    content = head.mapping("model")
    try:
        is_whole = _digest(content) == head.text("sha256")
    except ValueError:
        is_whole = False
    if not is_whole:
        raise ModelError(
            "the manifest is damaged: its content is not what its digest says"
        )
    return content


def feature_texts(fragments: Sequence[Fragment]) -> tuple[str, ...]:
    """Return ``name = expression`` of every feature of a table, in order.

    Args:
        fragments: of the table; several where a UNION ALL makes it.
    """
    return tuple(
        f"{feature.name} = {_made(fragments, index)}"
        for index, feature in enumerate(fragments[0].features)
    )


def label_text(fragments: Sequence[Fragment]) -> str | None:
    """Return the expression of the label; None if the table has none."""
    if fragments[0].label is None:
        return None
    texts = [_origin(own, own.label) for own in fragments if own.label is not None]
    return " | ".join(dict.fromkeys(texts))


def _made(fragments: Sequence[Fragment], index: int) -> str:
    texts = [_origin(own, own.features[index].sql) for own in fragments]
    return " | ".join(dict.fromkeys(texts))


def _origin(fragment: Fragment, sql: str) -> str:
    """Return an expression over the columns of the hosted table.

    The columns of a sub-query are replaced by what they stand for; what it groups by
    is a part of their meaning.
    """
    if fragment.subquery is None:
        return sql
    made = {column.name: column.sql for column in fragment.subquery.columns}
    holder = exp.Paren(this=parse_aggregate(sql, "feature"))
    for column in list(holder.find_all(exp.Column)):
        inner = parse_aggregate(made[column.name], "feature")
        is_whole = column is holder.this
        column.replace(inner if is_whole else exp.Paren(this=inner))
    groups = ", ".join(sorted(fragment.subquery.groups))
    return f"{render(holder.this, quote=True)} GROUP BY {groups}"


def make_manifest(strategy: RelationalStrategy[Any]) -> Manifest:
    """Return the manifest of a run that went well.

    Raises:
        RuntimeError: the run has not come to its end.
    """
    training_problem, report, outcome = (
        strategy.training_problem,
        strategy.report,
        strategy.outcome,
    )
    if training_problem is None or not strategy.is_finished:
        raise RuntimeError("there is no model before the run has ended")
    inventory = strategy.inventory
    schemas = inventory.schemas()
    bound = strategy.bind(schemas)
    fragments = {name: bound.fragments_of(name) for name in training_problem.tables}
    tables = tuple(
        ModelTable(
            table=name,
            name=training_problem.names[name],
            columns={own.name: schemas[own.name] for own in fragments[name]},
            features=feature_texts(fragments[name]),
            kind=table.model,
            encoder=training_problem.encoders[name],
            parts=tuple(_part(part, inventory, outcome) for part in table.parts),
            mean_score=outcome.contributions[name].mean_score,
            share=outcome.contributions[name].share,
        )
        for name, table in training_problem.tables.items()
    )
    return Manifest(
        model=strategy.model,
        created=report.started,
        status=report.status,
        query=report.query,
        settings=report.settings,
        label_table=bound.label_table,
        label=label_text(fragments[bound.label_table]) or "",
        loss=training_problem.loss.name,
        classes=training_problem.classes,
        base_score=training_problem.base_score,
        tables=tables,
        train=finite(report.final_train),
        test=finite(report.final_test),
        joined_rows=report.joined_rows_train,
        versions=software(
            has_torch=not {table.kind for table in tables} <= NUMPY_KINDS
        ),
    )


def _part(part: Part, inventory: Inventory, outcome: Outcome) -> ModelPart:
    """Return how a part is found again: by site, table and shard, not by node."""
    (shard,) = (
        own
        for own in inventory.shards
        if (own.node, own.position) == (part.node, part.shard)
    )
    digest = outcome.digests.get(part.number, "")
    return ModelPart(part.number, part.site, shard.table, shard.index, digest)
