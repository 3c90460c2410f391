"""Each file of a site's state folder is removed in mid-run: the table in DEPLOY.md is
true.
"""

import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from client_apps.data import run_store
from client_apps.data.counter import COUNTER_FILE, Mark
from client_apps.data.database import FILE, START
from tests.support.federated import train
from tests.support.peers.faulty_grid import forget_processes
from tests.support.peers.keyed_sites import KeyedGrid
from tp_flower.errors import SiteError

ROW = re.compile(r"^\| `([^`]+)` \| the run (goes on|stops: \"[^\"]+\")")
TEXT = Path("DEPLOY.md").read_text(encoding="utf-8").partition("## Backup")[2]
TABLE = dict(match.groups() for line in TEXT.splitlines() if (match := ROW.match(line)))
SQL = "SELECT a.y AS label, a.v, b.x FROM a JOIN b ON a.k = b.k"
LOSER = "b"
# what training does not make: Flower's files, and row keys of predictions
OF_OTHERS = {"flower", "predictions"}


def tables() -> dict[str, pd.DataFrame]:
    rng = np.random.default_rng(1)
    numbers = {name: rng.normal(size=60) for name in ("v", "y")}
    a = pd.DataFrame({"k": np.arange(60) % 20, **numbers})
    x = rng.permutation(np.repeat([-0.5, 0.5], 10))
    return {"a": a, "b": pd.DataFrame({"k": np.arange(20), "x": x})}


class LosingGrid(KeyedGrid):
    """A SuperNode is killed before an epoch, and files are removed before it starts
    again.

    ``names`` are those that its state folder had at that time.
    """

    def __init__(
        self, folder: Path, lose: Callable[["LosingGrid", Path], None] | None = None
    ):
        super().__init__(folder, tables())
        self.pin()
        self.lose = lose
        self.names = set()
        self.epochs = 0

    def _deliver(self, message):
        asked = message.metadata.message_type, message.metadata.dst_node_id
        if asked == ("train.admm", self.nodes[LOSER]):
            self.epochs += 1
            if self.epochs == 3 and self.lose is not None:
                state = self.folders[LOSER] / "state"
                self.names = {path.name for path in state.iterdir()}
                with killed(state):
                    self.lose(self, state)
        return super()._deliver(message)


@contextmanager
def killed(state: Path):
    """End the site's process without the last words of its database, which stay in the
    log.
    """
    files = {path: path.read_bytes() for path in state.glob(f"{FILE}*")}
    forget_processes()
    for path, content in files.items():
        path.write_bytes(content)
    assert files[state / f"{FILE}-wal"]
    yield


def removed(name: str):
    """Return what removes a file or folder that the table names."""

    def lose(grid: LosingGrid, state: Path) -> None:
        run = grid.site(grid.nodes[LOSER]).store.run
        path = state / name.replace("<run>-<id>", run).rstrip("/")
        if name.endswith("/"):
            shutil.rmtree(path)
        else:
            path.unlink()

    return lose


def trained(grid: LosingGrid, folder: Path):
    return train(
        grid, SQL, num_epochs=5, device="cpu", output_dir=str(folder / "run")
    ).report


@pytest.mark.parametrize("name", TABLE)
def test_what_becomes_of_a_run_is_what_the_table_says(tmp_path, monkeypatch, name):
    # arrays of a small table are large ones here, so that the run has its folder
    monkeypatch.setattr(run_store, "LARGE_BYTES", 1 << 7)
    with LosingGrid(tmp_path) as grid:
        for other in OF_OTHERS:
            (grid.folders[LOSER] / "state" / other).mkdir()
        expected = trained(grid, tmp_path / "first")
        grid.lose = removed(name)
        grid.epochs = 0
        if TABLE[name] == "goes on":
            assert trained(grid, tmp_path).final_train == pytest.approx(
                expected.final_train
            )
        else:
            reason = re.escape(TABLE[name].removeprefix('stops: "').rstrip('"'))
            with pytest.raises(SiteError, match=rf"site 'b-0'.* failed: .*{reason}"):
                trained(grid, tmp_path)


def test_the_table_names_all_that_a_state_folder_has(tmp_path, monkeypatch):
    monkeypatch.setattr(run_store, "LARGE_BYTES", 1 << 7)
    with LosingGrid(tmp_path) as grid:
        trained(grid, tmp_path / "first")
        grid.lose = lambda *_: None
        grid.epochs = 0
        trained(grid, tmp_path)
    runs = {name for name in grid.names if re.fullmatch("[0-9a-f]{32}-.*", name)}
    assert grid.run_name in {name.partition("-")[0] for name in runs}
    others = {name.rstrip("/") for name in TABLE} - {"<run>-<id>"}
    assert grid.names - runs == others - OF_OTHERS


def test_a_counter_of_an_older_copy_is_no_fault(tmp_path):
    def lose(_, state):
        changes, *_ = (state / COUNTER_FILE).read_text().split()
        older = Mark(int(changes) - 1, 0, START).text()
        (state / COUNTER_FILE).write_bytes(older)

    with LosingGrid(tmp_path, lose) as grid:
        trained(grid, tmp_path)
        counter = grid.folders[LOSER] / "state" / COUNTER_FILE
        newest = Mark.of_text(counter.read_bytes())
    assert newest.seq > 0
