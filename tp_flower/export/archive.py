"""The archive of an exported model: a zip file that Python runs, and people can read.

__main__.py      runs the runner's command line
runner/          plain numpy and DuckDB (tp_flower/export/runner)
model.json       the query, and what combines the tables; not of a site's part
trees.npz        trees that read the bins of all tables, if the model has some
tables/PART/     part.json and part.npz of each table, or of each of its shards; and
                 scores.onnx, if asked for
MODEL_CARD.md    what the model is for, and what it was measured on
"""

import io
import zipfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np

from tp_flower.arrays import AnyArray
from tp_flower.errors import ModelError
from tp_flower.files import whole_file

FORMAT: Final = "tp_flower export"
VERSION: Final = 1
MODEL_FILE: Final = "model.json"
JOINT_FILE: Final = "trees.npz"
CARD_FILE: Final = "MODEL_CARD.md"
SUFFIX: Final = ".zip"
RUNNER: Final = "tp_flower.export.runner"
_MAIN: Final = '''"""Run an exported model: see runner/__init__.py."""

import sys
from pathlib import Path

from runner.command import main

sys.exit(main(str(Path(__file__).parent)))
'''
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The time of all files: equal models make equal archives."""


def write_archive(path: Path, content: Mapping[str, bytes]) -> Path:
    """Write an archive of some files, with the runner, whole or not at all.

    Raises:
        ModelError: there is a file, or the folder cannot be written.
    """
    if path.suffix != SUFFIX:
        raise ModelError(f"an export is a zip file: name it {path.name}{SUFFIX}")
    if path.exists():
        raise ModelError(f"{path} exists already: choose another name")
    everything = {"__main__.py": _MAIN.encode(), **runner_files(), **content}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            whole_file(path, is_durable=False) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            for name, data in sorted(everything.items()):
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, data)
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}") from None
    return path


def runner_files() -> dict[str, bytes]:
    """Return the modules of the runner, by their paths in an archive.

    There it is a package of its own, which imports nothing of ours.
    """
    modules = files(RUNNER)
    package = RUNNER.rpartition(".")[2]
    return {
        f"{package}/{module.name}": module.read_text("utf-8")
        .replace(RUNNER, package)
        .encode()
        for module in modules.iterdir()
        if module.name.endswith(".py")
    }


def npz_bytes(arrays: Mapping[str, AnyArray]) -> bytes:
    """Return arrays as the content of an npz file, equal bytes for equal arrays."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in sorted(arrays.items()):
            entry = zipfile.ZipInfo(f"{name}.npy", _EPOCH)
            with archive.open(entry, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
    return content.getvalue()
