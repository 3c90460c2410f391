"""The manifest of a trained model, which the server keeps, and the sites of the model.

The parts of a model stay at their sites. The manifest identifies them by digest, and
has what the server needs for predictions: base score, loss, classes, the query, the
tables' columns and mean scores, and how many columns their features are encoded as.

The file is JSON, ``{"format", "version", "sha256", "model"}``; the digest covers the
content of ``model``, so that a damaged or edited file is refused.

A shard is scored with the part that was trained on it: on the same table, at the same
site. All shards of a table share one model, so a new shard at a site is scored with the
part of another shard there.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec
from sqlglot import exp

from strategies.run.exchange import Part
from strategies.run.sites import Inventory
from strategies.setup.columns import ColumnName, Columns
from tp_flower.errors import ModelError, QueryError, SchemaError
from tp_flower.extraction.select_plan import kind_of
from tp_flower.files import write_file
from tp_flower.heads import Head, Sum, head_of
from tp_flower.learning.joint_trees import JointTrees
from tp_flower.methods.method import start_model
from tp_flower.model_names import (
    MANIFEST_FILE,
    ModelVersion,
    find_version,
    versions_in,
)
from tp_flower.objectives import Response, family_of, response_of
from tp_flower.objectives.survival import Baseline, SurvivalResponse
from tp_flower.protocol.fields import Document, Finite
from tp_flower.protocol.setup_messages import EncodedColumns
from tp_flower.protocol.text_readings import ISO, TextReading
from tp_flower.query import BoundQuery
from tp_flower.query.expressions import parse_expression, render
from tp_flower.query.fragment import Fragment, Role
from tp_flower.query.reads import reads
from tp_flower.reports.console import format_value
from tp_flower.settings.run import MEAN
from tp_flower.sources.entries import quote_toml
from tp_flower.splits import RANDOM, SplitRule

FORMAT: Final = "tp_flower model"
VERSION: Final = 2

Count = Annotated[int, msgspec.Meta(ge=0)]
Scores = Annotated[tuple[Finite, ...], msgspec.Meta(min_length=1)]
"""One number per output, (d_c,), or per number of a vector, (w,)."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """A JSON object of the file, whose fields are checked when it is read."""


class ModelPart(_Record, frozen=True):
    """One part of a model, which the site of one shard keeps.

    ``index`` is the shard's position among the table's in the site's tables file,
    ``digest`` the SHA-256 of the part's files; "" if the site keeps none. The regions
    of a divided table's shards are numbered from ``first_region`` on.
    """

    number: Count
    site: str
    name: str
    index: Count
    digest: str
    first_region: Count = 0


class ModelTable(_Record, frozen=True, kw_only=True):
    """One table of a model.

    Attributes:
        columns: column -> DuckDB type by name at the sites; a UNION ALL has several
            names.
        formats: column -> format of strptime of its days, by name at the sites, where
            texts were read as times that are not ISO 8601.
        features: their expressions, in order (:func:`feature_texts`).
        encoded: by feature, its columns in the encoded rows.
        mean_score: (w,), the mean of the table's vector over the joined training rows;
            a row without a match counts as 0.
        share: of the tables' variances over the same rows; sums to 1 over the tables;
            None where the head has no shares.
        factors: how many numbers each key has whose products with those of another
            table's keys are added to the scores; 0 for none.
        bins: of a column, at most, whose numbers the model's trees read; 0 for none.
        bin_columns: how many columns of them there are.
    """

    table: str
    name: str
    columns: dict[str, dict[str, str]]
    formats: dict[str, dict[str, str]] = {}
    features: tuple[str, ...]
    kind: str
    encoded: EncodedColumns
    parts: tuple[ModelPart, ...]
    mean_score: Scores
    share: Finite | None
    factors: Count = 0
    bins: Count = 0
    bin_columns: Count = 0


class ModelBaseline(_Record, frozen=True, kw_only=True):
    """The cumulative hazard of a score of 0 in a stratum; see ``Baseline``."""

    times: Scores
    hazards: Scores
    stratum: Finite | None = None
    is_thinned: bool = False


class Manifest(_Record, frozen=True, kw_only=True):
    """A trained model, as the server keeps it.

    ``joined_rows`` are the training's, ``held_out`` the digest of which of the query's
    are not, ``tested`` that of those that test and of their labels; ``base_score`` is
    the best constant where the server ``has_base``; metrics are only
    those that are finite; masked scores have room by ``score_unit``; predicted classes
    have the type ``label_kind``; the ``offset`` is what the query adds to the scores of
    rows, "" for nothing; the models of all tables but the ``divided`` one read
    its regions, if there is one. ``trees`` are those of the bins of
    tables, as LightGBM writes them; "" for none; the tables' scores count by
    ``tables_share``. Of times of events there are the ``baselines`` of the strata, and
    the times at which predictions say the probability of no event so far.
    """

    name: str
    model_version: str
    created: str
    status: str
    query: str
    settings: Document
    label_table: str
    label: str
    offset: str = ""
    head: str = Sum.name
    loss: str
    classes: tuple[str, ...]
    label_kind: str = "text"
    base_score: Scores
    has_base: bool = True
    score_unit: Finite = 1.0
    divided: str = ""
    tables: tuple[ModelTable, ...]
    train: dict[str, Finite]
    test: dict[str, Finite]
    joined_rows: Count
    held_out: str = ""
    tested: str = ""
    trees: str = ""
    tables_share: Finite = 1.0
    baselines: tuple[ModelBaseline, ...] = ()
    survival_times: tuple[Finite, ...] = ()
    versions: dict[str, str]

    def __post_init__(self) -> None:
        """Check the model's name and head, and the mean scores of the tables."""
        ModelVersion(self.name, self.model_version)
        try:
            width = head_of(self.head)(self.outputs).width
        except ValueError as error:
            raise ModelError(f"it was trained by another version: {error}") from None
        if len({table.factors for table in self.multiplied}) > 1 or len(
            self.multiplied
        ) not in (0, 2):
            raise ModelError("the manifest is damaged: 'factors' are of no two tables")
        for table in self.tables:
            if len(table.mean_score) != width:
                raise ModelError(
                    f"the manifest is damaged: 'mean-score' of table {table.table!r} "
                    f"has {len(table.mean_score)} numbers, expected {width}"
                )

    @property
    def model(self) -> ModelVersion:
        """Name and version of the model."""
        return ModelVersion(self.name, self.model_version)

    @property
    def start(self) -> str:
        """The model whose scores are added to this one's; "" if there is none."""
        return start_model(self.settings)

    @property
    def outputs(self) -> int:
        """The number of scores of a row, d_c."""
        return len(self.base_score)

    @property
    def joint(self) -> JointTrees | None:
        """The trees that are added to the tables' scores; None for none."""
        if not self.trees:
            return None
        return JointTrees(self.trees, self.outputs)

    @property
    def scorer(self) -> Head:
        """The head, which makes scores of the tables' vectors."""
        return head_of(self.head)(self.outputs)

    @property
    def multiplied(self) -> tuple[ModelTable, ...]:
        """The two tables whose rows have factors that are multiplied; () for none."""
        return tuple(table for table in self.tables if table.factors)

    @property
    def predicts_label(self) -> bool:
        """Whether the model predicts a label; a clustering does not."""
        return family_of(self.loss, len(self.classes)).takes_label

    @property
    def response(self) -> Response:
        """The meaning of the model's scores."""
        response = response_of(self.loss, self.classes, self.label_kind)
        if not isinstance(response, SurvivalResponse):
            return response
        baselines = tuple(
            Baseline(each.times, each.hazards, each.stratum, each.is_thinned)
            for each in self.baselines
        )
        return replace(response, baselines=baselines, times=self.survival_times)

    @property
    def readings(self) -> dict[ColumnName, TextReading]:
        """The type and the format of the columns that the model was trained on."""
        return {
            (name.lower(), column.lower()): TextReading(
                kind, table.formats.get(name, {}).get(column, ISO)
            )
            for table in self.tables
            for name, columns in table.columns.items()
            for column, kind in columns.items()
        }

    def table(self, alias: str) -> ModelTable:
        """Return a table by its alias."""
        return {table.table: table for table in self.tables}[alias]


