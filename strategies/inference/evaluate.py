"""Evaluate: the metrics of a saved model on labelled rows.

All joined rows count: nothing is held out, as nothing is trained. Labels and weights
leave the sites as they do in training, and are covered as in training.
"""

from collections.abc import Generator
from dataclasses import replace

import numpy as np

from strategies.inference.base import Joined, ModelStrategy, join_rows, score_rows
from strategies.run.exchange import Replies, Request
from strategies.setup.extract import Extracted
from strategies.setup.labels import Labels, gather_labels, loss_of
from strategies.setup.row_weights import (
    declared_weighting,
    row_weights,
    without_weightless,
)
from tp_flower.errors import QueryError
from tp_flower.learning.losses import KMEANS, KMeansLoss, Loss
from tp_flower.learning.metrics import evaluate
from tp_flower.query import BoundQuery
from tp_flower.settings import EVALUATE, Settings


class Evaluate(ModelStrategy):
    """Measure a saved model on the rows of a query."""

    name = EVALUATE
    _metrics: dict[str, float] | None = None

    def default_settings(self) -> Settings:
        """Return the defaults, in this mode."""
        return Settings(mode=EVALUATE)

    def bind(self) -> BoundQuery:
        """Return the query, with its label, if the model has learnt one."""
        if self.has_label:
            return self.query.bind(self.schemas)
        return self.query.bind_unlabelled(self.schemas)

    @property
    def has_label(self) -> bool:
        """Whether the model predicts a label; a clustering does not."""
        return self.manifest.loss != KMEANS

    def model_rounds(self, bound: BoundQuery) -> Generator[Request, Replies, Joined]:
        """Score the joined rows, and compare them with their labels."""
        settings = self._settings_of_labels()
        weighting = declared_weighting(bound, settings)
        joined = yield from join_rows(bound, self.missing, settings, self.inventory)
        extracted = joined.extracted
        labels = self._labels(extracted, bound.label_table, settings)
        mapping, weights, weighting = without_weightless(
            joined.mapping, extracted.weights, weighting, bound.weight_table or ""
        )
        joined = joined.select(mapping)
        weights = row_weights(weighting, weights, mapping)
        scores = yield from score_rows(
            joined, self.manifest, self.settings, self.inventory
        )
        values = labels.values[mapping.tables[bound.label_table].row_of]
        self._metrics = evaluate(self._loss(labels), scores, values, weights)
        return joined

    def _labels(self, extracted: Extracted, table: str, settings: Settings) -> Labels:
        if not self.has_label:
            return Labels(np.zeros((extracted.table_rows[table], 0)))
        labels = gather_labels(
            extracted.replies, extracted.parts[table], extracted.rows, settings
        )
        return _of_classes(labels, self.manifest.classes)

    def _loss(self, labels: Labels) -> Loss:
        if not self.has_label:
            return KMeansLoss(self.manifest.outputs)
        return loss_of(labels, self.manifest.loss, self.settings)

    @property
    def metrics(self) -> dict[str, float]:
        """What the rounds found.

        Raises:
            RuntimeError: before they are done.
        """
        if self._metrics is None:
            raise RuntimeError("there are no metrics before the rounds are done")
        return self._metrics

    def _settings_of_labels(self) -> Settings:
        """Return the settings with the task that the model was trained for."""
        has_classes = bool(self.manifest.classes)
        task = "classification" if has_classes else "regression"
        return self.settings.with_fields(task=task, loss="auto")


def _of_classes(labels: Labels, classes: tuple[str, ...]) -> Labels:
    """Return labels by the model's classes.

    Raises:
        QueryError: there are others.
    """
    if other := [name for name in labels.classes if name not in classes]:
        shown = ", ".join(map(repr, other[:10]))
        raise QueryError(
            f"the label has {len(other)} classes that the model does not know "
            f"({shown}): its classes are {', '.join(map(repr, classes[:10]))}"
        )
    if not classes:
        return labels
    place = np.array([classes.index(name) for name in labels.classes], np.float64)
    values = place[labels.values.astype(np.intp)]
    return replace(labels, values=values, classes=classes)
