"""Predict and evaluate: score the rows of a query with a model that the sites keep.

The rounds are those of extraction, then one for the scores. A prediction needs no
label; the server writes it, with hashes of the row keys that the label table's sites
can tell. An evaluation uses all joined rows: nothing is trained, so nothing is held
out. Labels, weights and offsets leave and are covered as in training.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from flwr.serverapp import Grid

from strategies.disclosures import disclosures, exposure_of, privacy_report
from strategies.inference import manifest as manifests
from strategies.inference.inspection import check_inspection, inspect
from strategies.inference.scoring import Joined, join_rows, score
from strategies.ranks import asks_ranks
from strategies.run.exchange import Replies, Requests, ask
from strategies.run.grid import InProcessGrid
from strategies.run.strategy import RoundListener, RoundStrategy
from strategies.setup.columns import Columns, bind_columns, reading_warnings
from strategies.setup.extract import Extracted
from strategies.setup.labels import beside_offset, gather_labels, objective_of
from strategies.setup.leaks import nearly_perfect, perfect_warning, suspects_of
from strategies.setup.row_weights import (
    declared_weighting,
    drop_weightless,
    row_weights,
)
from tp_flower.arrays import IntArray
from tp_flower.errors import QueryError, SettingsError
from tp_flower.events import owner_warnings
from tp_flower.files import home_folder
from tp_flower.heads import Contribution
from tp_flower.keyed_hash import hex_texts
from tp_flower.objectives import (
    Objective,
    Response,
    Target,
    make_objective,
    no_better,
)
from tp_flower.objectives.survival import SurvivalResponse
from tp_flower.protocol.fields import Document
from tp_flower.protocol.inference_messages import FinishRequest
from tp_flower.protocol.messages import Action
from tp_flower.query import BoundQuery, Query, Unlabelled
from tp_flower.query.parsing import BESIDE_LABEL, OFFSET
from tp_flower.reports import predictions as prediction_files
from tp_flower.reports import records
from tp_flower.settings import Settings
from tp_flower.settings.declare import AUTO, items_of
from tp_flower.settings.run import EVALUATE, PREDICT
from tp_flower.terms.extraction import row_key


class ModelStrategy(RoundStrategy):
    """Base of the strategies that use a saved model.

    ``metrics`` are those of the joined rows, if they are compared with labels.
    """

    _joined: Joined | None = None

    def __init__(
        self,
        query: Query,
        manifest: manifests.Manifest,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        super().__init__(query, settings, on_round, **overrides)
        self.manifest = manifest
        # later cutoffs may need a grid that ends later
        grid = self.settings.cutoff_grid or manifest.settings.get("cutoff-grid", "")
        is_sealed = not grid and bool(manifest.settings.get("sealed-cutoffs"))
        is_sealed = is_sealed or self.settings.sealed_cutoffs
        self.query = query.on_grid(grid).sealing_cutoffs(is_set=is_sealed)
        models = manifests.with_starts(home_folder(), manifest)
        self._with_trees = [model for model in models if model.trees]
        if self._with_trees and self.settings.bins == AUTO:
            # owners are told what the model asks for
            bins = self._with_trees[0].settings["bins"]
            self.settings = self.settings.with_fields(bins=bins)
        self.metrics: dict[str, float] = {}
        self.outcomes: dict[str, object] = {}

    @abstractmethod
    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query over the sites' columns."""

    @abstractmethod
    def model_rounds(
        self, bound: BoundQuery, columns: Columns, missing: manifests.Missing
    ) -> Generator[Requests, Replies, Joined]:
        """Exchange messages until the rows are scored; return them."""

    @property
    def has_label(self) -> bool:
        """Whether the model predicts a label; a clustering does not."""
        return self.manifest.predicts_label

    def rounds(self) -> Generator[Requests, Replies, None]:
        """Check the query against the model, score, and make the sites forget."""
        # for tables that no site hosts any more: their columns at training time
        old_columns = {
            name: dict(columns)
            for table in self.manifest.tables
            for name, columns in table.columns.items()
            if not self.inventory.hosts(name)
        }
        bound, columns = bind_columns(
            lambda schemas: self.bind({**old_columns, **schemas}),
            self.inventory,
            self.manifest.readings,
        )
        manifests.check_query(self.manifest, bound)
        manifests.check_kinds(self.manifest, bound, columns)
        self.warn(*reading_warnings(bound, columns))
        missing = manifests.find_missing(self.manifest, self.inventory)
        bound = manifests.drop_missing(
            self.manifest, bound, missing, self.settings.on_missing
        )
        if sites := missing.sites.get(bound.label_table):
            self.warn(
                f"{', '.join(map(repr, sites))} of table {bound.label_table!r} took "
                "part in the training and not in this run, which is about the rows of "
                "the other sites"
            )
        with owner_warnings(self.warn):
            joined = yield from self.model_rounds(bound, columns, missing)
        self.warn(*joined.extracted.absent)
        yield ask(FinishRequest(), joined.extracted.all_parts)
        self._joined = joined

    def report(self, predictions: Mapping[str, object] | None = None) -> Document:
        """Return the content of `report.json`, see `strategies.inference.predict`."""
        joined = self._joined
        manifest = self.manifest
        if joined is None:
            raise RuntimeError("no row is joined before the rounds are done")
        record = records.RunRecord(**self.record_fields, join_steps=joined.steps)
        label_rows = joined.mapping.tables[joined.bound.label_table].multiplicity
        missing = joined.missing.sites.items()
        content = {
            **record.content(self.settings.mode),
            **record.traffic(),
            "model": {
                "name": manifest.name,
                "version": manifest.model_version,
                "created": manifest.created,
                "strategy": manifest.settings["strategy"],
                "tested": manifests.metrics_of_test(manifest) if manifest.test else "",
                "loss": manifest.loss,
                "classes": manifest.classes,
            },
            "tables": [self._table(joined, name) for name in joined.bound.tables],
            "missing": [{"table": table, "sites": sites} for table, sites in missing],
            "rows": {
                "joined": joined.mapping.joined_rows,
                "label-table": int(np.count_nonzero(label_rows)),
                "partial": int(np.count_nonzero(joined.is_partial)),
            },
            "predictions": predictions,
            "metrics": self.metrics,
            **self.outcomes,
            "privacy": self._privacy(joined),
        }
        return {key: records.plain(value) for key, value in content.items()}

    def _table(self, joined: Joined, name: str) -> records.TableReport:
        """Return the report entry of a table."""
        table = self.manifest.table(name)
        parts = joined.extracted.parts[name]
        return records.TableReport(
            table=name,
            name=table.name,
            rows=joined.extracted.table_rows[name],
            features=table.encoded.width,
            shards=len(parts),
            sites=tuple(part.site for part in parts),
            dropped=table.encoded.dropped,
            multiplicity=records.min_mean_max(joined.mapping.tables[name].multiplicity),
        )

    def _privacy(self, joined: Joined) -> dict[str, object]:
        """Return the `privacy` entry of the report."""
        messages = [Action.SCORE]
        divided = manifests.divided_tables(home_folder(), self.manifest)
        if divided:
            messages.insert(0, Action.DIVIDE)
        if asks_ranks(self.inventory):
            messages.insert(0, Action.RANK)
        if self.settings.inspects:
            messages.append(Action.INSPECT)
        exposure = exposure_of(
            joined.bound,
            joined.extracted.parts,
            self.settings,
            self.inventory,
            messages,
            weight=joined.bound.weight_table or "",
            has_label=self.settings.mode == EVALUATE and self.has_label,
            has_row_key=joined.extracted.row_hashes is not None,
            vectors=self.manifest.scorer.discloses,
            divided=divided,
            sends_factors=manifests.factor_tables(home_folder(), self.manifest),
            scores_bins=bool(self._with_trees),
            metrics_by=self.settings.metrics_by,
        )
        return privacy_report(
            disclosures(exposure),
            self.ledgers,
            self.settings.privacy,
            is_complete=self.is_finished,
        )


