"""Runs of the store whose server is killed, and can go on."""

from pathlib import Path

import pytest

from strategies import STRATEGIES
from tests.support.federated import LocalGrid, sharded, store, store_sql, whole
from tp_flower.query import Query

SETTINGS = {"num_epochs": 3, "device": "cpu", "task": "regression"}


class Killed(BaseException):
    """Of the server."""


class KilledServer:
    """A grid whose server is killed after the messages of round ``kill_at`` are
    answered.

    Of round ``-kill_at`` it is killed before they leave.
    """

    kill_at: int | None = None

    def push_messages(self, messages):
        messages = list(messages)
        at = self.kill_at
        is_it = at is not None and messages[0].metadata.group_id == str(abs(at))
        if is_it and at < 0:
            raise Killed
        sent = super().push_messages(messages)
        if is_it:
            raise Killed
        return sent


class KilledGrid(KilledServer, LocalGrid):
    pass


def sites_of(is_sharded: bool):
    frames = store()
    own = sharded(frames) if is_sharded else whole(frames)
    return {name: {name: shards} for name, shards in own.items()}


def strategy_in(folder: Path, name: str, **settings):
    own = {**SETTINGS, "output_dir": str(folder), **settings}
    return STRATEGIES[name](Query.from_sql(store_sql("squared")), **own)


def killed(place: Path, name: str, is_sharded: bool, at: int, **settings):
    """Kill a run's server, before or after the sites answered; return its grid."""
    grid = KilledGrid(sites_of(is_sharded), state=place / "sites")
    grid.kill_at = at
    with pytest.raises(Killed):
        strategy_in(place, name, **settings).start(grid)
    grid.kill_at = None
    return grid
