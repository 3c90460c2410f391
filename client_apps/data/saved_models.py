"""The parts of saved models that a site keeps, with their encoders.

Each part has a folder ``<state-dir>/models/<name>/<version>/part-<number>`` with its
parameters (``model.safetensors``) and everything that turns rows into features
(``model.json``: the encoder with its keys, the part of the query, the model's
specification, the software versions). It never leaves the site; the server gets the
digest of both files, and uses it to request the part again.
"""

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
import safetensors.numpy

from client_apps.data.row_effects import EFFECT, FACTOR, KeyNumbers
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import ModelError, QueryError, SchemaError
from tp_flower.features.bins import Binning
from tp_flower.features.encoder import SiteEncoder
from tp_flower.files import sync
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.model_names import ModelVersion
from tp_flower.query import Fragment

VERSION: Final = 2
_FACTS = "model.json"
_PARAMETERS = "model.safetensors"
_THETA = "theta"
_PART: Final = "part-"
_MALFORMED: Final = (
    *(KeyError, TypeError, ValueError, AttributeError),
    *(SchemaError, QueryError, safetensors.SafetensorError),
)


@dataclass(frozen=True)
class SavedModel:
    """One part of a trained model.

    Attributes:
        table: alias in the query.
        parameters: (p,).
        versions: versions of the software that trained the model, by package.
        start: the model that it was boosted from, as its run named it; "" for none.
        effects: what its scores add for the keys of the rows; None for nothing.
        factors: of the rows' keys, which the server multiplies; None for none.
        bins: how its rows become the bins of trees at the server; None where they have
            not left.
    """

    table: str
    encoder: SiteEncoder
    spec: ModelSpec
    parameters: FloatArray
    fragment: Fragment
    versions: Mapping[str, str]
    start: str = ""
    effects: KeyNumbers | None = None
    factors: KeyNumbers | None = None
    bins: Binning | None = None

    def keep(self, folder: Path, *, is_durable: bool = False) -> str:
        """Write the part, unless it is there, and return its digest.

        The folder appears whole; a folder with another part is refused.
        """
        files = self._files()
        digest = digest_of(files)
        if folder.exists():
            # from the same run: its last message has arrived twice
            if digest_of(_read(folder)) == digest:
                return digest
            raise ModelError(f"{folder} already holds another model")
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True
        ) as temporary_name:
            temporary = Path(temporary_name)
            for name, data in files.items():
                (temporary / name).write_bytes(data)
            if is_durable:
                for path in (*temporary.iterdir(), temporary):
                    sync(path)
            temporary.rename(folder)
            if is_durable:
                sync(folder.parent)
        return digest

    def _files(self) -> dict[str, bytes]:
        """Return the part's files, by name."""
        metadata = {
            "version": VERSION,
            "table": self.table,
            "model": msgspec.to_builtins(self.spec),
            "encoder": self.encoder.to_json(),
            "fragment": self.fragment.to_json(),
            "versions": dict(self.versions),
            "start": self.start,
        }
        arrays: dict[str, AnyArray] = {_THETA: np.ascontiguousarray(self.parameters)}
        for numbers in filter(None, (self.effects, self.factors)):
            metadata |= numbers.metadata
            arrays |= numbers.arrays
        if self.bins is not None:
            metadata["bins"] = self.bins.most
            arrays |= self.bins.arrays
        # equal parts give equal bytes
        return {
            _FACTS: json.dumps(metadata, sort_keys=True).encode(),
            _PARAMETERS: safetensors.numpy.save(arrays),
        }

    @classmethod
    def load(cls, folder: Path, digest: str = "") -> Self:
        """Return the part in a folder; a digest that is not "" must match its files."""
        try:
            files = _read(folder)
            metadata: Any = json.loads(files[_FACTS])
            if metadata["version"] != VERSION:
                raise ModelError(
                    f"the model in {folder} has version {metadata['version']!r}, "
                    f"expected {VERSION}"
                )
            if digest and digest_of(files) != digest:
                raise ModelError(
                    f"the model in {folder} is not the one that was trained: its "
                    "digest differs"
                )
            arrays = safetensors.numpy.load(files[_PARAMETERS])
            return cls(
                table=str(metadata["table"]),
                encoder=SiteEncoder.from_json(metadata["encoder"]),
                spec=msgspec.convert(metadata["model"], ModelSpec),
                parameters=arrays[_THETA],
                fragment=Fragment.from_json(metadata["fragment"]),
                versions={str(k): str(v) for k, v in metadata["versions"].items()},
                start=str(metadata.get("start", "")),
                effects=KeyNumbers.read(EFFECT, metadata, arrays),
                factors=KeyNumbers.read(FACTOR, metadata, arrays),
                bins=Binning.read(arrays) if "bins" in metadata else None,
            )
        except _MALFORMED as error:
            raise ModelError(
                f"the model in {folder} is damaged: {type(error).__name__}"
            ) from None


def part_folder(root: Path, model: ModelVersion, number: int) -> Path:
    """Return the folder of one part of a model, below the state folder."""
    return model.folder(root) / f"{_PART}{number}"


def parts_of(root: Path, model: ModelVersion) -> dict[int, Path]:
    """Return the folders of the parts that a site keeps of a model, by number."""
    by_text = {
        path.name.removeprefix(_PART): path
        for path in model.folder(root).glob(f"{_PART}*")
    }
    return {int(text): path for text, path in by_text.items() if text.isdecimal()}


def digest_of(files: Mapping[str, bytes]) -> str:
    """Return the hexadecimal SHA-256 of a part's files, each preceded by its length."""
    digest = hashlib.sha256()
    for name in (_FACTS, _PARAMETERS):
        digest.update(len(files[name]).to_bytes(8, "big"))
        digest.update(files[name])
    return digest.hexdigest()


def _read(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in (_FACTS, _PARAMETERS)}
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"there is no model in {folder}") from None
