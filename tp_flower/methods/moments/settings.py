"""What training from second moments reads of a run's settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tp_flower.methods.moments.messages import TRAIN_MOMENTS
from tp_flower.protocol.fields import DP_SGD
from tp_flower.settings.declare import Form, Readers, list_of, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.run import CLASSIFICATION, REGRESSION, TRAIN
from tp_flower.settings.settings import Settings

NO_RANGE: Final = (
    "privacy.label-range: moments with noise need the range that the label is clipped "
    "to, such as '0, 5': declare it without looking at the data"
)
_TABLES: Final = list_of(
    str, "a list of different tables", lambda names: len(set(names)) == len(names)
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
    if settings.l1 and privacy.covers_features:
        yield (
            f"l1: strategy {strategy!r} chooses no columns by moments with noise: "
            "leave it 0, or set privacy.features = 'clear'"
        )
    if settings.l1 and settings.task == CLASSIFICATION:
        yield f"l1: strategy {strategy!r} takes none for classes: leave it 0"


def covers_values(settings: Settings, table: str) -> bool:
    """Return whether noise covers the values of a table of the query."""
    if not settings.privacy.covers_features:
        return False
    named = {name.lower() for name in settings.of(MomentsSettings).private_tables}
    return not named or table.lower() in named


def _begins(settings: Settings) -> bool:
    return settings.mode == TRAIN and TRAIN_MOMENTS in settings.method.actions


RULES: Final = Rules(
    groups=(MomentsSettings,),
    reads=names_of(MomentsSettings)
    | {"sample", "test_split", "validation_fraction", "l1", "l2", "row_weight"},
    conflicts=_conflicts,
    pads_sums=lambda _: True,
    covers_values=covers_values,
    begins={TRAIN_MOMENTS: _begins},
)
