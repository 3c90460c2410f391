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

ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
"""Sums over several threads depend on their number in the last digits."""


class CheckoutError(Exception):
    """A version cannot be checked out, or it lacks a script."""


@dataclass(frozen=True)
class Checkout:
    """One version of the project: its root, and its commit, if that is known."""

    folder: Path
    commit: str

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        home: Path,
        environment: Mapping[str, str] = ONE_THREAD,
    ) -> subprocess.CompletedProcess[str]:
        """Run this version's script of a name, in whichever folder of scripts it lies.

        ``home`` is for what runs and sites keep; a PYTHONPATH of ``environment`` comes
        after the version's.
        """
        script = next(self.folder.glob(f"scripts/**/{name}.py"), None)
        if script is None:
            raise CheckoutError(f"{self.folder} has no {name}.py in scripts")
        modules = [str(self.folder), str(self.folder / "scripts")]
        modules += filter(None, [environment.get("PYTHONPATH")])
        return subprocess.run(
            [sys.executable, str(script), *arguments],
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
    """Yield a commit's checkout, removed afterwards, or that in a folder as it is."""
    folder = Path(version)
    if (folder / "pyproject.toml").exists():
        yield Checkout(folder.resolve(), _git(folder, "rev-parse", "HEAD") or version)
        return
    commit = _git(ROOT, "rev-parse", "--verify", f"{version}^{{commit}}")
    if not commit:
        raise CheckoutError(
            f"{version!r} is neither a commit nor the root of a checkout"
        )
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
