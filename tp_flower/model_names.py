"""Names and versions of saved models, and the folders named after them.

The server keeps a model's manifest, a site its parts of the model, both below
``<home>/models/<name>/<version>``. A name or version from outside becomes a path only
through :class:`ModelVersion`, which accepts no other characters than these.
"""

import difflib
import platform
import re
import secrets
import shutil
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from tp_flower.errors import ModelError

NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
VERSION: Final = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
"""When the run started, and the first digits of its name."""
MODELS: Final = "models"
MANIFEST_FILE: Final = "manifest.json"
_DELETED: Final = ".deleted-"
_SHOWN: Final = 80


@dataclass(frozen=True, order=True)
class ModelVersion:
    """One version of a named model, whose runs share the name.

    ``version`` is the start of the run, UTC, and four digits of the run's name; later
    versions sort after earlier ones.

    >>> str(ModelVersion("delays", "20261122-001500-3f9a"))
    'delays@20261122-001500-3f9a'
    """

    name: str
    version: str

    def __post_init__(self) -> None:
        """Raise ModelError unless name and version are safe as path components."""
        check_name(self.name)
        if not VERSION.fullmatch(self.version):
            raise ModelError(
                f"model version {_quote(self.version)} is not of the form "
                "YYYYMMDD-HHMMSS-xxxx, with four hexadecimal digits at the end"
            )

    def __str__(self) -> str:
        """Return ``name@version``."""
        return f"{self.name}@{self.version}"

    @classmethod
    def parse(cls, text: str) -> "ModelVersion":
        """Read ``name@version``."""
        name, _, version = text.partition("@")
        if not version:
            raise ModelError(
                f"{_quote(text)} has no version: write name@version, as `list` does"
            )
        return cls(name, version)

    def folder(self, home: Path) -> Path:
        """Return the version's folder below a home folder or state folder."""
        return home / MODELS / self.name / self.version


def check_name(name: object) -> str:
    """Return a model's name, which may become a path; refuse any other text."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ModelError(
            f"model name {_quote(name)} is not allowed: it must have 1 to 64 of a-z, "
            "0-9, '.', '_' and '-', and begin with a letter or digit"
        )
    return name


def make_version(started: datetime, run: str) -> str:
    """Return the version of a run's model.

    >>> make_version(datetime(2026, 11, 22, 0, 15, tzinfo=UTC), "3f9ac0")
    '20261122-001500-3f9a'
    """
    return f"{started.astimezone(UTC):%Y%m%d-%H%M%S}-{run[:4]}"


def versions_in(home: Path) -> tuple[ModelVersion, ...]:
    """Return the models below a folder, by name, the earliest version first."""
    models = []
    for folder in (home / MODELS).glob("*/*"):
        name = folder.parent.name
        version = folder.name
        # there may be other files, and models that are being written or deleted
        if NAME.fullmatch(name) and VERSION.fullmatch(version) and folder.is_dir():
            models.append(ModelVersion(name, version))
    return tuple(sorted(models))


def find_version(home: Path, text: str) -> ModelVersion:
    """Return the version that ``name@version`` names, or the latest of ``name``."""
    name = check_name(text.partition("@")[0])
    requested = ModelVersion.parse(text) if "@" in text else None
    versions = versions_in(home)
    candidates = [version for version in versions if version.name == name]
    if requested is None and candidates:
        return candidates[-1]
    if requested in candidates:
        return requested
    raise ModelError(f"there is no model {text!r}{_advice(name, text, versions)}")


def delete_version(home: Path, text: str) -> ModelVersion:
    """Delete one version, whole or not at all, and return which it was."""
    ModelVersion.parse(text)
    model = find_version(home, text)
    folder = model.folder(home)
    try:
        for leftover in folder.parent.glob(f"{_DELETED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        # nothing finds it under its new name, even if the removal fails halfway
        renamed = folder.with_name(f"{_DELETED}{model.version}-{secrets.token_hex(4)}")
        folder.rename(renamed)
        shutil.rmtree(renamed)
    except OSError as error:
        raise ModelError(f"model {model} cannot be deleted: {error.strerror}") from None
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
    return model


def _advice(name: str, text: str, versions: tuple[ModelVersion, ...]) -> str:
    """Return the names that may have been meant, as the end of a sentence."""
    candidates = [str(version) for version in versions if version.name == name]
    names = list(dict.fromkeys(version.name for version in versions))
    close = difflib.get_close_matches(text, candidates, n=3, cutoff=0.0)
    if close := close or difflib.get_close_matches(name, names, n=3):
        return f". Did you mean {' or '.join(close)}?"
    if not names:
        return "; there is none yet"
    return f"; there are {', '.join(names)}"


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


SOFTWARE_VERSION: Final = "0.1.0"  # a Flower app has no package metadata


def software(*, has_torch: bool) -> dict[str, str]:
    """Return the version of every package that a model depends on."""
    versions = {"python": platform.python_version(), "tp_flower": SOFTWARE_VERSION}
    for package in ("flwr", "numpy", *(("torch",) if has_torch else ())):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            # a build without metadata may have a __version__
            versions[package] = str(
                getattr(sys.modules.get(package), "__version__", "unknown")
            )
    return versions


def model_name(text: str) -> str:
    """Return the text "name" or "name@version" of a saved model, else ValueError."""
    name, at, version = text.partition("@")
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a model name: it must begin with a-z or 0-9 and have "
            "at most 64 of a-z, 0-9, '.', '_' and '-'"
        )
    if at and not VERSION.fullmatch(version):
        raise ValueError(
            f"{version!r} is not a model version, such as '20261121-093000-1a2b'"
        )
    return text
