"""A part of an exported model: what one table's rows, or a shard's, are scored with.

A part is a folder of the archive: `part.json`, which says how rows are read, encoded
and scored, and `part.npz`, the arrays that it speaks of. Whoever has it can read the
model of the table, with the key of its categories' hashes: it is the owner's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tp_flower.arrays import AnyArray
from tp_flower.errors import ModelError
from tp_flower.export.archive import npz_bytes
from tp_flower.export.onnx_graphs import onnx_bytes
from tp_flower.export.selection import ExportedSelect, selection
from tp_flower.features.bins import Binning, bin_columns
from tp_flower.features.encoder import SiteEncoder
from tp_flower.features.encodings import VectorEncoding
from tp_flower.features.sparse import is_sparse
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.learning.models.portable import portable_model
from tp_flower.query.fragment import Fragment

PART_FILE: Final = "part.json"
ARRAYS_FILE: Final = "part.npz"
ONNX_FILE: Final = "scores.onnx"
FOLDER: Final = "tables"


@dataclass(frozen=True)
class HostedColumns:
    """The columns of a table as the model was trained on them.

    Attributes:
        types: DuckDB types by name.
        formats: of strptime, of the days of texts that were read as times; "" is ISO.
        nulls: texts of a CSV file that stand for missing values.
        ambiguous: those of which nobody here knows which format the run has chosen.
    """

    types: Mapping[str, str]
    formats: Mapping[str, str] = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartName:
    """How an archive names a part.

    Attributes:
        name: in commands: the alias, with the site if there are several.
        number: of the model's part.
    """

    name: str
    number: int
    site: str = ""


@dataclass(frozen=True)
class TrainedPart:
    """A part of a model, as its site keeps it.

    Attributes:
        parameters: of the model, (p,).
        key_names: of the keys that effects and factors are of, sorted.
        key_hasher: returns the hasher of a key by its name, of these.
        key_arrays: their hashes and values, by name.
        bins: how rows become bins; None where the model has no trees of bins.
    """

    fragment: Fragment
    encoder: SiteEncoder
    spec: ModelSpec
    parameters: AnyArray
    key_names: tuple[str, ...]
    key_hashers: Mapping[str, KeyedHasher]
    key_arrays: Mapping[str, AnyArray]
    bins: Binning | None


def part_files(
    part: TrainedPart, named: PartName, columns: HostedColumns, *, with_onnx: bool
) -> dict[str, bytes]:
    """Return the files of a part, by their paths in the archive.

    A table without features has no ONNX graph.

    Raises:
        ModelError: it cannot be exported, and what to do instead.
    """
    encoder = part.encoder.encoder
    wanted = dict.fromkeys((item.name for item in encoder.encodings), 0)
    for item in encoder.encodings:
        if isinstance(item, VectorEncoding):
            wanted[item.name] = item.width
    selected = selection(part.fragment, columns.types, wanted)
    if unclear := [name for name in columns.ambiguous if name in selected.columns]:
        raise ModelError(
            f"the days of {', '.join(map(repr, unclear))} are read in two ways, and "
            "the site does not know which one the run has chosen: write 'dates' in the "
            "tables file"
        )
    portable = portable_model(part.spec, encoder.width, part.parameters)
    arrays = {**portable.arrays, **part.key_arrays}
    if part.bins is not None:
        arrays |= part.bins.arrays
    facts = {
        "part": named.name,
        "number": named.number,
        "table": part.fragment.table,
        "name": part.fragment.name,
        "site": named.site,
        "columns": {
            name: [columns.types[name], columns.formats.get(name, "")]
            for name in selected.columns
        },
        "nulls": list(columns.nulls),
        "select": selected.select,
        **encoder_facts(part.encoder),
        "outputs": part.spec.outputs,
        "regions": portable.regions,
        "divides": portable.divides,
        "key-secrets": _key_secrets(part, selected),
        "bins": _bin_columns(part),
        **portable.facts,
    }
    folder = f"{FOLDER}/{named.name}"
    content = {
        f"{folder}/{PART_FILE}": json_bytes(facts),
        f"{folder}/{ARRAYS_FILE}": npz_bytes(arrays),
    }
    if with_onnx and encoder.width:
        content[f"{folder}/{ONNX_FILE}"] = onnx_bytes(facts, arrays)
    return content


def encoder_facts(encoder: SiteEncoder) -> dict[str, Any]:
    """Return what `part.json` says of an encoder: its encodings, with their keys."""
    fitted = encoder.encoder
    return {
        "encoder": [
            {**msgspec.to_builtins(item), "width": len(item.feature_names)}
            for item in fitted.encodings
        ],
        "category-keys": {
            name: hasher.secret.hex() for name, hasher in encoder.keys.items()
        },
        "width": fitted.width,
        "sparse": is_sparse(fitted.width, fitted.stored),
    }


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """Return JSON for people: a line per entry."""
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def _key_secrets(part: TrainedPart, selected: ExportedSelect) -> list[str]:
    """Return the keys of the hashes of the first join keys, those that effects are of.

    Raises:
        ModelError: the query joins the table by other keys.
    """
    count = len(part.key_names)
    names = selected.key_names[:count]
    if tuple(sorted(names)) != part.key_names:
        raise ModelError(
            f"table {part.fragment.table!r}: the model has effects of the keys "
            f"{', '.join(part.key_names)}, and its query joins by {', '.join(names)}"
        )
    return [part.key_hashers[name].secret.hex() for name in names]


def _bin_columns(part: TrainedPart) -> list[dict[str, Any]]:
    """Return where the columns of bins are among the encoded ones."""
    if part.bins is None:
        return []
    return [
        {"first": column.first, "size": column.size, "hot": column.is_hot}
        for column in bin_columns(part.encoder.encoder)
    ]
