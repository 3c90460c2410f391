"""What a report says of the standard errors of a trained model.

Entry ``inference`` of `report.json`::

    kind        "model", "robust" or "clustered"
    note        what the errors are, or why there are none
    parameters  that are determined, with the intercepts
    dispersion  that errors are by; without weights 1 where it is known
    clusters    of the training rows; 0 unless errors are clustered
    freedom     of the estimated dispersion; null where that is known
    tail-freedom  of t and F; null for z and chi-squared
    ratio       what the exponential of a coefficient is; "" for nothing
    reference   the class whose scores are 0, of several; null for one score
    intercept   {value, standard-error, low, high}   of the score of a row of zeros; {}
                where it is not known, and of several classes
    intercepts  [{output, value, standard-error, low, high}]   of these, each class's
    undetermined  [column]   those without an error, as others add up to them
    tests       [{feature, columns, statistic, p}]   Wald's, of all columns of a feature
    inflation   [{feature, columns, factor, scaled}]   generalised VIF, by degrees of
                freedom, and its root of twice these; null where others determine it
    contrasts   [{column, reference, value, standard-error, z or t, p, low, high}]   of
                features whose columns add up to 1: differences from the first column,
                with the class as ``output`` where there are several; those that are
                determined, which of a number with levels beside its slope none is
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from strategies.methods.moments.section import (
    CONDITIONAL,
    feature_columns,
    inflation_entries,
    statistics_by_table,
    undetermined,
)
from strategies.setup.problem import TrainingProblem
from strategies.training.outcome import Outcome
from tp_flower.arrays import FloatArray, IndexArray
from tp_flower.methods.moments.inference import Inference
from tp_flower.methods.moments.questions import FeatureColumns
from tp_flower.methods.moments.settings import (
    CLUSTERED,
    MODEL,
    ROBUST,
    ErrorSettings,
)
from tp_flower.settings import Settings

SECTION: Final = "inference"
INDEPENDENT: Final = "Standard errors for independent joined rows"
BY_CLUSTER: Final = "Standard errors for {} independent clusters by {}"
KINDS: Final = {
    MODEL: "by the information of the loss ({loss})",
    ROBUST: "whatever the label's variance (HC0)",
    CLUSTERED: "whatever the rows of a cluster have in common (HC1), with t by "
    "{freedom} degrees of freedom",
}
DIFFERENCES: Final = "Coefficients are differences from those of class {!r}."
HIDDEN: Final = "Not shown of {}, whose policies do not have 'coefficients = true'."


@dataclass(frozen=True, eq=False)
class Errors:
    """The errors of a model's coefficients, as far as these are shown.

    Attributes:
        inference: None where there is none, for the reason that ``note`` has.
        note: beside an inference, why it is rough, if it is.
        clusters: of the training rows, where errors are clustered.
        coefficients: that are shown, by table, (d_t [+ 1], k), of k classes beside the
            first one, or of one score.
    """

    problem: TrainingProblem
    settings: Settings
    inference: Inference | None = None
    note: str = ""
    clusters: int = 0
    coefficients: Mapping[str, FloatArray] = field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Whether they are those of the model, or robust."""
        return self.settings.of(ErrorSettings).standard_errors

    def of_outcome(self, outcome: Outcome) -> "Errors":
        """Return them beside the coefficients that the sites have shown."""
        coefficients = outcome.coefficients
        if self.inference is not None and self.reference is not None:
            coefficients = {
                name: values[:, 1:] - values[:, :1]
                for name, values in coefficients.items()
            }
        return replace(self, coefficients=coefficients, names=outcome.names)

    @property
    def reference(self) -> str | None:
        """The class from whose coefficients others' are differences; None for none."""
        problem = self.problem
        return problem.classes[0] if problem.objective.outputs > 1 else None

    @property
    def outputs(self) -> list[dict[str, str]]:
        """The entries that name the scores with coefficients; {} for the only one."""
        if self.reference is None:
            return [{}]
        return [{"output": name} for name in self.problem.classes[1:]]

    @cached_property
    def columns(self) -> FeatureColumns:
        """The features' columns, in the order of the tables."""
        return feature_columns(self.problem, self.names)

    @cached_property
    def estimates(self) -> FloatArray:
        """The coefficients, (d + 1, k), the intercepts last; NaN of hidden ones."""
        total = len(self.columns.names)
        estimates = np.full((total + 1, len(self.outputs)), np.nan)
        for name, positions in self.columns.by_table.items():
            values = self.coefficients.get(name)
            if values is None:
                continue
            estimates[positions] = values[: len(positions)]
            if self.problem.tables[name].has_intercept:
                estimates[-1] = values[-1]
        return estimates

    def statistics(self) -> dict[str, dict[str, FloatArray]]:
        """Return statistics of every table's coefficients, (d_t [+ 1], k) by name."""
        if self.inference is None:
            return {}
        return statistics_by_table(self.problem, self.inference, self.estimates)

    def section(self) -> dict[str, object]:
        """Return the report's entry."""
        if self.inference is None:
            return {"kind": self.kind, "note": self.note}
        features = {
            name: positions
            for name, positions in self.columns.by_feature.items()
            if not np.isnan(self.estimates[positions]).any()
        }
        intercepts = self._intercepts(self.inference)
        has_classes = self.reference is not None
        return {
            "kind": self.kind,
            "note": self._text(),
            "parameters": self.inference.parameters,
            "dispersion": self.inference.dispersion,
            "freedom": self.inference.freedom,
            "tail-freedom": self.inference.tail_freedom,
            "clusters": self.clusters,
            "ratio": self.problem.response.ratio,
            "reference": self.reference,
            "intercept": {} if has_classes or not intercepts else intercepts[0],
            "intercepts": intercepts if has_classes else [],
            "undetermined": undetermined(self.columns, self.inference),
            **self._of_features(self.inference, features),
        }

    def _of_features(
        self, inference: Inference, features: Mapping[str, IndexArray]
    ) -> dict[str, object]:
        """Return the entries about features, by their columns' positions."""
        # those of an output follow each other, and then come the intercepts
        estimates = np.append(self.estimates[:-1].T, self.estimates[-1])
        every = self.columns.by_feature
        inflation = inflation_entries(
            inference.design,
            {name: inference.across(positions) for name, positions in every.items()},
        )
        return {
            "tests": [
                {
                    "feature": name,
                    **inference.test(inference.across(positions), estimates)._asdict(),
                }
                for name, positions in features.items()
            ],
            "inflation": [entry for entry in inflation if entry["feature"] in features],
            "contrasts": [
                each
                for positions in features.values()
                for each in self._contrasts(inference, positions)
            ],
        }

    def _text(self) -> str:
        """Return what is said of the errors."""
        kind = KINDS[self.kind].format(
            loss=self.problem.objective.name, freedom=self.clusters - 1
        )
        independent = INDEPENDENT
        if self.clusters:
            named = self.settings.of(ErrorSettings).cluster
            independent = BY_CLUSTER.format(self.clusters, named)
        notes = [f"{independent}, {kind}."]
        if self.reference is not None:
            notes.append(DIFFERENCES.format(self.reference))
        if self.settings.l2:
            notes.append(CONDITIONAL)
        hidden = [name for name in self.problem.tables if name not in self.coefficients]
        if hidden:
            notes.append(HIDDEN.format(", ".join(hidden)))
        if self.note:
            notes.append(self.note)
        return " ".join(notes)

    def _intercepts(self, inference: Inference) -> list[dict[str, Any]]:
        """Return the whole intercept of each score, with its error; [] if unknown."""
        if np.isnan(self.estimates[-1]).any() or not inference.has_intercept:
            return []
        base = self.problem.base_score
        whole = self.estimates.copy()
        whole[-1] += base if self.reference is None else base[1:] - base[0]
        names = ("standard-error", "low", "high")
        entries = []
        for number, output in enumerate(self.outputs):
            of_output = inference.of_output(number)
            values = of_output.statistics(whole[:, number])[-1, [0, 3, 4]]
            entries.append(
                {
                    **output,
                    "value": whole[-1, number],
                    **dict(zip(names, values.tolist(), strict=True)),
                }
            )
        return entries

    def _contrasts(
        self, inference: Inference, positions: IndexArray
    ) -> Iterator[dict[str, object]]:
        """Yield how a feature's columns differ from the first, if only that is known.

        As those of categories do, which add up to the intercept.
        """
        if len(positions) == 1 or inference.has_error[positions].all():
            return
        names = self.columns.names
        for number, output in enumerate(self.outputs):
            values, statistics = inference.of_output(number).contrasts(
                positions, self.estimates[:, number]
            )
            for position, value, row in zip(
                positions[1:], values.tolist(), statistics.tolist(), strict=True
            ):
                if math.isnan(row[0]):
                    continue
                yield {
                    "column": names[position],
                    **output,
                    "reference": names[positions[0]],
                    "value": value,
                    **dict(zip(inference.names, row, strict=True)),
                }
