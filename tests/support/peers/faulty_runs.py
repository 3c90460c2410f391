"""Runs among faults, of every method, and what the same run is without them."""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import safetensors.numpy

from client_apps.data.counter import COUNTER_FILE
from client_apps.data.database import FILE
from strategies import STRATEGIES
from tests.support.federated import write_site
from tests.support.peers import faulty_grid, hostile
from tp_flower.errors import TPFlowerError
from tp_flower.query import Query
from tp_flower.randomness import NoiseSource
from tp_flower.settings import PrivacySettings

SQL = (
    "SELECT {label} AS label, o.price, o.day, c.age FROM orders o JOIN customers c ON "
    "o.cust = c.id"
)
TIMEOUT = 20_000.0
"""Long enough for seven tries, each after a silence twice as long."""

MOST_LIVES = 100
"""Of a server that is killed again and again."""
OF_DATABASE = ("", "-wal", "-shm")
RANDOM = ("ident", "time")


@dataclass(frozen=True)
class Method:
    """A way of training; without the site "uk" all customers are at one."""

    strategy: str
    sites: tuple[str, ...] = ("shop", "us", "uk")
    own: Mapping[str, object] = field(default_factory=dict)
    label: str = "o.qty"
    sql: str = SQL


def private(**chosen: object) -> dict[str, PrivacySettings]:
    return {"privacy": PrivacySettings(**chosen)}


SPENT = {"epsilon": 3.0, "delta": 1e-3}
WHOLE = ("shop", "us")
FLIPPED = private(labels="randomised-response", label_epsilon=2.0)
SOLVED = {
    "num_epochs": 0,
    "coreset_size": 8,
    "clusters": 2,
    "coreset_solver": "distdim",
}
METHODS = {
    "admm": Method("admm", WHOLE),
    "gram": Method("admm"),
    "cg": Method("cg"),
    "boost": Method("boost", own={"trees_per_round": 2, "min_rows_per_leaf": 2}),
    "consensus": Method("admm", own={"lou": "consensus"}),
    "sgd": Method("sgd", WHOLE, own={"batch_size": 6}),
    "sgd-sharded": Method("sgd", own={"batch_size": 6}),
    "dp-sgd": Method("admm", own=private(features="dp-sgd", **SPENT)),
    "statistics": Method("admm", own=private(features="statistics", **SPENT)),
    "labels": Method("admm", own=FLIPPED, label="o.qty > 0"),
    "personalised": Method(
        "personalised",
        ("us", "uk"),
        own={"graph": "data", "graph_epsilon": 5.0},
        label="c.age",
        sql="SELECT {label} AS label, c.id FROM customers c",
    ),
    "coreset": Method("coreset-kmeans", own=SOLVED),
}


@dataclass
class Ended:
    """What a run has left: parameters by site and part, lines of ledgers by site.

    ``asked`` is the action and the node of every try of a message.
    """

    parameters: dict[str, np.ndarray]
    ledgers: dict[str, list]
    error: TPFlowerError | None
    happened: list[tuple[str, int, faulty_grid.Fault]]
    asked: list[tuple[str, int]]
    losses: list[float] = field(default_factory=list)

    def check_is(self, other: "Ended") -> None:
        """Assert that it has come to the same end as another one."""
        assert self.error is None, self.happened
        assert self.parameters.keys() == other.parameters.keys(), self.happened
        for name, theta in self.parameters.items():
            np.testing.assert_allclose(
                theta, other.parameters[name], rtol=1e-6, err_msg=str(self.happened)
            )
        assert self.ledgers == other.ledgers, self.happened


