"""Settings of boosted trees, and their defaults by the number of rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tp_flower.joins.pairs import MOST_REGIONS
from tp_flower.model_names import model_name
from tp_flower.settings.declare import AUTO, BY_METHOD, Form, Range, Readers, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.settings import COVERED, Settings
from tp_flower.settings.training import FITTED, NONE

LEAVES = 127
FEWEST_LEAVES = 7
ROWS_PER_LEAF = 1_500
# larger trees fit the training rows alone, where a model came before
LEAVES_OF_REST: Final = 15
TREES = 30
FEWEST_TREES = 10
ROWS_PER_TREE = 500
"""How many leaves and trees by default: one for so many joined training rows, within
bounds."""
LINEAR_EPOCHS: Final = 12
LEAST_LINEAR_FALL: Final = 0.01
"""Of the validation loss, in an epoch of linear models that another one follows."""
ROWS_PER_REGION = 500
"""How many regions a table is divided into: one for so many joined training rows."""
EVEN: Final = 4
"""A region has at least this part of the joined rows that it would have on average."""
STEADY_TREES: Final = 50
"""Trees, about, that have not lowered the validation loss when training ends."""


def leaves_by_rows(joined_rows: int, most: int = LEAVES) -> int:
    """Return the default of ``leaves`` for so many joined training rows.

    >>> [leaves_by_rows(rows) for rows in (400, 15_000, 217_000)]
    [7, 10, 127]
    """
    return min(max(joined_rows // ROWS_PER_LEAF, FEWEST_LEAVES), most)


def trees_by_rows(joined_rows: int) -> int:
    """Return the default of ``trees-per-round`` for so many joined training rows.

    >>> [trees_by_rows(rows) for rows in (400, 10_000, 217_000)]
    [10, 20, 30]
    """
    return min(max(joined_rows // ROWS_PER_TREE, FEWEST_TREES), TREES)


def regions_by_rows(joined_rows: int) -> int:
    """Return how many regions a table is divided into, of so many joined training rows.

    >>> [regions_by_rows(rows) for rows in (400, 5_000, 217_000)]
    [2, 10, 32]
    """
    return min(max(joined_rows // ROWS_PER_REGION, 2), MOST_REGIONS)


def patience_by_trees(trees: int) -> int:
    """Return the default of ``patience`` for so many trees in a round.

    >>> [patience_by_trees(trees) for trees in (10, 20, 30, 100)]
    [5, 2, 2, 2]
    """
    return max(STEADY_TREES // trees, 2)


def _leaves(value: int) -> int:
    if value == 0 or 2 <= value <= 1 << 16:
        return value
    raise ValueError(f"{value!r} is neither 0 nor from 2 to 65536")


@dataclass(frozen=True)
class BoostSettings:
    """Boosted trees: how many, how large, and how bold."""

    readers = BY_METHOD

    trees_per_round: int = setting(
        0,
        "Trees that each table grows in a round (an epoch); 0 = one for each "
        f"{ROWS_PER_TREE} joined training rows, {FEWEST_TREES} to {TREES}, or {TREES} "
        "without validation rows.",
        Range(0, 10_001),
    )
    leaves: int = setting(
        0,
        f"Leaves of a tree, at most; 0 = one for each {ROWS_PER_LEAF:,} joined "
        f"training rows, {FEWEST_LEAVES} to {LEAVES}, or to {LEAVES_OF_REST} with "
        "`boost-from`.",
        Form("0, or from 2 to 65536", _leaves),
    )
    tree_rate: float = setting(
        0.1,
        "Share of its best fit that a tree adds, above 0.",
        Range(0, 1.0 + 1e-9, includes_low=False),
    )
    min_rows_per_leaf: int = setting(
        20, "Joined rows that a leaf has at least.", Range(1, 1 << 31)
    )
    linear_epochs: int = setting(
        LINEAR_EPOCHS,
        "Epochs, at most, in which tables fit linear models, before they grow trees: "
        "until the validation loss falls by less than 1 %, and for a quarter of "
        "num-epochs; none without validation rows, or with `boost-from`. Shards fit "
        "their own where they grow their own trees.",
        Range(0),
    )
    regions: str = setting(
        AUTO,
        "The table whose rows are divided into regions, which the trees of all other "
        'tables read, by alias, or "none". "auto": where rows validate and regions of '
        "two tables interact; without epsilons, and if policies allow it "
        "(`releases.regions`, `sees-regions`).",
        Form(f'"{AUTO}", "{NONE}" or an alias', str),
    )
    boost_from: str = setting(
        "",
        "Saved model to start from, trained on the same query and the same rows "
        '("name@version"; "name" = the latest); "" = a constant score.',
        Form("name, name@version", lambda text: text and model_name(text)),
        Readers(
            of_methods=True,
            refusal="strategy {strategy!r} starts from no saved model: {instead}",
        ),
    )


def _conflicts(settings: Settings) -> Iterator[str]:
    """Refuse to go on from a model without rows that validate."""
    divided = settings.of(BoostSettings).regions
    if divided not in (AUTO, NONE) and settings.privacy.covered(*COVERED):
        yield (
            f"regions: {divided!r} does not go with an epsilon: in which region a row "
            'is leaves without noise; use "none"'
        )
    if settings.start and not settings.validation_share:
        yield (
            "boost-from: trees that go on from a model need rows that validate, which "
            "say when trees no longer help: leave validation-fraction "
            '"auto", or above 0'
        )


RULES: Final = Rules(
    groups=(BoostSettings,),
    reads=names_of(BoostSettings) | FITTED | {"lou"},
    conflicts=_conflicts,
    instead={"l2": "fewer leaves, or a higher min-rows-per-leaf, bound trees"},
    synonyms={
        **dict.fromkeys(
            ("n-estimators", "num-trees", "num-boost-round", "num-iterations"),
            "num-epochs and trees-per-round, of strategy boost",
        ),
        **dict.fromkeys(
            ("max-depth", "num-leaves", "max-leaves", "max-leaf-nodes"),
            "leaves, of strategy boost",
        ),
        **dict.fromkeys(
            ("min-child-samples", "min-samples-leaf", "min-data-in-leaf"),
            "min-rows-per-leaf",
        ),
        **dict.fromkeys(("lr", "eta", "step-size", "eta0"), "tree-rate of boost"),
    },
)
