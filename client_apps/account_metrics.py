"""The account of a site as metrics, for its owner's own monitoring.

No server is told of them: what is left of a budget tells what others have asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from client_apps.data.ledger import ANSWER, REFUSE, open_ledger
from client_apps.privacy.guard import budgets
from client_apps.rounds.site import Site
from tp_flower.privacy.epsilons import compose
from tp_flower.reports.prometheus import COUNTER, GAUGE, Labels, Metric, metrics_text
from tp_flower.sources.derived.accounts import source_id
from tp_flower.sources.policy import DEFAULT_DELTA

PREFIX: Final = "tp_flower_site"
OUTCOMES: Final = {ANSWER: "answered", REFUSE: "refused"}
"""By event of the ledger, what became of a query."""


@dataclass(frozen=True)
class ShardAccount:
    """What queries of a shard have spent, of what budget and quota; None for no limit.

    Attributes:
        queries: by event of the ledger, all of them, and those of the last 24 hours.
    """

    labels: Labels
    spent: float
    budget: float | None
    queries: Mapping[str, tuple[int, int]]
    quota: int | None


def site_metrics(root: str, site: Site) -> str:
    """Return the account of each shard as metrics; those that share rows have one."""
    return metrics_text(_metrics(list(_accounts(root, site))))


def _accounts(root: str, site: Site) -> Iterator[ShardAccount]:
    ledger = open_ledger(root)
    budget_of = budgets(site)
    for shard in site.shards:
        name = source_id(shard)
        budget = budget_of.get(name)
        delta = budget.delta if budget else DEFAULT_DELTA
        yield ShardAccount(
            {"table": shard.table, "site": shard.site, "shard": shard.index},
            spent=compose(ledger.released(name), delta),
            budget=budget.epsilon if budget else None,
            queries=ledger.queries(name),
            quota=site.quotas_by_rows.get(name),
        )


def _metrics(shards: list[ShardAccount]) -> Iterator[Metric]:
    yield Metric(
        f"{PREFIX}_epsilon_spent",
        GAUGE,
        "Epsilon that has been spent, open reservations in full.",
        [(shard.labels, shard.spent) for shard in shards],
    )
    yield Metric(
        f"{PREFIX}_epsilon_budget",
        GAUGE,
        "Epsilon that the policy allows.",
        [(s.labels, s.budget) for s in shards if s.budget is not None],
    )
    yield Metric(
        f"{PREFIX}_queries_total",
        COUNTER,
        "Queries that were answered, or refused after rows were read.",
        [
            ({**shard.labels, "outcome": outcome}, shard.queries.get(event, (0, 0))[0])
            for shard in shards
            for event, outcome in OUTCOMES.items()
        ],
    )
    yield Metric(
        f"{PREFIX}_queries_of_day",
        GAUGE,
        "Queries of the last 24 hours, which count for queries-per-day.",
        [(s.labels, sum(day for _, day in s.queries.values())) for s in shards],
    )
    yield Metric(
        f"{PREFIX}_queries_per_day",
        GAUGE,
        "Queries that the policy allows in 24 hours.",
        [(s.labels, s.quota) for s in shards if s.quota is not None],
    )
