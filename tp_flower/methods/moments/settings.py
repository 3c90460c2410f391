"""What second moments read of a run's settings: of a strategy, and of errors.

Standard errors are of models that another strategy trains.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from tp_flower.methods.moments.describe.settings import (
    DescribeSettings,
    describe_conflicts,
    described,
    tells_of_groups,
)
from tp_flower.methods.moments.messages import TRAIN_MOMENTS
from tp_flower.objectives import family_named, names_of_losses
from tp_flower.protocol.fields import DP_SGD
from tp_flower.settings.declare import AUTO, Form, OneOf, Readers, list_of, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.run import CLASSIFICATION, JOINED, REGRESSION, TRAIN
from tp_flower.settings.settings import COVERED, Settings
from tp_flower.settings.training import NONE

NO_RANGE: Final = (
    "privacy.label-range: moments with noise need the range that the label is clipped "
    "to, such as '0, 5': declare it without looking at the data"
)
_TABLES: Final = list_of(
    str, "a list of different tables", lambda names: len(set(names)) == len(names)
)
MODEL: Final = "model"
ROBUST: Final = "robust"
CLUSTERED: Final = "clustered"
CURVATURE: Final = "curvature"
SQUARES: Final = "squared slope"
"""Of a row's loss at the model's score, by which its columns are weighted."""
CLUSTERS: Final = "clusters"
"""The weighting of rows that count once, for sums over pairs of rows of a cluster."""

WEIGHED: Final = (
    "for standard errors, sums over the joined rows of the products of two columns{}, "
    "in which it says how much each row weighs: departing from the protocol, it reads "
    "single rows from them"
)
OVER_PAIRS: Final = ", and over pairs of rows of a cluster"


SERVER: Final = "server"
LABEL_SITE: Final = "label-site"
TOLD_LABEL_SITE: Final = (
    "nothing of its values but how well the model does: half the mean square, and R2, "
    "of the training rows and of those held out, in six digits. The site of the label "
    "reads the second moments of the joined rows in the server's place: of each two "
    "columns of the tables the sum of their products. So it can work out every "
    "regression among these columns, and it makes the models of all tables"
)


@dataclass(frozen=True)
class MomentsSettings:
    """Strategy "moments": linear models from second moments."""

    readers = Readers(
        of_methods=True, refusal="is for strategy 'moments' only, not {strategy!r}"
    )

    private_tables: tuple[str, ...] = setting(
        (),
        "Tables of the query whose values privacy.features covers, each with "
        'privacy.epsilon, "a, b"; empty = all.',
        Form("tables, comma separated", _TABLES),
    )
    moments_to: str = setting(
        SERVER,
        'Who reads the second moments and solves: "server", or "label-site", the site '
        "of the label's table, in the server's place, which is told how well the model "
        "does. Policies allow that by releases.regressions.",
        OneOf((SERVER, LABEL_SITE)),
    )


@dataclass(frozen=True)
class ErrorSettings:
    """Strategy "cg": what else it tells of a linear model."""

    readers = Readers(
        of_methods=True,
        refusal="is for strategy 'cg' only, not {strategy!r}: set standard-errors = "
        "'none', and no cluster",
    )

    standard_errors: str = setting(
        NONE,
        'Standard errors of coefficients, after training: "model" takes the loss\'s '
        'own variance for the label\'s, "robust" does not (HC0), nor does '
        '"clustered", for rows of a cluster that are alike (HC1); "none" sends nothing '
        'for them. Policies allow it by releases.covariance. Strategy "moments" has '
        "those of least squares without the setting.",
        OneOf((NONE, MODEL, ROBUST, CLUSTERED)),
    )
    cluster: str = setting(
        "",
        'With standard-errors = "clustered": the alias of a table that the label\'s is '
        "joined with. Rows with the same key of that join are a cluster.",
    )


def _conflicts(settings: Settings) -> Iterator[str]:
    strategy = settings.method_name
    privacy = settings.privacy
    for kind in privacy.covered("labels", "predictions"):
        yield (
            f"privacy.{kind}: with strategy {strategy!r} no label and no score leaves: "
            "use privacy.features = 'statistics', which covers sums of labels, too"
        )
    if privacy.features == DP_SGD:
        yield (
            f"privacy.features: strategy {strategy!r} has no gradients for 'dp-sgd': "
            "use 'statistics'"
        )
    if settings.of(MomentsSettings).private_tables and not privacy.covers_features:
        yield (
            "private-tables: it is set, but privacy.features is 'clear': set "
            "privacy.features = 'statistics'"
        )
    if (
        privacy.covers_features
        and settings.task == REGRESSION
        and not privacy.label_range
    ):
        yield NO_RANGE
    if settings.num_epochs > 1:
        yield (
            f"num-epochs: strategy {strategy!r} solves once, not "
            f"{settings.num_epochs} times: leave it 0"
        )
    yield from _penalty_conflicts(settings)
    yield from describe_conflicts(settings)
    yield from _reader_conflicts(settings)


def _penalty_conflicts(settings: Settings) -> Iterator[str]:
    strategy = settings.method_name
    if settings.l1 and settings.privacy.covers_features:
        yield (
            f"l1: strategy {strategy!r} chooses no columns by moments with noise: "
            "leave it 0, or set privacy.features = 'clear'"
        )
    if settings.l1 and settings.task == CLASSIFICATION:
        yield f"l1: strategy {strategy!r} takes none for classes: leave it 0"


def label_site_reads(settings: Settings) -> bool:
    """Return whether the label's site reads the moments in place of the server."""
    if "moments_to" not in settings.rules.reads:
        return False
    return settings.of(MomentsSettings).moments_to == LABEL_SITE


