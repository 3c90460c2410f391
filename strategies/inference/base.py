"""ModelStrategy: a Flower Strategy that uses a saved model on the rows of a query."""

from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from strategies.disclosures import Audience, Release, releases
from strategies.inference.manifest import Manifest
from strategies.inference.model_sites import (
    Missing,
    Schemas,
    check_query,
    find_missing,
    model_parts,
    schemas_of,
    without_missing,
)
from strategies.inference.report import ModelRunReport
from strategies.privacy_report import privacy_report
from strategies.run.exchange import Replies, Request, ask
from strategies.run.replies import array_of
from strategies.run.sites import Inventory
from strategies.run.strategy import RoundListener, RoundStrategy
from strategies.setup.extract import Extracted, extract
from tp_flower.arrays import BoolArray, FloatArray
from tp_flower.joins.joining import JoinStep, build_mapping
from tp_flower.joins.mapping import TableMapping
from tp_flower.learning.losses import KMEANS
from tp_flower.methods import ADMM
from tp_flower.protocol import (
    FinishRequest,
    PrivacyTerms,
    RowKeyColumns,
    ScorePart,
    ScoreRequest,
    pack_bits,
)
from tp_flower.query import BoundQuery, Query
from tp_flower.reports.records import TableReport
from tp_flower.settings import EVALUATE, LABEL_SITE, Settings


@dataclass(frozen=True)
class Joined:
    """The joined rows of a query, as far as the server knows them.

    Attributes:
        bound: the query over the sites' columns; tables that rows are missing of are
            LEFT JOINed.
        extracted: what the sites sent.
        mapping: of the joined rows, over all rows of the tables.
        steps: of the join.
        missing: sites that are gone.
    """

    bound: BoundQuery
    extracted: Extracted
    mapping: TableMapping
    steps: tuple[JoinStep, ...]
    missing: Missing

    def select(self, chosen: TableMapping) -> "Joined":
        """Return these with other joined rows."""
        return replace(self, mapping=chosen)

    @property
    def is_partial(self) -> BoolArray:
        """(N,), joined rows without a row of a table that some are missing of."""
        partial = np.zeros(self.mapping.joined_rows, np.bool_)
        for table in self.missing.tables - {self.bound.label_table}:
            partial |= self.mapping.tables[table].row_of < 0
        return partial


def join_rows(
    bound: BoundQuery,
    missing: Missing,
    settings: Settings,
    inventory: Inventory,
    row_key: RowKeyColumns | None = None,
) -> Generator[Request, Replies, Joined]:
    """Run the fragments and return the joined rows.

    Args:
        bound: the query, as it can be answered without the sites that are gone.
        missing: sites that are gone.
        settings: of the run.
        inventory: of the sites.
        row_key: what names the label table's rows.

    Raises:
        TPFlowerError: any of its kinds, if a fragment cannot be run, or no row is left.
    """
    extracted = yield from extract(bound, settings, inventory, row_key)
    lacking = missing.tables - {bound.label_table}
    rows = extracted.table_rows
    # joined last, they change nothing of what is joined without them
    ordered = sorted(rows, key=lambda table: table in lacking)
    mapping, steps = build_mapping(
        bound.joins,
        extracted.keys,
        {table: rows[table] for table in ordered},
        bound.label_table,
        bound.outer,
        settings.max_joined_rows,
    )
    return Joined(bound, extracted, mapping, steps, missing)


def score_rows(
    joined: Joined, manifest: Manifest, settings: Settings, inventory: Inventory
) -> Generator[Request, Replies, FloatArray]:
    """Return the scores of the joined rows, (N, d_c).

    Raises:
        ModelError: a site has no part of the model for a shard of its.
        ReplyError: a site sent no such scores.
    """
    own = model_parts(manifest, joined.extracted.all_parts, inventory)
    masks = _masks(joined)
    asked = [part for part in joined.extracted.all_parts if masks[part.number].any()]
    request = ScoreRequest(
        **model_fields(manifest),
        privacy=PrivacyTerms.of(settings.privacy),
        device=settings.device,
        parts={
            part.number: ScorePart(
                model_part=own[part.number].number,
                digest=own[part.number].digest,
                rows=pack_bits(masks[part.number]),
            )
            for part in asked
        },
    )
    replies = yield ask(request, asked)
    local = {
        table: _gathered(joined, table, masks, replies, manifest.outputs)
        for table in joined.bound.tables
    }
    total = joined.mapping.sum_scores(manifest.base_score, local)
    for table in joined.missing.tables - {joined.bound.label_table}:
        unmatched = joined.mapping.tables[table].row_of < 0
        total[unmatched] += manifest.table(table).mean_score
    return total


def model_fields(manifest: Manifest) -> dict[str, str]:
    """Return the fields that name a model in a request."""
    model = manifest.model
    return {"model_name": model.name, "model_version": model.version}


def _masks(joined: Joined) -> dict[int, BoolArray]:
    """Return by part which of its rows are in a joined row."""
    masks = {}
    for table, parts in joined.extracted.parts.items():
        used = joined.mapping.tables[table].multiplicity > 0
        start = 0
        for part in parts:
            stop = start + joined.extracted.rows[part.number]
            masks[part.number] = used[start:stop]
            start = stop
    return masks


def _gathered(
    joined: Joined,
    table: str,
    masks: dict[int, BoolArray],
    replies: Replies,
    outputs: int,
) -> FloatArray:
    """Return the local scores of a table's rows, (n_i, d_c); 0 where none is joined."""
    blocks = [np.zeros((0, outputs))]
    for part in joined.extracted.parts[table]:
        mask = masks[part.number]
        scores = np.zeros((len(mask), outputs))
        if mask.any():
            shape = (int(np.count_nonzero(mask)), outputs)
            scores[mask] = array_of(replies, part, "scores", shape)
        blocks.append(scores)
    return np.concatenate(blocks)


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
