"""Folders with an old and a new version of the project, and their scripts.

Versions are compared by what users run: scripts, their options, and the files that they
write. Modules may move from one version to another, so nothing of them is imported.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "run_app": ("scripts/run_app.py",),
    "make_store": ("scripts/make_store.py", "scripts/data/make_store.py"),
    "make_carriers": ("scripts/make_carriers.py", "scripts/data/make_carriers.py"),
    "benchmark": ("scripts/benchmark.py", "scripts/bench/benchmark.py"),
}
"""Where a script lies, in the order of versions: the first path that exists is run."""

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Sums over several threads depend on their number in the last digits."""


class CheckoutError(Exception):
    """A version cannot be checked out, or it lacks a script."""


@dataclass(frozen=True)
class Checkout:
    """One version of the project.

    Attributes:
        folder: its root.
        commit: its hash; the folder's path where that is no repository.
    """

    folder: Path
    commit: str

    def script(self, name: str) -> Path:
        """Return the path of a script of `SCRIPTS`.

        Raises:
            CheckoutError: this version has it nowhere.
        """
        paths = [self.folder / path for path in SCRIPTS[name]]
        for path in paths:
            if path.exists():
                return path
        message = f"{self.folder} has none of {', '.join(SCRIPTS[name])}"
        raise CheckoutError(message)

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        home: Path,
        environment: Mapping[str, str] = ONE_THREAD,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script with this version's modules.

        Args:
            name: of the script, as in `SCRIPTS`.
            arguments: of its command line.
            home: folder for what runs and sites keep.
            environment: variables that are set besides; modules of its PYTHONPATH
                come after the version's own.
        """
        modules = [str(self.folder), str(self.folder / "scripts")]
        if "PYTHONPATH" in environment:
            modules.append(environment["PYTHONPATH"])
        return subprocess.run(
            [sys.executable, str(self.script(name)), *arguments],
            env={
                **os.environ,
                **environment,
                "PYTHONPATH": os.pathsep.join(modules),
                "TP_FLOWER_HOME": str(home),
            },
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )


@contextmanager
def check_out(version: str) -> Iterator[Checkout]:
    """Yield a checkout of a commit, removed afterwards, or of a folder as it is.

    Args:
        version: a commit of this repository, or the root folder of a checkout.

    Raises:
        CheckoutError: there is no such commit.
    """
    folder = Path(version)
    if (folder / "pyproject.toml").exists():
        yield Checkout(folder.resolve(), _git(folder, "rev-parse", "HEAD") or version)
        return
    commit = _git(ROOT, "rev-parse", "--verify", f"{version}^{{commit}}")
    if not commit:
        message = f"{version!r} is neither a commit nor the root of a checkout"
        raise CheckoutError(message)
    with tempfile.TemporaryDirectory(prefix="tp-flower-checkout-") as text:
        tree = Path(text) / "tree"
        _git(ROOT, "worktree", "add", "--detach", str(tree), commit)
        try:
            yield Checkout(tree, commit)
        finally:
            _git(ROOT, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints; "" where it fails."""
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip()
