"""Versions of the project, and how their scripts are run."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]


def run_python(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float | None = None,
) -> tuple[int, str]:
    """Run Python in a folder; return its exit status and output.

    Raises:
        subprocess.TimeoutExpired: the time limit is over.
    """
    with subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException:
            # what it has started goes with the group; without a limit it may clean up
            os.killpg(process.pid, signal.SIGKILL if seconds else signal.SIGTERM)
            raise
    return process.returncode, output


@dataclass(frozen=True)
class Checkout:
    """One version of the project: its root, and its commit."""

    folder: Path
    commit: str

    def run(
        self,
        name: str,
        arguments: Sequence[str],
        home: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, str]:
        """Run this version's script of a name, in whichever folder of scripts it lies.

        ``home`` is for what runs and sites keep; a PYTHONPATH of ``environment`` comes
        after the version's.
        """
        script = next(self.folder.glob(f"scripts/**/{name}.py"))
        modules = [self.folder, self.folder / "scripts", environment.get("PYTHONPATH")]
        path = os.pathsep.join(str(module) for module in modules if module)
        places = {"PYTHONPATH": path, "TP_FLOWER_HOME": str(home)}
        return run_python([str(script), *arguments], home, {**environment, **places})


@contextmanager
def check_out(version: str) -> Iterator[Checkout]:
    """Yield a commit's checkout, removed afterwards, or that in a folder as it is."""
    folder = Path(version).resolve()
    if (folder / "pyproject.toml").exists():
        yield Checkout(folder, _git("-C", str(folder), "rev-parse", "HEAD"))
        return
    commit = _git("rev-parse", "--verify", f"{version}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="tp-flower-checkout-") as text:
        tree = Path(text) / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield Checkout(tree, commit)
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()