class Federation:
    """Sites with files of their own, on which one run after the other trains."""

    def __init__(self, folder: Path, method: Method) -> None:
        self._folder = folder
        self._method = method
        self._query = Query.from_sql(method.sql.format(label=method.label))
        self.state = folder / "state-0"
        self._runs = 0
        hosted = hostile.tables()
        if "uk" not in method.sites:
            both = [hosted[site]["customers"] for site in ("us", "uk")]
            hosted["us"]["customers"] = pd.concat(both, ignore_index=True)
        self.sites = {
            site: write_site(folder / site, hosted[site]) for site in method.sites
        }

    def start(self) -> None:
        """Have sites that have taken part in no run, but read their tables."""
        self._runs += 1
        before, self.state = self.state, self._folder / f"state-{self._runs}"
        for site in self._method.sites:
            (self.state / site).mkdir(parents=True)
            for name in ("cache", "row-order-key"):
                if (before / site / name).exists():
                    (before / site / name).rename(self.state / site / name)
        shutil.rmtree(before, ignore_errors=True)
        faulty_grid.forget_processes()

    def train(
        self, schedule: faulty_grid.Schedule | None = None, **world: Any
    ) -> Ended:
        """Train to the end or to an error; resume whenever the server was killed."""
        world = faulty_grid.World(**{"schedule": schedule} if schedule else {}, **world)
        for _ in range(MOST_LIVES):
            try:
                return self._live(world)
            except faulty_grid.ServerKilledError:
                faulty_grid.forget_processes()
        raise AssertionError(f"the server was killed too often: {world.happened}")

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.state / "run"

    @property
    def can_be_resumed(self) -> bool:
        return (self.run / "checkpoint" / "journal.db").exists()

    def _live(self, world: faulty_grid.World) -> Ended:
        grid = faulty_grid.FaultyGrid(world, self.sites, self.state)
        try:
            with faulty_grid.virtual_time():
                return self.train_over(grid, world.happened, world.asked)
        finally:
            grid.close()

    def train_over(self, grid: Any, happened: list, asked: list = ()) -> Ended:
        """Train over a grid of the sites; see ``Ended`` for the lists."""
        strategy = STRATEGIES[self._method.strategy](
            self._query,
            output_dir=str(self.run),
            resume=str(self.run) if self.can_be_resumed else "",
            site_timeout=TIMEOUT,
            wait_seconds=TIMEOUT,
            device="cpu",
            **{"num_epochs": 2, **self._method.own},
        )
        error = None
        try:
            strategy.start(grid)
            # as whoever has written the report does
            strategy.session.end()
        except TPFlowerError as raised:
            error = raised
        losses = [item.train["loss"] for item in strategy.history if item.train]
        seen = ledgers(strategy), error, happened, asked, losses
        return Ended(self._models(), *seen)

    def _models(self) -> dict[str, np.ndarray]:
        """The parameters that the sites have saved, by site and part."""
        found = {}
        for file in sorted(self.state.rglob("model.safetensors")):
            site = file.relative_to(self.state).parts[0]
            (theta,) = safetensors.numpy.load_file(file).values()
            name = f"{site}/{file.parent.name}"
            assert name not in found
            found[name] = theta
        return found

    def database(self, site: str) -> Path:
        """What a site keeps of its runs."""
        return self.state / site / FILE

    def check_nothing_left(self) -> None:
        """Assert that all is over but what is to stay."""
        assert not self.can_be_resumed
        stays = {"cache", "row-order-key", "models", COUNTER_FILE}
        stays |= {FILE + ending for ending in OF_DATABASE}
        for site in self._method.sites:
            assert {path.name for path in (self.state / site).iterdir()} <= stays
            query = "SELECT name FROM entries WHERE run <> 'labels'"
            names = {
                name for (name,) in faulty_grid.rows_in(self.database(site), query)
            }
            assert names <= {".round", ".reply"}
            assert not list((self.state / site).glob("cache/uses/*"))


def ledgers(strategy) -> dict[str, list]:
    """The accounts of a run's releases, without what is random in them."""
    return {
        site: [{k: v for k, v in line.items() if k not in RANDOM} for line in lines]
        for site, lines in strategy.ledgers.items()
    }


def by_number(history: str, *facts: object) -> str:
    """A history that tells the rounds, and not the requests: keys in them differ."""
    told = facts[0] if isinstance(facts[0], int) else "rows"
    return f"{history} {told}"


@pytest.fixture(scope="module", autouse=True)
def same_noise() -> Iterator[None]:
    """What noise follows from is the same in every run, and the log is quiet."""

    def fixed(size: int) -> bytes:
        return bytes(range(size))

    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with (
        patch("client_apps.rounds.site.token_bytes", fixed),
        patch("client_apps.rounds.site.extend_history", by_number),
        patch(
            "client_apps.privacy.noisy_labels.NoiseSource",
            lambda: NoiseSource(fixed(32)),
        ),
    ):
        yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in memory, where there is such a thing."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="tp-flower-faults-") as name:
        yield Path(name)


Plain = Callable[[str], tuple[Federation, Ended]]


@pytest.fixture(scope="module")
def plain(place) -> Plain:
    """By method: a federation, and what a run without faults has left there."""
    known: dict[str, tuple[Federation, Ended]] = {}

    def find(name: str) -> tuple[Federation, Ended]:
        if name not in known:
            federation = Federation(place / name, METHODS[name])
            federation.start()
            ended = federation.train()
            assert ended.error is None, ended.error
            federation.check_nothing_left()
            known[name] = federation, ended
        federation, ended = known[name]
        federation.start()
        return federation, ended

    return find
