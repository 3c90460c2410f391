"""ModelStrategy: a Flower Strategy that uses a saved model on the rows of a query."""

from abc import abstractmethod
from collections.abc import Generator, Mapping

import numpy as np

from strategies.disclosures.privacy_report import privacy_report
from strategies.disclosures.release import Release
from strategies.disclosures.releases import Audience, releases
from strategies.inference.manifest import Manifest
from strategies.inference.model_sites import (
    Missing,
    Schemas,
    check_query,
    find_missing,
    schemas_of,
    without_missing,
)
from strategies.inference.report import ModelRunReport
from strategies.inference.scoring import Joined
from strategies.run.exchange import Replies, Request, ask
from strategies.run.strategy import RoundListener, RoundStrategy
from tp_flower.learning.clustering_loss import KMEANS
from tp_flower.methods import ADMM
from tp_flower.protocol import FinishRequest
from tp_flower.query import BoundQuery, Query
from tp_flower.reports.records import TableReport
from tp_flower.settings import EVALUATE, LABEL_SITE, Settings


class ModelStrategy(RoundStrategy):
    """Base of what is done with a saved model.

    Args:
        query: whose rows are scored.
        manifest: of the model.
        settings: of the run; ``overrides`` replace single fields.
        on_round: called with the record of every round, for progress displays.
    """

    def __init__(
        self,
        query: Query,
        manifest: Manifest,
        settings: Settings | None = None,
        on_round: RoundListener | None = None,
        **overrides: object,
    ) -> None:
        super().__init__(query, settings, on_round, **overrides)
        self.manifest = manifest
        self._joined: Joined | None = None

    @abstractmethod
    def bind(self) -> BoundQuery:
        """Return the query over the sites' columns."""

    @abstractmethod
    def model_rounds(self, bound: BoundQuery) -> Generator[Request, Replies, Joined]:
        """Exchange messages until the rows are scored; return them.

        Args:
            bound: the query, as it can be answered without the sites that are gone.
        """

    @property
    def schemas(self) -> Schemas:
        """The columns of every table."""
        return schemas_of(self.manifest, self.inventory)

    @property
    def missing(self) -> Missing:
        """The sites of the model that are gone."""
        return find_missing(self.manifest, self.inventory)

    def rounds(self) -> Generator[Request, Replies, None]:
        """Check the query against the model, score, and let the sites forget."""
        bound = self.bind()
        check_query(self.manifest, bound)
        policy = self.settings.on_missing
        bound = without_missing(self.manifest, bound, self.missing, policy)
        joined = yield from self.model_rounds(bound)
        yield ask(FinishRequest(), joined.extracted.all_parts)
        self._joined = joined

    @property
    def joined(self) -> Joined:
        """The joined rows.

        Raises:
            RuntimeError: before the rounds are done.
        """
        if self._joined is None:
            raise RuntimeError("no row is joined before the rounds are done")
        return self._joined

    def report(
        self,
        predictions: Mapping[str, object] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> ModelRunReport:
        """Return the record of the run.

        Args:
            predictions: where they are, if there are any.
            metrics: of labelled rows.

        Raises:
            RuntimeError: before the rounds are done.
        """
        joined = self.joined
        label_rows = joined.mapping.tables[joined.bound.label_table].multiplicity
        return ModelRunReport(
            mode=self.settings.mode,
            manifest=self.manifest,
            settings=self.settings.to_dict(),
            query=self.query.to_sql(),
            tables=[self._table(joined, name) for name in joined.bound.tables],
            join_steps=joined.steps,
            missing=joined.missing.sites,
            joined_rows=joined.mapping.joined_rows,
            label_rows=int(np.count_nonzero(label_rows)),
            partial_rows=int(np.count_nonzero(joined.is_partial)),
            predictions=predictions,
            metrics=metrics or {},
            history=self.history,
            privacy=privacy_report(
                self._releases(joined),
                self.ledgers,
                self.settings.privacy,
                is_complete=self.is_finished,
            ),
            output_dir=self.settings.output_dir,
            started=self.started,
            seconds=self.seconds,
        )

    def _table(self, joined: Joined, name: str) -> TableReport:
        own, parts = self.manifest.table(name), joined.extracted.parts[name]
        counts = joined.mapping.tables[name].multiplicity
        used = counts[counts > 0]
        return TableReport(
            table=name,
            name=own.name,
            rows=joined.extracted.table_rows[name],
            features=own.encoder.width,
            shards=len(parts),
            sites=tuple(part.site for part in parts),
            multiplicity_min=int(used.min()) if len(used) else 0,
            multiplicity_mean=float(used.mean()) if len(used) else 0.0,
            multiplicity_max=int(used.max(initial=0)),
            dropped=own.encoder.dropped,
        )

    def _releases(self, joined: Joined) -> list[Release]:
        bound, nodes = joined.bound, self.inventory.nodes
        parts = joined.extracted.parts
        audience = Audience(
            label_table=bound.label_table,
            family=ADMM,
            sharded=[name for name, own in parts.items() if len(own) > 1],
            gram=(),
            grouped=[
                name
                for name, own in parts.items()
                if len(own) > 1 and bound.fragments_of(name)[0].subquery is not None
            ],
            is_linear=all(table.kind == "linear" for table in self.manifest.tables),
            is_simulated=all(node.is_simulated for node in nodes.values()),
            privacy=self.settings.privacy,
            # all sites have the same, or the run has been refused
            keys=next(iter(nodes.values())).keys,
            weight=bound.weight_table or "",
            has_label=self.settings.mode == EVALUATE and self.manifest.loss != KMEANS,
            is_prediction=True,
            has_row_key=joined.extracted.row_hashes is not None,
            is_delivered=self.settings.predictions_at == LABEL_SITE,
        )
        return releases(audience)
