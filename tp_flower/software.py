"""The versions of the software that a model was trained with."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

VERSION: Final = "0.1.0"
"""Of tp_flower. As a Flower app it is not an installed package, which would tell."""


def software(*, has_torch: bool) -> dict[str, str]:
    """Return the version of every package that a model depends on.

    Args:
        has_torch: whether torch had a part in it.
    """
    packages = ("flwr", "numpy", *(("torch",) if has_torch else ()))
    found = {"python": platform.python_version(), "tp_flower": VERSION}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            # a build without metadata says what it is itself
            module = sys.modules.get(package)
            found[package] = str(getattr(module, "__version__", "unknown"))
    return found
