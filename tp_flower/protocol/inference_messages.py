"""Messages about saved models: finish, which saves them, and score."""

from typing import Annotated

from tp_flower.arrays import AnyArray
from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Discloses, PartBody, Reply, Request
from tp_flower.protocol.rank_messages import Cover
from tp_flower.protocol.training_messages import (
    UNMATCHED_DISCLOSED,
    LineStep,
    Masking,
    PrivacyTerms,
)


class FinishPart(PartBody, frozen=True):
    """What the saved model adds to the trained rows' scores, for their keys.

    Rows of one key have the same.

    Attributes:
        effects: of each row, on its score.
        factors: of each row, whose product with those of another table's row is added
            to their joined row's score.
    """

    effects: Annotated[AnyArray, f.float32("trained", "outputs")] | None = None
    factors: Annotated[AnyArray, f.float32("trained", "width")] | None = None


class FinishRequest(Request, frozen=True, kw_only=True):
    """End the run, after the last ``step`` of conjugate gradients, or of boosting.

    The latter's are ``lengths``, by table, of trees that may be ``is_bagged``. Rows of
    ``parts`` have effects beside their features.

    Unless the last model ``is_best``, the one that was so far is saved, if any was. If
    training ``has_diverged``, the sums of that model's scores are made at the end.
    """

    keep_models: bool = False
    step: LineStep | None = None
    lengths: dict[str, f.NonNegative] = {}
    is_bagged: bool = False
    is_best: bool = False
    has_diverged: bool = False
    model_name: str | None = None
    model_version: str | None = None
    parts: dict[int, FinishPart] = {}

    discloses = (
        Discloses("that the run is over, and its name"),
        Discloses(
            "an effect of each row's key on the scores: a shrunken mean of the loss's "
            "derivative over the key's joined rows, of which there are at least two",
            fields=("effects",),
            covered_by="messages",
            when="fits_effects",
        ),
        Discloses(
            "factors of each row's key: numbers fitted to the loss's derivatives in "
            "the key's joined rows, of which there are at least two, and to the "
            "factors of the other table's keys that it is joined to: keys that are "
            "alike in this have like numbers, and who has both tables' reads "
            "derivatives of single rows",
            fields=("factors",),
            covered_by="messages",
            when="fits_factors",
        ),
    )
    schedule = (
        *("keep_models", "step", "lengths", "is_bagged", "is_best", "has_diverged"),
        *("model_name", "model_version"),
    )


class FinishedPart(PartBody, frozen=True):
    """The outcome of a run at a participant.

    Attributes:
        digest: SHA-256 of the part of the model that is kept.
        coefficients: of a linear model, (d, outputs), or the features' gains in trees,
            (d, 1), if they may be shown.
        names: beside them, of the features' columns, d in all, as far as they follow
            from the query and the encoders; "" for others.
        categories: in their place, those made of values of rows, d in all, as far as
            they may be shown; "" for others.
        score_sums: of the scores that left last, and of their squares, over the joined
            training rows.
    """

    digest: f.Digest | None = None
    coefficients: Annotated[AnyArray, f.float64("width", "numbers")] | None = None
    names: list[f.ColumnName] | None = None
    categories: list[f.ColumnName] | None = None
    score_sums: Annotated[AnyArray, f.finite_values(2, "outputs")] | None = None


class FinishReply(Reply, frozen=True, kw_only=True):
    """The outcome of the run at a site, and the costs of its releases."""

    ledger: list[f.Document]
    parts: dict[int, FinishedPart]

    discloses = (
        Discloses(
            "a digest of each part of the model that the site keeps", fields=("digest",)
        ),
        Discloses(
            "the final coefficients of a linear model, or its features' gains "
            "in trees (if the table's policy says that they may be shown)",
            fields=("coefficients",),
            covered_by="models",
            kinds=("coefficients",),
            policy="coefficients",
        ),
        Discloses(
            "texts of categories: beside coefficients, of each that was counted and "
            "has min-count of the site's training rows; and the ends of bins, where "
            "min-count is 1 (if the table's policy says that they may be shown)",
            fields=("categories",),
            kinds=("categories",),
            policy="categories",
        ),
        Discloses(
            "mean and variance of each table's scores",
            fields=("score_sums",),
            covered_by="noise",
            kinds=("scores",),
            policy="scores",
            when="sums_scores",
        ),
    )
    schedule = ("ledger", "names")
    is_complete = False


