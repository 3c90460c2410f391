"""Real deployments for tests, which are skipped where they cannot be had."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.deploy import deployment


@contextmanager
def deployed(folder: Path) -> Iterator[deployment.Deployment]:
    for program in ("bash", "openssl", "ssh-keygen"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with deployment.deployed(folder) as running:
        yield running