class _File(msgspec.Struct):
    """The content of a manifest's file, below its digest."""

    format: str
    version: int
    sha256: str
    model: Document


def encode_manifest(manifest: Manifest) -> Document:
    """Return the content of a manifest's file: plain JSON types."""
    content = msgspec.to_builtins(manifest)
    return msgspec.structs.asdict(_File(FORMAT, VERSION, _digest(content), content))


def decode_manifest(data: object) -> Manifest:
    """Return the manifest that ``encode_manifest`` made content of."""
    try:
        file = msgspec.convert(data, _File)
        if file.format != FORMAT:
            raise ModelError(f"the file has format {file.format!r}, not {FORMAT!r}")
        if file.version != VERSION:
            raise ModelError(f"the manifest has version {file.version}, not {VERSION}")
        if _digest(file.model) != file.sha256:
            raise ModelError(
                "the manifest is damaged: its content does not match its digest"
            )
        return msgspec.convert(file.model, Manifest)
    # a number that is not finite has no digest
    except (msgspec.ValidationError, ValueError) as error:
        raise ModelError(f"the manifest is damaged: {error}") from None


def _digest(content: Document) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def manifest_path(home: Path, model: ModelVersion) -> Path:
    """Return the path of a manifest below a home folder."""
    return model.folder(home) / MANIFEST_FILE


