"""A coreset as a run knows it: which joined rows were drawn, and by what."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tp_flower.coresets.sampling import Sample


@dataclass(frozen=True)
class Drawn:
    """A sample of the joined training rows.

    Attributes:
        kind: how it was drawn: ``"importance"`` or ``"uniform"``.
        sample: of the joined training rows, by their numbers among all of them.
        joined_rows: N, how many there were.
        totals: by table, what the sensitivities of its rows sum to, as its sites say;
            empty where rows were drawn uniformly.
        shares: by table, of the draws that it decides on the average; the rest are
            drawn uniformly.
        capped: the parts whose totals were more than they can be, in words.
    """

    kind: str
    sample: Sample
    joined_rows: int
    totals: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    capped: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return what a report says of the sample."""
        return {
            "kind": self.kind,
            "size": self.sample.size,
            "distinct-rows": len(self.sample.joined),
            "joined-rows": self.joined_rows,
            "effective-rows": self.sample.effective_rows,
            "largest-weight": self.sample.largest_over_mean,
            "totals": dict(self.totals),
            "shares": dict(self.shares),
            "uniform-share": 1.0 - sum(self.shares.values()),
            "capped": list(self.capped),
        }
