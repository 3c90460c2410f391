"""Export a model: what its server has, and what its sites have, as one archive.

In a simulation one machine has both. In a federation the server's archive has what
combines the tables (`model.json`), and each site's archive has its own parts of the
model, with the same runner: a part never leaves its site by an export of others.

The two halves are loaded by name, because they never import each other.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Final

from tp_flower.export.archive import write_archive
from tp_flower.model_names import ModelVersion, find_version

EXPORTED: Final = "strategies.inference.exported:exported"
NAMED_PARTS: Final = "client_apps.data.exported_models:named_parts"
OWN_PARTS: Final = "client_apps.data.exported_models:own_parts"


def export_model(
    home: Path,
    model: str,
    path: Path,
    state: Path | None,
    *,
    with_onnx: bool = False,
) -> Path:
    """Write the archive of a model, and return its path.

    Args:
        home: the folder with the model's manifest.
        model: ``name@version``, or a name: its latest version.
        path: of the archive, a zip file that is not there yet.
        state: the folder with the parts of all sites, which a simulation has; the
            archive has no parts if none of the model are there, or it is None.
        with_onnx: whether each part has an ONNX graph of its scores, too.

    Raises:
        ModelError: there is no such model, it cannot be exported, or not be written.
    """
    described = resolve_name(EXPORTED)(home, model)
    content = dict(described.content)
    if state is not None and described.model.folder(state).is_dir():
        content |= resolve_name(NAMED_PARTS)(
            state, described.model, described.parts, with_onnx=with_onnx
        )
    return write_archive(path, content)


def export_parts(
    state: Path, model: str, path: Path, tables: str, *, with_onnx: bool = False
) -> Path:
    """Write the archive of the parts that a site keeps of a model; return its path.

    Args:
        state: the site's state folder.
        model: ``name@version``, or a name: its latest version there.
        path: of the archive.
        tables: the site's tables file.
        with_onnx: whether each part has an ONNX graph of its scores, too.

    Raises:
        ModelError: the site has no such parts, or they cannot be exported.
        SourceError: the tables file cannot be read, or lacks a table.
    """
    version: ModelVersion = find_version(state, model)
    content = resolve_name(OWN_PARTS)(state, version, tables, with_onnx=with_onnx)
    return write_archive(path, content)