class PredictingStrategy(ModelStrategy):
    """Base of the strategies that predict rows, which need no label.

    Attributes:
        response: the meaning of the scores, once rows are joined.
    """

    response: Response

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query with its row key, and without its label."""
        columns = items_of(self.settings.row_key)
        rows = Unlabelled(self.manifest.label_table, columns, keeps=(OFFSET,))
        return self.query.bind(schemas, rows)

    def join_predicted(
        self, bound: BoundQuery, columns: Columns, missing: manifests.Missing
    ) -> Generator[Requests, Replies, Joined]:
        """Return the joined rows that are to be predicted."""
        _check_row_key(self.settings)
        self.response = self._read_response()
        return join_rows(
            bound, columns, missing, self.settings, self.inventory, self.workers
        )

    def predict_rows(
        self, joined: Joined, whole: Joined | None = None
    ) -> Generator[Requests, Replies, pa.Table]:
        """Return the predictions of joined rows, all of the run or some of a whole."""
        scores = yield from score(
            joined, self.manifest, self.settings, self.inventory, whole
        )
        offset = joined.offset
        if offset is not None:
            scores = scores + offset[:, None]
        scored = prediction_files.Scored(joined.label_rows, scores, joined.is_partial)
        return prediction_files.prediction_table(
            partial(row_names, joined.extracted), scored, self.response
        )

    def _read_response(self) -> Response:
        """Return the meaning of the scores, at the times that the run asks for."""
        response = self.manifest.response
        times = self.settings.survival_times
        if not times:
            return response
        if not (isinstance(response, SurvivalResponse) and response.has_survival):
            raise SettingsError(
                "survival-times: the model has no baseline without strata to tell "
                "survival by: leave it empty"
            )
        return replace(response, times=times)


class Predict(PredictingStrategy):
    """Predict the rows of a query with a saved model.

    Attributes:
        predictions: of the joined rows, once they are scored.
    """

    name = PREDICT
    predictions: pa.Table

    def model_rounds(
        self, bound: BoundQuery, columns: Columns, missing: manifests.Missing
    ) -> Generator[Requests, Replies, Joined]:
        """Score the joined rows, and name them."""
        joined = yield from self.join_predicted(bound, columns, missing)
        self.predictions = yield from self.predict_rows(joined)
        return joined


def row_names(extracted: Extracted, rows: IntArray) -> pa.Array:
    """Return names of rows of the label table: keyed hashes of their row keys.

    Without a row key they are their positions.
    """
    hashes = extracted.row_hashes
    if hashes is None:
        return pa.array(rows, pa.int64())
    return hex_texts(hashes[rows])


def _check_row_key(settings: Settings) -> None:
    """Refuse a row key that is ambiguous or clashes with the predictions."""
    names = row_key(settings)
    if len({name.lower() for name in names}) < len(names):
        raise SettingsError(f"row-key names a column twice: {settings.row_key!r}")
    if reserved := sorted(prediction_files.RESERVED & {name.lower() for name in names}):
        raise SettingsError(
            f"row-key: a column called {reserved[0]!r} would clash with a column of "
            "the predictions: rename it in a sub-query"
        )


class Evaluate(ModelStrategy):
    """Measure a saved model on the rows of a query."""

    name = EVALUATE

    def bind(self, schemas: Mapping[str, Mapping[str, str]]) -> BoundQuery:
        """Return the query, with its label if the model predicts one."""
        check_inspection(self.manifest, self.settings)
        if by := self.settings.metrics_by:
            return self.query.bind(schemas, split=(by,), setting="metrics-by")
        if self.has_label:
            return self.query.bind(schemas)
        return self.query.bind(schemas, Unlabelled(keeps=BESIDE_LABEL))

    def model_rounds(
        self, bound: BoundQuery, columns: Columns, missing: manifests.Missing
    ) -> Generator[Requests, Replies, Joined]:
        """Score the joined rows, and compare the scores with the labels."""
        task = "regression"
        if self.manifest.classes:
            task = "classification"
        settings = self.settings.with_fields(task=task, loss="auto")
        weighting = declared_weighting(bound, settings)
        joined = yield from join_rows(
            bound, columns, missing, settings, self.inventory, self.workers
        )
        labels = self._labels(joined, settings)
        mapping, weights, weighting = drop_weightless(
            joined.mapping,
            joined.extracted.weights,
            weighting,
            bound.weight_table or "",
        )
        joined = replace(joined, mapping=mapping)
        scores = yield from score(joined, self.manifest, self.settings, self.inventory)
        objective = self._objective(labels.select(joined.label_rows))
        objective = beside_offset(objective, joined.offset)
        objective = objective.weighted(row_weights(weighting, weights, mapping))
        response = objective.response
        target = objective.target
        fitted = objective.fitted_metrics(scores, self.manifest.response)
        self.metrics = {**objective.metrics(scores), **fitted}
        constant = {}
        if self.manifest.has_base:
            base = np.array(self.manifest.base_score)
            constant = objective.constant_metrics(base)
        if warning := no_better(
            response.headline, self.metrics, constant, "these rows"
        ):
            self.warn(warning)
        if self.has_label and not self.settings.privacy.covers_labels:
            self._warn_of_perfection(bound, target)
        self.outcomes = {"baseline": {"test": constant}} if constant else {}
        if constant and not self.settings.privacy.covers_labels:
            self.outcomes |= response.compare(
                objective.comparable(scores), target.numbers, objective.weights
            )
        self.outcomes |= yield from inspect(
            *(joined, self.manifest, objective, scores),
            *(self.settings, self.inventory),
        )
        return joined

    def _warn_of_perfection(self, bound: BoundQuery, target: Target) -> None:
        """Warn of a score that suggests a leak of the label."""
        score = nearly_perfect(self.metrics, target)
        if score:
            tables = self.manifest.tables
            shares = {
                t.table: Contribution(np.array(t.mean_score), t.share) for t in tables
            }
            features = {table.table: table.encoded.features for table in tables}
            suspects = suspects_of(shares, features, {})
            self.warn(perfect_warning(score, "these rows", bound, suspects))

    def _objective(self, target: Target) -> Objective:
        """Return the model's objective of a target."""
        if self.has_label:
            return objective_of(target, self.manifest.loss, self.settings)
        return make_objective(self.manifest.loss, target)

    def _labels(self, joined: Joined, settings: Settings) -> Target:
        """Return the label of the label table's rows, in the model's classes."""
        extracted = joined.extracted
        table = joined.bound.label_table
        if not self.has_label:
            rows = extracted.table_rows[table]
            return Target.without_label(rows, self.manifest.classes)
        labels = gather_labels(extracted, joined.bound, settings)
        classes = self.manifest.classes
        if unknown := [name for name in labels.classes if name not in classes]:
            names = ", ".join(map(repr, unknown[:10]))
            raise QueryError(
                f"the label has {len(unknown)} classes that the model does not know "
                f"({names}): its classes are {', '.join(map(repr, classes[:10]))}"
            )
        if classes:
            class_index = np.array([classes.index(name) for name in labels.classes])
            return Target.of(
                class_index[labels.codes], classes, labels.kind, labels.noise
            )
        return labels