def _reader_conflicts(settings: Settings) -> Iterator[str]:
    if not label_site_reads(settings):
        return
    if described(settings):
        yield (
            f"moments-to: {LABEL_SITE!r} is for a model, and what describe asks for is "
            f"in the server's report: set moments-to = {SERVER!r}"
        )
    if settings.privacy.covers_features:
        yield (
            f"moments-to: {LABEL_SITE!r} is for moments without noise: set moments-to "
            f"= {SERVER!r}, or privacy.features = 'clear'"
        )


def _tells_instead(settings: Settings) -> str:
    """Return what the server learns where it does not read the moments; else ""."""
    return TOLD_LABEL_SITE if label_site_reads(settings) else ""


def covers_values(settings: Settings, table: str) -> bool:
    """Return whether noise covers the values of a table of the query."""
    if not settings.privacy.covers_features:
        return False
    named = {name.lower() for name in settings.of(MomentsSettings).private_tables}
    return not named or table.lower() in named


def _begins(settings: Settings) -> bool:
    return settings.mode == TRAIN and TRAIN_MOMENTS in settings.method.actions


RULES: Final = Rules(
    groups=(MomentsSettings, DescribeSettings),
    reads=names_of(MomentsSettings, DescribeSettings)
    | {"sample", "test_split", "validation_fraction", "l1", "l2", "row_weight"},
    conflicts=_conflicts,
    tells=tells_of_groups,
    tells_instead=_tells_instead,
    pads_sums=lambda _: True,
    seals_to_label=label_site_reads,
    covers_values=covers_values,
    begins={TRAIN_MOMENTS: _begins},
)


def has_errors(settings: Settings) -> bool:
    """Return whether a run trains, or explains, a model with standard errors."""
    is_read = "standard_errors" in settings.rules.reads
    return is_read and settings.of(ErrorSettings).standard_errors != NONE


def begins_information(settings: Settings) -> bool:
    """Return whether a run asks for the sums that errors are made of."""
    return settings.mode == TRAIN and has_errors(settings)


def tells_of_errors(settings: Settings) -> str:
    """Return what errors tell the server of a table; "" without them."""
    if not has_errors(settings):
        return ""
    is_clustered = CLUSTERS in weightings_of(settings)
    return WEIGHED.format(OVER_PAIRS if is_clustered else "")


def weightings_of(
    settings: Settings, outputs: int = 1, *, has_clusters: bool = False
) -> tuple[str, ...]:
    """Return by what the joined rows are weighed, once each, for standard errors.

    Of several classes with a score each, once for each two of them; of an information
    that has clusters, as that of times to an event, over pairs of their rows, too.
    """
    if outputs > 1:
        return tuple(
            f"{CURVATURE} of {first} and {second}"
            for first, second in combinations(range(outputs), 2)
        )
    beside = {ROBUST: (SQUARES,), CLUSTERED: (CLUSTERS,)}
    if has_clusters:
        return (CURVATURE, CLUSTERS)
    return (CURVATURE, *beside.get(settings.of(ErrorSettings).standard_errors, ()))


def _cluster_conflicts(errors: ErrorSettings) -> Iterator[str]:
    kind = errors.standard_errors
    if errors.cluster and kind != CLUSTERED:
        yield (
            f"cluster: it is set, but standard-errors is {kind!r}: set "
            f"standard-errors = {CLUSTERED!r}, or leave cluster out"
        )
    if kind == CLUSTERED and not errors.cluster:
        yield (
            "standard-errors: 'clustered' needs clusters: set cluster to the alias of "
            "a table that the label's is joined with; its rows that share a key of "
            "that join are a cluster"
        )


def error_conflicts(settings: Settings) -> Iterator[str]:
    """Yield the settings that errors do not go with."""
    yield from _cluster_conflicts(settings.of(ErrorSettings))
    kind = settings.of(ErrorSettings).standard_errors
    if kind == NONE:
        return
    asked = f"standard-errors: {kind!r}"
    if settings.loss != AUTO and not family_named(settings.loss).has_likelihood:
        able = [name for name in names_of_losses() if family_named(name).has_likelihood]
        yield (
            f"{asked} needs the likelihood of a label, which loss {settings.loss!r} "
            f"is not; {', '.join(able)} are"
        )
    for covered in settings.privacy.covered(*COVERED):
        yield f"{asked} would not count the noise of privacy.{covered}: leave it out"
    if settings.validation_share:
        yield (
            f"{asked} is for a model at its optimum, and rows that validate end "
            "training before: leave validation-fraction 0, and effects, factors and "
            "bins as they are"
        )
    if settings.row_weight != JOINED:
        yield (
            f"{asked} does not say how row-weight = {settings.row_weight!r} changes a "
            "row's variance: leave one of them out"
        )
    if settings.is_sampled:
        yield f"{asked} is for all joined rows, not for a coreset: leave it out"
