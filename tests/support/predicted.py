"""Saved models of the store, and what the joined-table model says of other rows.

The reference makes the join with DuckDB and scores every table's rows with its saved
part: nothing of the mapping or of the messages is in it.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from client_apps.data.saved_models import SavedModel
from strategies import TrainingStrategy
from strategies.inference.manifest import Manifest
from strategies.inference.predict import Evaluate, Predict
from strategies.training.saving import make_manifest
from tests.support import federated
from tests.support.federated import Frames, Seen, WatchedGrid, store_sql
from tests.support.reference.joins import engine_of
from tp_flower.extraction.extract import extract
from tp_flower.learning.models.local_model import LocalModel, build_model
from tp_flower.query import Fragment, Query
from tp_flower.sources.shards import ShardSource, register_frames, release

NamedSites = Mapping[str, Mapping[str, list[pd.DataFrame]]] | int


def model_of(saved: SavedModel) -> LocalModel:
    """Return the model of a saved part, ready to score."""
    model = build_model(saved.spec, saved.encoder.encoder.width, "cpu")
    model.parameters = saved.parameters
    return model


def part_scores(saved: SavedModel, columns: Mapping[str, object]) -> np.ndarray:
    """Return the scores of rows by a saved part of a model, (n, d_c)."""
    return model_of(saved).scores(saved.encoder.transform(columns))


def on(layout: Callable[[Frames], dict], frames: Frames) -> NamedSites:
    """Give every table a site of its own, of its name, whatever its shards."""
    return {name: {name: own} for name, own in layout(frames).items()}


def unlabelled(sql: str) -> str:
    """Return a query without its label, which is its first item."""
    return re.sub(r"^SELECT .*? AS label, ", "SELECT ", sql)


def predicting(
    trained: TrainingStrategy | Manifest, sql: str, **settings: object
) -> Predict:
    """Return what predicts the rows of a query with a run's model."""
    manifest = trained if isinstance(trained, Manifest) else make_manifest(trained)
    query = Query.from_sql(sql, needs_label=False)
    return Predict(query, manifest, mode="predict", **settings)


@dataclass
class Model:
    """A model that was trained on a query, and its sites' state folders."""

    sql: str
    state: Path
    manifest: Manifest

    def predict(self, sites: NamedSites, sql: str = "", **settings: object) -> Predict:
        """Predict with the sites' own parts of the model."""
        strategy = predicting(self.manifest, sql or self.sql, **settings)
        self.start(strategy, sites)
        return strategy

    def table(self, sites: NamedSites, sql: str = "", **settings: object) -> pa.Table:
        return self.predict(sites, sql, **settings).predictions

    def evaluate(self, sites: NamedSites, sql: str = "", **settings: object) -> dict:
        query = Query.from_sql(sql or self.sql)
        strategy = Evaluate(query, self.manifest, mode="evaluate", **settings)
        self.start(strategy, sites)
        return strategy.metrics

    def start(self, strategy: Predict | Evaluate, sites: NamedSites) -> list[Seen]:
        """Run a strategy on the sites; return all messages."""
        with WatchedGrid(sites, state=self.state) as grid:
            strategy.start(grid)
        return grid.seen

    def saved(self, alias: str) -> SavedModel:
        """Return a part of the model of a table."""
        part = self.manifest.table(alias).parts[0]
        model = self.manifest.model
        (folder,) = self.state.glob(
            f"*/models/{model.name}/{model.version}/part-{part.number}"
        )
        return SavedModel.load(folder, part.digest)

    def local_scores(self, alias: str, frame: pd.DataFrame) -> np.ndarray:
        """Return what the table's model says of rows of a data frame, (n, d_c)."""
        return scores_of(self.saved(alias), frame)

    def reference(
        self,
        frames: Mapping[str, pd.DataFrame],
        source: str,
        aliases: Collection[str] = (),
    ) -> list[tuple[float, ...]]:
        """Return (row of the label table, *scores) of the joined rows, in order.

        Args:
            frames: the tables by name, each whole.
            source: FROM, joins and WHERE; a table that is LEFT JOINed adds 0 where
                there is no match.
            aliases: the tables of it; all, if none is named.
        """
        aliases = aliases or [table.table for table in self.manifest.tables]
        tables = {}
        for alias in aliases:
            name = self.manifest.table(alias).name
            own = frames[name].reset_index(drop=True)
            scores = self.local_scores(alias, own)
            extra = {f"score_{k}": scores[:, k] for k in range(scores.shape[1])}
            tables[name] = own.assign(position=own.index, **extra)
        sums = ", ".join(
            " + ".join(f"COALESCE({alias}.score_{k}, 0)" for alias in aliases)
            + f" + {base!r}"
            for k, base in enumerate(self.manifest.base_score)
        )
        label = self.manifest.label_table
        sql = f"SELECT {label}.position, {sums} {source}"
        with engine_of(tables) as engine:
            return sorted(engine.execute(sql).fetchall())


def scores_of(saved: SavedModel, frame: pd.DataFrame) -> np.ndarray:
    """Return what a part of a model says of rows of a data frame, (n, d_c)."""
    return model_of(saved).scores(features_of(saved, frame))


def features_of(saved: SavedModel, frame: pd.DataFrame) -> np.ndarray:
    """Return rows of a data frame as a saved part encodes them, (n, d)."""
    name = saved.fragment.name
    token = register_frames({name: frame}, "here")
    plain = Fragment(saved.fragment.table, name, saved.fragment.features)
    rows = extract(ShardSource(name, "here", 0, token=token), plain)
    columns = {info.name: rows.column(info.name) for info in rows.features}
    release(token)
    return saved.encoder.transform(columns)


def train(
    state: Path, sites: NamedSites, sql: str, strategy: str = "admm", **settings: object
) -> Model:
    """Train, and let the sites keep their parts."""
    with WatchedGrid(sites, state=state) as grid:
        done = federated.train(grid, sql, strategy, **{"device": "cpu", **settings})
    return Model(sql, state, make_manifest(done))


def train_store(state: Path, loss: str, sites: NamedSites, **settings: object) -> Model:
    """Train on the store's query."""
    task = federated.task_of(loss)
    return train(state, sites, store_sql(loss), task=task, loss=loss, **settings)


def scored(table: pa.Table, row: str = "row_key") -> list[tuple[float, ...]]:
    """Return (row, *scores) of predictions, in the order of the reference."""
    names = [name for name in table.column_names if name.startswith("score")]
    columns = [table[name].to_pylist() for name in (row, *names)]
    return sorted(zip(*columns, strict=True))


def check_equal(found: list, expected: list) -> None:
    """Assert that scores are those of the joined table, to 1e-5."""
    assert len(found) == len(expected) > 0
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)
