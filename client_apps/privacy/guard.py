"""What stands between a request and a site's tables: their policies.

Every action asks the guard before it reads, and again before what it has computed
leaves. The rules are ``tp_flower/sources/policy.py``'s; here is what of a request they
apply to.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from client_apps.data.ledger import Budget
from client_apps.rounds.site import Site
from tp_flower.errors import SourceError
from tp_flower.features.choice import TableChoice
from tp_flower.protocol import PrivacyTerms
from tp_flower.query.fragment import Fragment
from tp_flower.query.reads import reads
from tp_flower.sources.policy import (
    MODELS,
    SCORES,
    WEIGHTS,
)
from tp_flower.sources.shards import ShardSchema, ShardSource


class Guard:
    """Checks of one message's requests against the policies of the site's shards.

    Args:
        site: in the run that the message is of.
    """

    def __init__(self, site: Site) -> None:
        self._site = site

    def schema(self, source: ShardSource) -> ShardSchema:
        """Return what the server may know of a shard's columns.

        Raises:
            SourceError: the source cannot be read, or its policy names a column that
                it does not have.
        """
        schema = self._site.tables.describe(source)
        try:
            source.policy.check_names(schema.columns)
        except SourceError as error:
            raise SourceError(f"{source}: {error}") from None
        visible = source.policy.visible(schema.columns)
        return replace(
            schema,
            columns={name: schema.columns[name] for name in visible},
            all_null=tuple(name for name in schema.all_null if name in visible),
        )

    def check_fragment(self, source: ShardSource, fragment: Fragment) -> None:
        """Refuse a fragment that reads what it may not, before anything is read.

        Raises:
            PolicyError: names the rule, the piece and the column; or weights may not
                leave.
            QueryError: a piece is not an expression of those that a site may run.
            SourceError: as ``schema`` says.
        """
        if fragment.weight is not None:
            source.policy.check_release(WEIGHTS, is_private=False)
        if not source.policy.is_about_columns:
            return
        self.schema(source)
        for read in reads(fragment):
            source.policy.check_read(read)

    def check_extracted(
        self, source: ShardSource, fragment: Fragment, rows: int
    ) -> None:
        """Refuse to tell anything of a fragment that yields too few rows.

        A shard without any row is nobody's; a condition that nobody meets tells as much
        as one that one row meets.

        Raises:
            PolicyError: it yields fewer than the policy's ``min-rows``.
        """
        if rows or fragment.filters or fragment.subquery is not None:
            source.policy.check_rows(rows, f"the answer of table {fragment.table!r}")

    def check_rows(self, source: ShardSource, rows: int, what: str) -> None:
        """Refuse to compute something of too few rows, which the server has chosen.

        Args:
            source: the shard.
            rows: how many; of none nothing is computed.
            what: that is computed, for the message.

        Raises:
            PolicyError: there are fewer than the policy's ``min-rows``.
        """
        if rows:
            source.policy.check_rows(rows, what)

    def check_statistics(
        self, source: ShardSource, choice: TableChoice, kinds: Mapping[str, str]
    ) -> None:
        """Refuse statistics that are finer than the policy allows.

        Args:
            source: the shard.
            choice: the encoders that the server asks for.
            kinds: of value, by feature; "" of a column without a type.

        Raises:
            PolicyError: names the feature and which encoders need no statistics.
            SchemaError: an encoder does not fit its feature.
        """
        for name, kind in kinds.items():
            if not choice.is_declared(name, kind):
                spec = choice.spec_for(name, kind)
                source.policy.check_statistics(choice.table, name, kind, spec)

    def check_plan(
        self,
        source: ShardSource,
        kinds: Collection[str],
        privacy: PrivacyTerms | None = None,
    ) -> None:
        """Refuse a run whose mechanisms cover less than the policy demands.

        Args:
            source: the shard.
            privacy: mechanisms of the run; None where nothing is covered.
            kinds: what will leave of this shard: "labels", "models" (gradients, Gram,
                moments, parameters, curvatures), "scores", "statistics", "rows".

        Raises:
            PolicyError: something may not leave, or not without noise.
        """
        covered = privacy and {
            MODELS: privacy.covers_features,
            SCORES: privacy.covers_predictions,
        }
        for kind in kinds:
            is_private = bool(covered and covered.get(kind))
            source.policy.check_release(kind, is_private=is_private)

    def source_id(self, source: ShardSource) -> str:
        """Return what the ledger and kept labels call a shard's rows.

        It is the place that the rows are at, whatever they are called and however they
        are read there; of rows that move, the policy's ``budget-name``. Data frames are
        others in every grid.
        """
        place: list[object]
        if source.policy.budget_name:
            place = ["named", source.policy.budget_name]
        elif source.database is not None:
            place = ["database", str(source.database)]
        elif source.path is not None:
            place = ["path", os.path.realpath(source.path), source.relation]
        else:
            place = ["frame", source.token, source.table, source.index]
        return hashlib.sha256(json.dumps(place).encode()).hexdigest()[:32]

    def budgets(self, sources: Iterable[ShardSource]) -> dict[str, Budget]:
        """Return the budgets of some shards' rows, by source.

        Where several entries of the tables file are about the same rows, the smallest
        budget holds for all.
        """
        wanted = {self.source_id(source) for source in sources}
        budgets: dict[str, Budget] = {}
        for source in self._site.shards():
            policy, name = source.policy, self.source_id(source)
            if policy.epsilon is None or name not in wanted:
                continue
            own = Budget(policy.epsilon, policy.delta)
            other = budgets.get(name, own)
            budgets[name] = Budget(
                min(own.epsilon, other.epsilon), min(own.delta, other.delta)
            )
        return budgets
