"""Deliver: the label table's site writes the predictions of its rows.

The server sends the scores of the joined rows, summed over the tables, and which own
row is behind each; the site adds what names its rows. The file stays in its state
folder, readable by its user alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from client_apps.orders import (
    Order,
    header_of,
    model_of,
    part_orders,
    real_numbers,
    whole_numbers,
)
from client_apps.row_keys import PREDICTIONS, PRIVATE_FILE, RUN_SHOWN, RowKey
from client_apps.site import Site
from client_apps.store import cannot_write
from tp_flower.errors import SiteError
from tp_flower.extraction.extracted import ExtractedShard
from tp_flower.predictions import (
    ROW,
    Outputs,
    Scored,
    prediction_table,
    write_predictions,
)
from tp_flower.protocol import Packet, unpack_bits

MOST_CLASSES: Final = 1000


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
    def of(cls, site: Site, header: Order) -> "_Delivery":
        """Read a request.

        Raises:
            SiteError: it is malformed, or the site keeps nothing on disk.
        """
        root = site.state_folder
        if root is None:
            raise SiteError(
                "this site can keep no predictions: its state-dir is ':memory:'"
            )
        model, run = model_of(header), site.store.run
        name = f"{model.name}-{model.version}-{run[:RUN_SHOWN]}"
        facts = {
            "model": str(model),
            "query": header.text("query"),
            "run": run[:RUN_SHOWN],
        }
        return cls(root, root / PREDICTIONS / name, _outputs(header), facts)


def deliver(site: Site, request: Packet) -> Packet:
    """Write the predictions of the parts' rows, a file for each."""
    own = _Delivery.of(site, header_of(request))
    parts = []
    for number, order in part_orders(site, request):
        extracted = site.extracted(number)
        scored = _received(number, request, extracted.rows, own.outputs)
        named = _named(order, extracted, scored)
        table = prediction_table(named, scored, own.outputs)
        path = own.folder / f"part-{number}.parquet"
        try:
            write_predictions(table, path, own.facts, PRIVATE_FILE)
        except OSError as error:
            raise cannot_write(own.folder, error) from error
        file = path.relative_to(own.root).as_posix()
        parts.append({"id": number, "rows": len(scored.rows), "file": file})
    return Packet({"parts": parts})


def _outputs(header: Order) -> Outputs:
    """Return what the scores stand for."""
    classes = tuple(header.texts("classes"))
    if len(set(classes)) != len(classes) or len(classes) > MOST_CLASSES:
        raise SiteError(
            f"malformed request: 'classes' must be at most {MOST_CLASSES} that differ"
        )
    return header.parsed("loss", lambda loss: Outputs(loss, classes))


def _received(number: int, request: Packet, total: int, outputs: Outputs) -> Scored:
    """Return the joined rows of a part of ``total`` rows that the server has sent."""
    sent = request.array(number, "rows")
    rows = whole_numbers(sent, "rows", low=0, high=total - 1)
    if (np.diff(rows) < 0).any():
        raise SiteError("malformed request: array 'rows' must ascend")
    shape = (len(rows), outputs.count)
    scores = real_numbers(request.array(number, "scores"), "scores", shape)
    partial = unpack_bits(request.array(number, "partial"), len(rows))
    return Scored(rows, scores, partial)


def _named(
    order: Order, extracted: ExtractedShard, scored: Scored
) -> dict[str, pa.Array]:
    """Return what names the joined rows: the own row, and the columns of its key."""
    row_key = RowKey.of(order, len(extracted.keys))
    rows = pa.array(scored.rows)
    columns = row_key.plain(extracted).items()
    return {ROW: rows, **{name: own.take(rows) for name, own in columns}}