def read_manifest(home: Path, model: ModelVersion) -> Manifest:
    """Return the manifest of one version."""
    path = manifest_path(home, model)
    try:
        manifest = decode_manifest(json.loads(path.read_bytes()))
        if manifest.model != model:
            raise ModelError(f"the file is the manifest of {manifest.model}")
    except ModelError as error:
        raise ModelError(f"model {model}: {error} (in {path})") from None
    except FileNotFoundError:
        raise ModelError(
            f"model {model} has no {MANIFEST_FILE} in {path.parent}"
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"model {model}: {path} is damaged: it is not JSON") from None
    return manifest


def resolve(home: Path, text: str) -> Manifest:
    """Return the manifest that ``name@version`` names, or the latest of ``name``."""
    return read_manifest(home, find_version(home, text))


def lineage(home: Path, text: str) -> Iterator[Manifest]:
    """Yield the model that a text names, if any, and those that it was boosted from."""
    if text:
        yield from with_starts(home, resolve(home, text))


def with_starts(home: Path, manifest: Manifest) -> Iterator[Manifest]:
    """Yield a model, and those that it was boosted from: they score as well."""
    yield manifest
    yield from lineage(home, manifest.start)


def divided_tables(home: Path, manifest: Manifest) -> str:
    """Return the tables that a model and its starts divide into regions, or ""."""
    models = with_starts(home, manifest)
    return ", ".join(dict.fromkeys(each.divided for each in models if each.divided))


def factor_tables(home: Path, manifest: Manifest) -> list[str]:
    """Return the tables whose factors leave where a model and its starts score."""
    models = with_starts(home, manifest)
    tables = (table.table for each in models for table in each.multiplied)
    return list(dict.fromkeys(tables))


def saved_models(home: Path) -> Iterator[Manifest]:
    """Yield the manifests below a home folder that can be read."""
    for version in versions_in(home):
        with suppress(ModelError):
            yield read_manifest(home, version)


def write_manifest(home: Path, manifest: Manifest) -> Path:
    """Write a manifest, whole or not at all, and return its path."""
    path = manifest_path(home, manifest.model)
    text = json.dumps(encode_manifest(manifest), indent=2, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(path, [text.encode()], is_durable=True)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}") from None
    return path


def metrics_of_test(manifest: Manifest) -> str:
    """Return the metrics of a model's held-out rows, and which rows those were."""
    split = SplitRule.read(str(manifest.settings.get("test-split", RANDOM)))
    share = float(str(manifest.settings["test-fraction"]))
    sample = float(str(manifest.settings.get("sample", 1.0)))
    return f"{metrics_text(manifest.test)} ({split.describe(share, sample)})"


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return the names and values of metrics, "-" for none."""
    return (
        ", ".join(f"{name} {format_value(value)}" for name, value in metrics.items())
        or "-"
    )


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics; JSON has no other numbers.

    >>> finite_metrics({"auc": float("nan"), "loss": 0.5})
    {'loss': 0.5}
    """
    return {name: float(x) for name, x in metrics.items() if math.isfinite(x)}


def feature_texts(fragments: Sequence[Fragment]) -> tuple[str, ...]:
    """Return ``name = expression`` of every feature of a table, in order."""
    return tuple(
        f"{column[0].name} = {_expressions(fragments, [item.sql for item in column])}"
        for column in zip(*(fragment.features for fragment in fragments), strict=True)
    )


def label_text(fragments: Sequence[Fragment]) -> str:
    """Return the expression of the label; "" if the table has none."""
    return _expressions(fragments, [fragment.label for fragment in fragments])


def offset_text(fragments: Sequence[Fragment]) -> str:
    """Return the expression of the offset; "" if the table has none."""
    return _expressions(fragments, [fragment.offset for fragment in fragments])


def _expressions(fragments: Sequence[Fragment], column: Sequence[str | None]) -> str:
    """Return the distinct expressions of a column, over the hosted tables."""
    texts = [
        _hosted_expression(fragment, sql)
        for fragment, sql in zip(fragments, column, strict=True)
        if sql is not None
    ]
    return " | ".join(dict.fromkeys(texts))