class DividePart(PartBody, frozen=True, kw_only=True):
    """The rows that joined rows have, and the part of the model that divides them."""

    model_part: Annotated[int, f.between(0, 1_000_000)]
    digest: f.Digest
    rows: Annotated[AnyArray, f.bits("rows")]


class DivideRequest(Request, frozen=True, kw_only=True):
    """Tell the regions of rows by a saved model, which scores of other tables read."""

    model_name: f.Name
    model_version: f.Name
    device: f.Device
    parts: dict[int, DividePart]

    discloses = (Discloses("which rows of the site are joined", fields=("rows",)),)
    schedule = ("model_name", "model_version", "device", "model_part", "digest")


class DividedPart(PartBody, frozen=True):
    """The region of each of the rows."""

    regions: Annotated[AnyArray, f.regions("scored")]


class DivideReply(Reply, frozen=True):
    """The regions of the rows."""

    parts: dict[int, DividedPart]

    discloses = (
        Discloses(
            "in which region each row of the site is: the leaf of one tree on its "
            "features",
            fields=("regions",),
            kinds=("regions",),
            policy="regions",
        ),
    )
    is_complete = False


class ScorePart(PartBody, frozen=True, kw_only=True):
    """The rows that joined rows have, and the part of the model to score them with.

    Attributes:
        pair_rows: of a model with regions, which of these rows each pair of row and
            region is of, in place of the rows.
        regions: of the pairs.
        takes_bins: whether the model has trees of the rows' bins.
    """

    takes_bins: bool = False
    model_part: Annotated[int, f.between(0, 1_000_000)]
    digest: f.Digest
    rows: Annotated[AnyArray, f.bits("rows")]
    pair_rows: Annotated[AnyArray, f.positions("pairs")] | None = None
    regions: Annotated[AnyArray, f.regions("pairs")] | None = None
    unmatched: dict[str, Annotated[AnyArray, f.bits("rows")]] = {}
    cover: Cover = {}


class ScoreRequest(Request, frozen=True, kw_only=True):
    """Score rows with a saved model."""

    model_name: f.Name
    model_version: f.Name
    privacy: PrivacyTerms
    masking: Masking | None = None
    device: f.Device
    parts: dict[int, ScorePart]

    discloses = (
        Discloses("which rows of the site are joined", fields=("rows",)),
        Discloses(
            "in which regions of table {divided} the joined rows of each row of the "
            "site are",
            fields=("pair_rows", "regions"),
            when="divided",
        ),
        UNMATCHED_DISCLOSED,
    )
    schedule = (
        *("model_name", "model_version", "privacy", "masking", "device"),
        *("model_part", "digest", "cover", "takes_bins"),
    )


class ScoredPart(PartBody, frozen=True, kw_only=True):
    """The scores of a participant's rows, each once, and their bin numbers.

    Attributes:
        factors: of the rows' keys, if the model has some; 0 of an unknown key.
    """

    rows: f.Count
    numbers: Annotated[AnyArray, f.bytes_of("binned", "bin_columns")] | None = None
    scores: Annotated[AnyArray, f.score_words("scored", "outputs")]
    factors: Annotated[AnyArray, f.float32("joined", "width")] | None = None


class ScoreReply(Reply, frozen=True, kw_only=True):
    """The scores, and their costs."""

    ledger: list[f.Document]
    parts: dict[int, ScoredPart]

    discloses = (
        Discloses(
            "a score per joined row of the site, computed from its features; once",
            fields=("scores",),
            covered_by="scores",
            kinds=("scores",),
            policy="scores",
        ),
        Discloses(
            "a row of numbers per joined row of {sends_factors}: the factors of its "
            "key, which the server has made. They are the same in each run, and so "
            "link a row between runs",
            fields=("factors",),
            kinds=("factors",),
            policy="factors",
            when="sends_factors",
        ),
        Discloses(
            "the bin number of each encoded column of these rows, in the clear, by the "
            "bins of the model's training",
            fields=("numbers",),
            kinds=("bins",),
            policy="bins",
            when="scores_bins",
        ),
    )
    schedule = ("ledger", "rows")
