"""Score joined rows with a saved model: the sum of what its parts say of their rows.

The sites' fragments yield the joined rows, as in training; then every site scores those
of its rows that are in one (``score``), once each. Where sites are gone, the mean score
of their table stands for what they would have sent.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from strategies.inference.manifest import Manifest
from strategies.inference.model_sites import Missing, model_parts
from strategies.run.exchange import Replies, Request, ask
from strategies.run.reply_checks import array_of
from strategies.run.sites import Inventory
from strategies.setup.extract import Extracted, extract
from tp_flower.arrays import FloatArray
from tp_flower.joins.mapping import JoinStep, TableMapping, build_mapping
from tp_flower.protocol import RowKeyColumns, ScorePart, ScoreRequest, pack_bits
from tp_flower.query import BoundQuery
from tp_flower.settings import Settings

BoolArray = npt.NDArray[np.bool_]


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
        privacy=settings.privacy.to_dict(),
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
