"""Releases, and what a run spends that makes every use of its plan."""

from collections.abc import Collection

from msgspec import structs

from tp_flower.privacy.mechanisms import Gaussian, Mechanism, Release
from tp_flower.privacy.plan import PartPlan

STEP = Gaussian(6.0, count=4)


def release(
    what: str = "gradients",
    mechanism: Mechanism | None = STEP,
    source: str = "F",
    part: int = 1,
    table: str = "flights",
) -> Release:
    """A release of a table's rows, to the server in training."""
    words = (f"a row of {table}", "the row's features as zeros", "server")
    return Release(table, source, part, "train", what, *words, mechanism, "always")


def spent(plan: PartPlan, kinds: Collection[str]) -> list[Mechanism]:
    """The mechanisms of all planned uses of some kinds."""
    return [
        structs.replace(use.mechanism, count=use.mechanism.count * use.limit)
        for use in plan.uses
        if use.what in kinds
    ]
