"""Keep what a plan's SELECT yields, batch by batch.

Layout
    numbers.bin     numbers, numeric label and weight, float64 blocks
    positions.bin   texts and keys, int32 blocks of positions in lists
    codes-<i>.bin   code of each text in list i, int32, then -1 for what is missing
    texts-<i>.bin   the distinct texts of list i, sorted: an Arrow stream
    vectors-<i>.bin float32, row by row
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tp_flower.errors import SourceError
from tp_flower.extraction.block_files import BlockWriter, Files
from tp_flower.extraction.extracted import NUMBERS, POSITIONS
from tp_flower.extraction.select_plan import Piece, Plan
from tp_flower.extraction.text_codes import MISSING, TextLists

PENDING_ROWS: Final = 1 << 14


class ShardWriter:
    """Takes the batches of a plan's SELECT and keeps them in files.

    Args:
        plan: what is selected.
        files: where to keep it; none of the names are taken.
        spill: a folder for what does not fit into memory; None for memory alone.
    """

    def __init__(self, plan: Plan, files: Files, spill: Path | None) -> None:
        self._plan, self._files = plan, files
        self._texts = len(plan.texts) + len(plan.key_kinds)
        self._numbers = BlockWriter(files, NUMBERS, len(plan.numbers), np.float64)
        self._positions = BlockWriter(files, POSITIONS, self._texts, np.int32)
        self._lists = TextLists(self._texts, spill)
        self._vectors = [
            _VectorWriter(plan, piece, f"vectors-{slot}.bin", files)
            for slot, piece in enumerate(plan.vectors)
        ]

    def add(self, batch: pa.RecordBatch) -> None:
        """Keep a batch of rows.

        Raises:
            SourceError: a number is infinite, or vectors differ in length.
        """
        columns = iter(batch.columns)
        numbers = [next(columns).to_numpy() for _ in self._plan.numbers]
        for piece, values in zip(self._plan.numbers, numbers, strict=True):
            _check_finite(self._plan, piece, values)
        self._numbers.append(numbers, batch.num_rows)
        positions = [
            self._lists.add(slot, next(columns)) for slot in range(self._texts)
        ]
        self._positions.append(positions, batch.num_rows)
        for vectors in self._vectors:
            vectors.append(next(columns))

    def finish(self, table: str) -> dict[str, Any]:
        """Write what is left; return the description of the shard, plain JSON types."""
        self._numbers.finish()
        self._positions.finish()
        widths = [vectors.finish() for vectors in self._vectors]
        lists = [self._write_list(slot) for slot in range(self._texts)]
        self._files.close()
        plan = self._plan
        keys = [
            {"kind": kind, "slot": len(plan.texts) + number}
            for number, kind in enumerate(plan.key_kinds)
        ]
        places = _places(plan, widths)
        labels = [{"kind": p.kind, **places[p.column]} for p in plan.label]
        return {
            "table": table,
            "rows": self._numbers.rows,
            "numbers": _shape(self._numbers, len(plan.numbers)),
            "positions": _shape(self._positions, self._texts),
            "lists": lists,
            "features": [
                {"name": piece.name, "kind": piece.kind, **places[piece.column]}
                for piece in plan.features
            ],
            "label": labels[0] if labels else None,
            "weight": next((places[p.column] for p in plan.weight), None),
            "keys": keys[: len(plan.keys)],
            "groups": keys[-1] if plan.groups else None,
        }

    def close(self) -> None:
        """Let go of everything, whether it is finished or not."""
        self._lists.close()
        self._files.close()

    def _write_list(self, slot: int) -> tuple[int, int]:
        """Write the codes and texts of a list; return their number, their bytes."""
        codes, texts = self._lists.number(slot)
        self._files.append(f"codes-{slot}.bin", np.append(codes, np.int32(MISSING)))
        table = pa.table({"t": texts})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        data = np.frombuffer(sink.getvalue(), np.uint8)
        self._files.append(f"texts-{slot}.bin", data)
        return len(codes) + 1, len(data)


class _VectorWriter:
    """Appends the vectors of one feature; their length is known at the first one."""

    def __init__(self, plan: Plan, piece: Piece, name: str, files: Files) -> None:
        self._plan, self._piece, self._name, self._files = plan, piece, name, files
        self._width = piece.width
        self._waiting = 0  # rows without a vector, before the first one

    def append(self, column: pa.Array) -> None:
        present = column.is_valid().to_numpy(zero_copy_only=False)
        vectors = column.drop_null()
        width = self._common_width(vectors)
        if width is None:
            self._waiting += len(column)
            return
        self._write_missing(width)
        rows = np.full((len(column), width), np.nan, np.float32)
        values = vectors.flatten().to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            rows[present] = values.reshape(-1, width)
        _check_finite(self._plan, self._piece, rows)
        self._files.append(self._name, rows)

    def finish(self) -> int:
        """Write what is left; return the width, 0 if there is no vector at all."""
        width = self._width or 0
        self._write_missing(width)
        return width

    def _write_missing(self, width: int) -> None:
        while self._waiting:
            rows = min(self._waiting, PENDING_ROWS)
            self._files.append(self._name, np.full((rows, width), np.nan, np.float32))
            self._waiting -= rows

    def _common_width(self, vectors: pa.Array) -> int | None:
        """The length of these vectors and of all before; None if there is none yet."""
        if len(vectors):
            found = pc.min_max(pc.list_value_length(vectors))
            shortest, longest = found["min"].as_py(), found["max"].as_py()
            self._width = shortest if self._width is None else self._width
            if shortest != longest or shortest != self._width:
                raise SourceError(
                    f"{self._plan.source}: the vectors of {self._piece.name!r} differ "
                    f"in length: {shortest} and {max(longest, self._width)}; "
                    "all must have the same"
                )
        return self._width


def _check_finite(plan: Plan, piece: Piece, values: npt.NDArray[np.floating]) -> None:
    if np.isinf(values).any():
        raise SourceError(
            f"{plan.source}: {piece.name!r} has infinite values: "
            "filter them out or replace them in the query"
        )


def _places(plan: Plan, widths: list[int]) -> Mapping[str, Mapping[str, int]]:
    """Where each feature, label and weight is, by its piece's column."""
    places: dict[str, Mapping[str, int]] = {}
    for pieces in (plan.numbers, plan.texts, plan.vectors):
        for slot, piece in enumerate(pieces):
            width = widths[slot] if piece.kind == "vector" else 1
            places[piece.column] = {"slot": slot, "width": width}
    return places


def _shape(writer: BlockWriter, width: int) -> Mapping[str, int]:
    return {"width": width, "block-rows": writer.block_rows}
