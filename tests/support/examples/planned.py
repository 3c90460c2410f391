"""What a run spends that makes every use of its plan."""

from collections.abc import Collection

from msgspec import structs

from tp_flower.privacy.mechanisms import Mechanism
from tp_flower.privacy.plan import PartPlan


def spent(plan: PartPlan, kinds: Collection[str]) -> list[Mechanism]:
    """The mechanisms of all planned uses of some kinds."""
    return [
        structs.replace(use.mechanism, count=use.mechanism.count * use.limit)
        for use in plan.uses
        if use.what in kinds
    ]
