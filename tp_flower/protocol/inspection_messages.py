"""The message that inspects a saved model: importances, shares, metrics by group.

A table's site works them out. It is told the joined rows' scores and labels, of a loss
of residuals only what the scores leave of the labels; it replies with numbers about all
of them. So no score of a table, and no value of a row, is told to the server.
"""

from typing import Annotated

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Discloses, PartBody, Reply, Request

MOST_GROUPS = 50
"""Groups of which metrics are told, besides the pooled others."""


class InspectPart(PartBody, frozen=True, kw_only=True):
    """The joined rows, with the row of the shard behind each.

    Attributes:
        model_part: the part of the model that scores the rows; None where nothing is to
            be permuted.
        positions: of the shard's row behind each joined row; -1 for none. They are in
            the order of the shard's rows.
        scores: of the joined rows, by all tables, with their offset; of a loss of
            residuals 0.
        labels: numbers, or the classes' numbers; of a loss of residuals what the score
            leaves of it.
        weights: of the joined rows, if they do not weigh alike.
    """

    model_part: Annotated[int, f.between(0, 1_000_000)] | None = None
    digest: f.Digest | None = None
    positions: Annotated[AnyArray, f.nullable_positions("inspected")]
    scores: Annotated[AnyArray, f.float64("inspected", "outputs")]
    labels: Annotated[AnyArray, f.float64("inspected")]
    weights: Annotated[AnyArray, f.float64("inspected")] | None = None


class InspectRequest(Request, frozen=True, kw_only=True):
    """Tell how much tables, features and groups matter to a saved model's metrics.

    The loss of the model is that of a label with so many ``classes``, 0 for a number.
    """

    model_name: f.Name
    model_version: f.Name
    device: f.Device
    loss: f.Name
    classes: Annotated[int, f.between(0, 1000)]
    parts: dict[int, InspectPart]

    discloses = (
        Discloses(
            "the joined rows of each row of the site: how many there are, and the "
            "label and the score of each, of a loss of residuals the label less the "
            "score; from these follow the scores of the other tables",
            fields=("positions", "scores", "labels", "weights"),
        ),
    )
    schedule = (
        *("model_name", "model_version", "device", "loss", "classes"),
        *("model_part", "digest"),
    )


class InspectedPart(PartBody, frozen=True, kw_only=True):
    """Numbers about a table and its features, and about groups of the joined rows.

    They are rounded to a few digits: permutations are random, and a sum that is exact
    could tell a row.

    Attributes:
        shares: of the table and each feature in the scores; NaN where a model has none.
        metrics: by name, with the values of the table's rows, and of each feature,
            permuted: the mean over the repetitions, and the deviation; NaN where one is
            not finite.
        grids: by feature's number, values of it.
        categories: the same, of texts.
        curves: by how much the mean score changes if all rows have the value.
        groups: the values of a column that joined rows are grouped by.
        group_metrics: by name, of each group; NaN where there is none.
    """

    shares: Annotated[AnyArray, f.column_values("items")] | None = None
    metrics: dict[str, Annotated[AnyArray, f.column_values("items", 2)]] = {}
    grids: dict[str, Annotated[AnyArray, f.finite_values("points-{}")]] = {}
    categories: dict[str, list[f.ColumnName]] = {}
    curves: dict[str, Annotated[AnyArray, f.finite_values("points-{}")]] = {}
    groups: list[f.ColumnName] = []
    group_metrics: dict[str, Annotated[AnyArray, f.column_values("groups")]] = {}


class InspectReply(Reply, frozen=True):
    """How much tables, features and groups matter to a saved model's metrics."""

    parts: dict[int, InspectedPart]

    discloses = (
        Discloses(
            "how far each table and each of its features moves the scores, and how "
            "well the model does with their values permuted: sums over all rows; and "
            "values of the features, of min-count rows each, with the mean score if "
            "all rows had them",
            fields=("shares", "metrics", "grids", "categories", "curves"),
            kinds=("inspection",),
            policy="inspection",
        ),
        Discloses(
            "the values of the column that rows are grouped by, of min-cell rows each, "
            "and how well the model does in each group",
            fields=("groups", "group_metrics"),
            kinds=("inspection",),
            policy="inspection",
            when="metrics_by",
        ),
    )
