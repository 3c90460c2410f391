"""Messages of personalised models: a model for every site of one table."""

from typing import Annotated, Final

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body, Discloses, PartBody, Reply, Request
from tp_flower.protocol.messages import declare_action
from tp_flower.protocol.setup_messages import SealedText

Metric = Annotated[float, f.between(-f.LARGEST, f.LARGEST)]

BY_DATA = "data"
BY_FEATURES = "features"
BY_MODELS = "models"
SUMMARIES: Final = (BY_DATA, BY_FEATURES, BY_MODELS)
"""Summaries of sites from which a graph of similar sites can be made."""

OWN_MODELS: Final = {
    "personal": "own model",
    "global": "one model for all",
    "local": "model of the site alone",
}
"""The models that a personalised run compares, by their names in the report."""


class PersonalisePart(PartBody, frozen=True, kw_only=True):
    """The rows, the encoder and the model of a site."""

    model: f.Document
    l2: f.NonNegative
    device: f.Device
    encoder: SealedText | None = None
    trained: Annotated[AnyArray, f.bits("rows")]
    tested: Annotated[AnyArray, f.bits("rows")]


class PersonaliseRequest(Request, frozen=True, kw_only=True):
    """Encode the features, keep the labels, make the model.

    Attributes:
        classes: classes of the label, as sites have them; empty in a regression.
        graph: the data that the similarity of sites is computed from.
        graph_epsilon: epsilon of the noise on that data; 0 for no noise.
    """

    loss: f.Name
    classes: list[str | f.Finite]
    graph: Annotated[str, f.one_of(*SUMMARIES, "none")]
    graph_epsilon: Annotated[float, f.between(0, 1e6)]
    delta: f.Share
    parts: dict[int, PersonalisePart]

    discloses = (
        Discloses(
            "which rows of the site are held out",
            fields=("trained", "tested", "classes"),
        ),
    )
    schedule = (
        *("loss", "graph", "graph_epsilon", "delta"),
        *("model", "l2", "device", "encoder"),
    )


class PersonalisedPart(PartBody, frozen=True, kw_only=True):
    """The start of a site's training.

    ``label_sums`` are the number of rows of each class; in a regression, the sums of
    labels and of their squares.
    """

    features: f.Count
    rows: f.Count
    label_sums: list[f.Finite]
    curvature: f.NonNegative
    penalised: Annotated[AnyArray, f.flags("parameters")]
    parameters: Annotated[AnyArray, f.float32("parameters")]


class PersonaliseReply(Reply, frozen=True, kw_only=True):
    """The start of the sites' training, and the costs of the run's releases."""

    ledger: list[f.Document]
    parts: dict[int, PersonalisedPart]

    discloses = (
        Discloses(
            "per site: how many rows each class has (or the sums of labels and of "
            "their squares), and one number of curvature",
            fields=("label_sums", "curvature"),
            kinds=("label-sums",),
            policy="statistics",
        ),
    )
    schedule = ("ledger", "features", "rows", "penalised", "parameters")


class SiteMetrics(Body, frozen=True):
    """Metrics of a model on a site's trained and held-out rows."""

    train: dict[str, Metric]
    test: dict[str, Metric]


class SummariseRequest(Request, frozen=True, kw_only=True):
    """Summarise the data for the graph, and train a model of the site ``alone``."""

    summaries: bool
    alone: bool
    seed: f.Seed
    label_scale: f.Positive
    base: list[f.Finite]

    schedule = ("summaries", "alone", "seed", "label_scale", "base")


class SiteSummary(PartBody, frozen=True, kw_only=True):
    """A site's summary, and the metrics of the model that it trained alone."""

    local: SiteMetrics | None = None
    summary: Annotated[AnyArray, f.float32("summary")] | None = None


_METRICS = Discloses(
    "metrics of each site's rows, trained on and held out",
    fields=("local",),
    kinds=("metrics",),
    policy="statistics",
)


class SummariseReply(Reply, frozen=True):
    """The sites' summaries."""

    parts: dict[int, SiteSummary]

    discloses = (
        Discloses(
            "{summary}",
            fields=("summary",),
            covered_by="summaries",
            kinds=("summaries",),
            policy="models",
            when="summary",
        ),
        _METRICS,
    )


class Pace(Body, frozen=True, kw_only=True):
    """The steps that a site takes from the parameters that it receives.

    ``batch`` is the number of rows per step; 0 for all.
    """

    steps: Annotated[int, f.between(1, 100_000)]
    rate: f.Positive
    batch: f.Count
    seed: f.Seed
    epoch: f.Count


class TrackParameters(PartBody, frozen=True):
    """Parameters of the site's own model, and of the common model."""

    personal: Annotated[AnyArray, f.float32("parameters")]
    common: Annotated[AnyArray, f.float32("parameters")] | None = None


class PersonalRequest(Request, frozen=True, kw_only=True):
    """Take parameters and reply with updates.

    Without ``pace`` the reply has only metrics.
    """

    base: list[f.Finite]
    pace: Pace | None = None
    parts: dict[int, TrackParameters]

    discloses = (
        Discloses(
            "the site's own parameters, which its neighbours' have moved; those of the "
            "one model for all",
            fields=("personal", "common"),
        ),
    )
    schedule = ("base", "pace")


class TrackUpdates(PartBody, frozen=True, kw_only=True):
    """Updates and metrics of the site's own model, and of the common model.

    Metrics are those at the parameters received.
    """

    metrics: SiteMetrics
    common_metrics: SiteMetrics | None = None
    update: Annotated[AnyArray, f.float32("parameters")] | None = None
    common_update: Annotated[AnyArray, f.float32("parameters")] | None = None


class PersonalReply(Reply, frozen=True):
    """The updates of every site."""

    parts: dict[int, TrackUpdates]

    discloses = (
        Discloses(
            "a gradient of each site's rows; anew in every round",
            fields=("update", "common_update"),
            kinds=("gradients",),
            policy="models",
        ),
        _METRICS._replace(fields=("metrics", "common_metrics")),
    )


TRAIN_PERSONALISE: Final = declare_action(
    "train.personalise", PersonaliseRequest, PersonaliseReply
)
TRAIN_SUMMARISE: Final = declare_action(
    "train.summarise", SummariseRequest, SummariseReply
)
TRAIN_PERSONAL: Final = declare_action("train.personal", PersonalRequest, PersonalReply)
