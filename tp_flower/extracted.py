"""What a fragment of the query yields on one shard, and how it is kept in files.

Notation
    n   rows of the shard that pass the fragment's filters
    k   distinct values of a key
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tp_flower.columns import (
    CategoricalColumn,
    CodeArray,
    FeatureColumn,
    FloatArray,
    NumericColumn,
)

HashArray = npt.NDArray[np.uint64]
Arrays = dict[str, npt.NDArray[Any]]

META_FILE: Final = "shard.json"


@dataclass(frozen=True, eq=False)
class KeyColumn:
    """A join key of each row, as a number into its distinct hashed values.

    Attributes:
        codes: int32 (n,), row of ``hashes``; -1 where any part of the key is NULL.
        hashes: uint64 (k, 2), 128 bits of hash of each distinct value, in the hashes'
            order, so that it tells nothing about the values' order.
        kind: the kinds of the parts, such as "number" or "text+time".
    """

    codes: CodeArray
    hashes: HashArray
    kind: str


@dataclass(frozen=True, eq=False)
class LabelColumn:
    """The label of each row.

    Attributes:
        kind: "number", "boolean", "time" or "text".
        values: float64 (n,), NaN where NULL: numbers, 0/1, seconds since 1970, or for
            text the position in ``categories``.
        categories: the distinct texts of this shard, sorted; empty for other kinds.
    """

    kind: str
    values: FloatArray
    categories: tuple[str, ...] = ()

    @property
    def codes(self) -> CodeArray:
        """int32 (n,), position in ``categories``, -1 where NULL."""
        return np.where(np.isnan(self.values), -1, self.values).astype(np.int32)


@dataclass(frozen=True, eq=False)
class ExtractedShard:
    """What a fragment yields on one shard.

    Attributes:
        table: the fragment's table (its alias in the query).
        rows: n; zero if no row passes the filters.
        keys: one per key of the fragment.
        label: the label, None if it is another table's.
        columns: the features by name, in the fragment's order.
    """

    table: str
    rows: int
    keys: tuple[KeyColumn, ...]
    label: LabelColumn | None
    columns: dict[str, FeatureColumn]

    def to_arrays(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the arrays by name, and the rest as plain JSON types."""
        arrays: Arrays = {}
        for index, key in enumerate(self.keys):
            arrays[f"key-{index}-codes"] = key.codes
            arrays[f"key-{index}-hashes"] = key.hashes
        features = []
        for index, (name, column) in enumerate(self.columns.items()):
            entry: dict[str, Any] = {"name": name}
            if isinstance(column, NumericColumn):
                arrays[f"feature-{index}"] = column.values
            else:
                arrays[f"feature-{index}"] = column.codes
                entry["categories"] = list(column.categories)
            features.append(entry)
        meta: dict[str, Any] = {
            "table": self.table,
            "rows": self.rows,
            "keys": [key.kind for key in self.keys],
            "features": features,
        }
        if self.label is not None:
            arrays["label"] = self.label.values
            meta["label"] = {
                "kind": self.label.kind,
                "categories": list(self.label.categories),
            }
        return arrays, meta

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]
    ) -> "ExtractedShard":
        """Rebuild a shard from ``to_arrays``."""
        label = meta.get("label")
        return cls(
            table=meta["table"],
            rows=int(meta["rows"]),
            keys=tuple(
                KeyColumn(arrays[f"key-{i}-codes"], arrays[f"key-{i}-hashes"], kind)
                for i, kind in enumerate(meta["keys"])
            ),
            label=label
            and LabelColumn(label["kind"], arrays["label"], tuple(label["categories"])),
            columns={
                entry["name"]: _column(arrays[f"feature-{i}"], entry)
                for i, entry in enumerate(meta["features"])
            },
        )

    def save(self, folder: Path) -> None:
        """Write the shard to a folder as .npy files and one JSON file."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays, meta = self.to_arrays()
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array, allow_pickle=False)
        (folder / META_FILE).write_text(json.dumps({**meta, "arrays": list(arrays)}))

    @classmethod
    def load(cls, folder: Path) -> "ExtractedShard":
        """Read a saved shard; the arrays are memory maps, read when they are used."""
        meta = json.loads((folder / META_FILE).read_text())
        arrays = {
            name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in meta["arrays"]
        }
        return cls.from_arrays(arrays, meta)


def _column(array: npt.NDArray[Any], entry: Mapping[str, Any]) -> FeatureColumn:
    if "categories" in entry:
        return CategoricalColumn(array, tuple(entry["categories"]))
    return NumericColumn(array)
