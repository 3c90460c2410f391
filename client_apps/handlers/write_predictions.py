"""Deliver: the label table's site writes the predictions of its rows.

The server sends the scores of the joined rows, summed over the tables, and which own
row is behind each; the site adds what names its rows. The file stays in its state
folder, readable by its user alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from client_apps.data.run_store import cannot_write
from client_apps.handlers.row_keys import PREDICTIONS, PRIVATE_FILE, RUN_SHOWN, RowKey
from client_apps.rounds.site import Site
from tp_flower.errors import SiteError
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.model_names import ModelVersion
from tp_flower.protocol import (
    DeliveredPart,
    DeliverPart,
    DeliverReply,
    DeliverRequest,
    check_sizes,
    parse,
    unpack_bits,
)
from tp_flower.reports.predictions import (
    ROW,
    Outputs,
    Scored,
    prediction_table,
    write_predictions,
)


@dataclass(frozen=True)
class _Delivery:
    """What a request says of all parts.

    Attributes:
        root: the state folder.
        folder: in it, that the files are written to.
        outputs: what the scores stand for.
        facts: for the files' metadata.
    """

    root: Path
    folder: Path
    outputs: Outputs
    facts: Mapping[str, str]

    @classmethod
    def of(cls, site: Site, request: DeliverRequest) -> "_Delivery":
        """Read a request.

        Raises:
            SiteError: it is malformed, or the site keeps nothing on disk.
        """
        root = site.state_folder
        if root is None:
            raise SiteError(
                "this site can keep no predictions: its state-dir is ':memory:'"
            )
        run = site.store.run
        model = ModelVersion(request.model_name, request.model_version)
        name = f"{model.name}-{model.version}-{run[:RUN_SHOWN]}"
        facts = {
            "model": str(model),
            "query": request.query,
            "run": run[:RUN_SHOWN],
        }
        return cls(root, root / PREDICTIONS / name, _outputs(request), facts)


def deliver(site: Site, request: DeliverRequest) -> DeliverReply:
    """Write the predictions of the parts' rows, a file for each."""
    delivery = _Delivery.of(site, request)
    return DeliverReply(
        {
            number: _delivered(site, number, body, delivery)
            for number, body in site.each(request.parts)
        }
    )


def _delivered(
    site: Site, number: int, body: DeliverPart, delivery: _Delivery
) -> DeliveredPart:
    extracted = site.extracted(number)
    scored = _scored(body, extracted.rows, delivery.outputs)
    named = _named(body, extracted, scored)
    table = prediction_table(named, scored, delivery.outputs)
    path = delivery.folder / f"part-{number}.parquet"
    try:
        write_predictions(table, path, delivery.facts, PRIVATE_FILE)
    except OSError as error:
        raise cannot_write(delivery.folder, error) from error
    file = path.relative_to(delivery.root).as_posix()
    return DeliveredPart(rows=len(scored.rows), file=file)


def _outputs(request: DeliverRequest) -> Outputs:
    """Return what the scores stand for."""
    classes = tuple(request.classes)
    if len(set(classes)) != len(classes):
        raise SiteError("malformed request: 'classes' must differ")
    return parse(request.loss, "loss", lambda loss: Outputs(loss, classes))


def _scored(body: DeliverPart, total: int, outputs: Outputs) -> Scored:
    """Return the joined rows of a part of ``total`` rows that the server has sent."""
    rows = body.rows.astype(np.int64)
    if rows.size and rows.max() >= total:
        raise SiteError(
            f"malformed request: array 'rows' must hold numbers from 0 to {total - 1}"
        )
    if (np.diff(rows) < 0).any():
        raise SiteError("malformed request: array 'rows' must ascend")
    check_sizes(body, outputs=outputs.count)
    return Scored(rows, body.scores, unpack_bits(body.partial, len(rows)))


def _named(
    body: DeliverPart, extracted: ExtractedShard, scored: Scored
) -> dict[str, pa.Array]:
    """Return what names the joined rows: the own row, and the columns of its key."""
    row_key = RowKey.of(body.row_key, len(extracted.keys))
    rows = pa.array(scored.rows)
    columns = row_key.plain(extracted).items()
    return {ROW: rows, **{name: own.take(rows) for name, own in columns}}
