"""A site's parts of a saved model, for an export: the owner's, whoever asks for them.

Nothing here is sent: an export is a file that the owner of the tables writes, or
whoever runs a simulation, whose state has the parts of all sites.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from client_apps.data.row_effects import key_hasher
from client_apps.data.saved_models import SavedModel, part_folder, parts_of
from tp_flower.arrays import AnyArray
from tp_flower.errors import ModelError, SourceError
from tp_flower.export.parts import HostedColumns, PartName, TrainedPart, part_files
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.model_names import ModelVersion
from tp_flower.sources.shards import describe, load_tables
from tp_flower.sources.tables_file import ShardSource


def named_parts(
    root: Path,
    model: ModelVersion,
    wanted: Sequence[tuple[PartName, HostedColumns]],
    *,
    with_onnx: bool,
) -> dict[str, bytes]:
    """Return the files of parts in a state folder, by their paths in an archive.

    Raises:
        ModelError: a part is not here, or cannot be exported.
    """
    content: dict[str, bytes] = {}
    for named, columns in wanted:
        folder = part_folder(root, model, named.number)
        if not folder.is_dir():
            raise ModelError(
                f"part {named.number} of model {model} is not in {root}: its site "
                "exports it, with --state-dir"
            )
        saved = SavedModel.load(folder)
        content |= _files(saved, named, columns, with_onnx=with_onnx)
    return content


def own_parts(
    root: Path, model: ModelVersion, tables: str, *, with_onnx: bool
) -> dict[str, bytes]:
    """Return the files of all parts that a site keeps of a model.

    Args:
        root: the site's state folder.
        model: that it has parts of.
        tables: the path of its tables file, which has the types of the columns.
        with_onnx: whether each part has an ONNX graph, too.
    """
    shards = load_tables(tables)
    content: dict[str, bytes] = {}
    parts = {
        number: SavedModel.load(folder)
        for number, folder in sorted(parts_of(root, model).items())
    }
    if not parts:
        raise ModelError(f"{root} has no part of model {model}")
    aliases = [saved.table for saved in parts.values()]
    for number, saved in parts.items():
        name = saved.table
        if aliases.count(name) > 1:
            name = f"{name}.{number}"
        shard = _shard_of(saved, shards, tables)
        named = PartName(name, number, shard.site)
        content |= _files(saved, named, table_columns(shard), with_onnx=with_onnx)
    return content


def table_columns(shard: ShardSource) -> HostedColumns:
    """Return the columns of a shard, with their types and the formats of their days."""
    schema = describe(shard)
    formats = {name: texts.best.format for name, texts in schema.texts.items()}
    unclear = tuple(name for name, texts in schema.texts.items() if texts.are_ambiguous)
    return HostedColumns(schema.columns, formats, shard.nulls, unclear)


def _shard_of(
    saved: SavedModel, shards: Sequence[ShardSource], tables: str
) -> ShardSource:
    """Return a shard of the part's table."""
    name = saved.fragment.name.lower()
    for shard in shards:
        if shard.table.lower() == name:
            return shard
    raise SourceError(
        f"the tables file {tables} has no table {saved.fragment.name!r}, whose rows "
        "the part scores: name the file that the site was trained with"
    )


def _files(
    saved: SavedModel, named: PartName, columns: HostedColumns, *, with_onnx: bool
) -> Mapping[str, bytes]:
    """Return the files of one part."""
    numbers = [each for each in (saved.effects, saved.factors) if each is not None]
    names = next((each.names for each in numbers if len(each.hashes)), ())
    arrays: dict[str, AnyArray] = {}
    for each in numbers:
        arrays |= each.arrays
    part = TrainedPart(
        fragment=saved.fragment,
        encoder=saved.encoder,
        spec=saved.spec,
        parameters=saved.parameters,
        key_names=names,
        key_hashers=dict(_hashers(names)),
        key_arrays=arrays,
        bins=saved.bins,
    )
    try:
        return part_files(part, named, columns, with_onnx=with_onnx)
    except ModelError as error:
        raise ModelError(f"table {saved.table!r}: {error}") from None


def _hashers(names: Sequence[str]) -> Iterator[tuple[str, KeyedHasher]]:
    """Yield the hashers of keys by their names with kinds, "c.id (number)"."""
    for name in names:
        key, _, _ = name.rpartition(" (")
        yield name, key_hasher(key)