def with_row_keys_of(
    states: Iterable[Path], run: str, predictions: pa.Table
) -> pa.Table:
    """Return predictions with the row keys that sites have kept in their states."""
    row_key_tables = [
        pq.read_table(file)
        for state in states
        for file in prediction_files.row_keys_folder(state, run).glob("*")
    ]
    if not row_key_tables:
        return predictions
    # whole numbers in one shard may have fractions in another
    row_keys = pa.concat_tables(row_key_tables, promote_options="permissive")
    return prediction_files.with_row_keys(predictions, row_keys)


READABLE = 0o644  # as `report.json`: a file is as readable as its folder


def use_model(
    settings: Settings, on_round: RoundListener, grid: Grid, folder: Path
) -> tuple[Document, pa.Table | None]:
    """Predict or evaluate; write and return the report, and the predictions."""
    manifest = manifests.resolve(home_folder(), settings.model_name)
    is_evaluation = settings.mode == EVALUATE
    # the user's query, or the query of the training
    query = Query.from_sql(
        settings.sql if settings.sql.strip() else manifest.query,
        needs_label=is_evaluation and manifest.predicts_label,
    )
    method = Evaluate if is_evaluation else Predict
    strategy = method(query, manifest, settings, on_round)
    strategy.start(grid)
    predictions: dict[str, object] | None = None
    table = None
    if isinstance(strategy, Predict):
        path = folder / prediction_files.PREDICTIONS_FILE
        table = strategy.predictions
        if isinstance(grid, InProcessGrid) and settings.row_key:
            run = strategy.session.run
            table = with_row_keys_of(grid.state_folders, run, table)
        metadata = {
            "model": str(manifest.model),
            "query": query.to_sql(),
            "run": folder.name,
        }
        try:
            prediction_files.write_predictions(table, path, metadata, READABLE)
        except OSError as error:
            raise SettingsError(
                f"the predictions cannot be written to {path}: {error.strerror}"
            ) from error
        predictions = {"file": str(path), "columns": table.column_names}
    report = strategy.report(predictions)
    records.write_json(report, folder)
    return report, table