def _hosted_expression(fragment: Fragment, sql: str) -> str:
    """Return an expression over the columns of the hosted table.

    The columns of a sub-query are replaced by the expressions behind them; what it
    groups by is part of their meaning.
    """
    if fragment.subquery is None:
        return sql
    expressions = fragment.subquery.sources
    holder = exp.Paren(this=parse_expression(sql, "feature", aggregates=True))
    for column in list(holder.find_all(exp.Column)):
        inner = parse_expression(
            expressions[column.name], "feature", aggregates=True, windows=True
        )
        column.replace(inner if column is holder.this else exp.Paren(this=inner))
    text = render(holder.this, quote=True)
    groups = ", ".join(sorted(fragment.subquery.groups))
    if fragment.subquery.is_windowed:
        return text
    return f"{text} GROUP BY {groups}{_window(fragment)}"


def _window(fragment: Fragment) -> str:
    """Return which rows a LATERAL sub-query takes for a cutoff; "" for other ones."""
    subquery = fragment.subquery
    if subquery is None or subquery.cutoffs is None:
        return ""
    timed = sorted({*subquery.filters} - {*subquery.filters_of_rows})
    parts = [f" WHERE {' AND '.join(timed)}"] if timed else []
    parts += [f" ORDER BY {', '.join(subquery.last)} DESC"] if subquery.last else []
    if grid := subquery.cutoffs.grid:
        # new rows may have later cutoffs
        parts.append(f" EVERY {grid.step} FROM {grid.first}")
    parts += [" OF KEYS WITH ROWS"] if subquery.has_sealed_cutoffs else []
    return "".join(parts)


@dataclass(frozen=True)
class Missing:
    """By table, the sites of a model that no longer host it; ``gone`` if none does."""

    sites: Mapping[str, tuple[str, ...]]
    gone: frozenset[str]

    def joined_only(self, label_table: str) -> "Missing":
        """Return the missing sites of other tables, whose scores a mean can replace."""
        sites = {
            table: names for table, names in self.sites.items() if table != label_table
        }
        return Missing(sites, self.gone - {label_table})

    def __str__(self) -> str:
        """List the missing sites of each table."""
        return "; ".join(
            f"{', '.join(map(repr, sites))} of table {table!r}"
            for table, sites in self.sites.items()
        )


def find_missing(manifest: Manifest, inventory: Inventory) -> Missing:
    """Return which sites of a model are missing.

    A site may have merged or split its shards of a table: their number is irrelevant.
    """
    hosted = {(shard.table.lower(), shard.site) for shard in inventory.shards}
    sites: dict[str, tuple[str, ...]] = {}
    gone_tables = set()
    for table in manifest.tables:
        missing = [
            part.site
            for part in table.parts
            if (part.name.lower(), part.site) not in hosted
        ]
        if missing:
            sites[table.table] = tuple(dict.fromkeys(missing))
        if not any(inventory.hosts(part.name) for part in table.parts):
            gone_tables.add(table.table)
    return Missing(sites, frozenset(gone_tables))


def check_query(manifest: Manifest, bound: BoundQuery) -> None:
    """Refuse a query whose rows are built differently from the model's."""
    tables = [table.table for table in manifest.tables]
    model = manifest.model
    if set(tables) != set(bound.tables):
        raise QueryError(
            f"model {model} was trained on other tables than the query's"
            + _difference(tables, bound.tables)
        )
    if bound.label_table != manifest.label_table:
        raise QueryError(
            f"the label is in table {manifest.label_table!r} in model {model}, but in "
            f"{bound.label_table!r} in the query"
        )
    _check_offset(manifest, bound)
    for table in manifest.tables:
        fragments = bound.fragments_of(table.table)
        names = [fragment.name for fragment in fragments]
        # a site does not score another table with its part
        if {name.lower() for name in names} != {name.lower() for name in table.columns}:
            raise QueryError(
                f"table {table.table!r} is {' + '.join(map(repr, names))} in the "
                f"query, but {' + '.join(map(repr, table.columns))} in model {model}"
            )
        features = feature_texts(fragments)
        if features != table.features:
            difference = _difference(table.features, features)
            raise QueryError(
                f"table {table.table!r}: the query's features differ from those of "
                f"model {model} "
                "(model-name chooses another)" + (difference or ": their order differs")
            )


def _check_offset(manifest: Manifest, bound: BoundQuery) -> None:
    """Refuse a query whose rows have another offset than the model's."""
    offset = offset_text(bound.fragments_of(bound.label_table))
    if offset == manifest.offset:
        return
    model = manifest.model
    if not manifest.offset:
        raise QueryError(
            f"the query has an offset, {offset}, and model {model} was trained without "
            "one: leave 'AS offset' out"
        )
    instead = f"not {offset}" if offset else "and the query has none"
    raise QueryError(
        f"model {model} was trained beside the offset {manifest.offset}, {instead}: "
        f"select {manifest.offset} AS offset of {manifest.label_table}"
    )


def check_kinds(manifest: Manifest, bound: BoundQuery, columns: Columns) -> None:
    """Refuse columns with values of another kind than the model was trained on.

    Keys may be of another kind, as long as those that are compared are of one.
    """
    trained = manifest.readings
    for fragment in bound.fragments:
        for read in reads(fragment):
            name = (fragment.name.lower(), read.column.lower())
            trained_reading = trained.get(name)
            reading = columns.agreed.get(name)
            is_compared = read.role in (Role.KEY, Role.GROUP)
            if trained_reading is None or reading is None or is_compared:
                continue
            if kind_of(trained_reading.type) != kind_of(reading.type):
                column = quote_toml(read.column)
                trained_type = quote_toml(trained_reading.type)
                raise SchemaError(
                    f"table {fragment.name!r}: column {read.column!r} is "
                    f"{reading.type}, but was {trained_reading.type} when model "
                    f"{manifest.model} was trained ({read.element}): types = "
                    f"{{ {column} = {trained_type} }} in the "
                    "tables file reads it as before, where its values are of that "
                    "type; or train again"
                )


def _difference(of_model: Sequence[str], of_query: Sequence[str]) -> str:
    """Return how the items of a query differ from those of the model; "" if not."""
    missing = [item for item in of_model if item not in of_query]
    extra = [item for item in of_query if item not in of_model]
    differences = [
        f"{title} {', '.join(items)}"
        for title, items in (("missing", missing), ("not in the model", extra))
        if items
    ]
    if not differences:
        return ""
    return f": {'; '.join(differences)}"


def drop_missing(
    manifest: Manifest, bound: BoundQuery, missing: Missing, policy: str
) -> BoundQuery:
    """Return the query in the form that can be answered without the missing sites.

    Tables with missing rows are LEFT JOINed: joined rows without a match there take the
    table's mean score. Of the label table only the rows that some site has are scored.
    """
    lacking = missing.joined_only(bound.label_table)
    if lacking.sites and policy != MEAN:
        raise ModelError(
            f"sites of model {manifest.model} are unavailable: {lacking}; start them, "
            f"or set on-missing = {MEAN!r} to predict with their tables' mean scores"
        )
    if bound.label_table in missing.gone:
        raise ModelError(
            f"table {bound.label_table!r}, whose rows are to be predicted, has no "
            f"site that hosts it (it was at {missing.sites[bound.label_table]})"
        )
    for table in sorted(lacking.sites):
        if cut_off := _tables_behind(bound, table):
            raise ModelError(
                f"table {table!r} is unavailable (missing: {missing}), and "
                f"{', '.join(map(repr, cut_off))} can only be joined through it: a "
                "mean score cannot replace it"
            )
    return replace(bound, outer=bound.outer | lacking.sites.keys())


def _tables_behind(bound: BoundQuery, removed: str) -> list[str]:
    """Return the tables that only joins through one table tie to the label table."""
    reached = {bound.label_table}
    for _ in bound.tables:
        for join in bound.joins:
            ends = {join.left, join.right}
            if removed not in ends and ends & reached:
                reached |= ends
    return [t for t in bound.tables if t != removed and t not in reached]


def model_parts(
    manifest: Manifest, parts: Sequence[Part], inventory: Inventory
) -> dict[int, ModelPart]:
    """Return, by number, the part of the model that scores each part of the run."""
    shards = inventory.by_place
    uses: Counter[tuple[str, str, str, int]] = Counter()
    by_part = {}
    for part in parts:
        shard = shards[part.node, part.shard]
        name = shard.table.lower()
        candidates = [
            item
            for item in manifest.table(part.table).parts
            if (item.name.lower(), item.site) == (name, part.site)
        ]
        exact = [item for item in candidates if item.index == shard.index]
        # a UNION ALL may name one shard twice: its parts are in the same order
        key = (part.table, part.site, name, shard.index)
        choice = exact[uses[key] :] or exact or candidates
        uses[key] += 1
        if not choice:
            raise ModelError(
                f"site {part.site!r} hosts shard {shard.index} of table "
                f"{part.table!r}, but no part of model {manifest.model} for it: the "
                "shard was not in training. Train again, or leave the shard out"
            )
        if not choice[0].digest:
            raise ModelError(
                f"site {part.site!r} has kept no part of model {manifest.model} (table "
                f"{part.table!r}): its state-dir was ':memory:'"
            )
        by_part[part.number] = choice[0]
    return by_part
