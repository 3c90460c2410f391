"""Run a strategy on a small federation in this process, and keep all that it shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from client_apps.app import app
from client_apps.operator.state import Stateless
from client_apps.rounds.site import Site
from strategies import STRATEGIES, TrainingStrategy
from strategies.disclosures import disclosure_values
from strategies.run.grid import InProcessGrid
from strategies.setup.problem import TrainingProblem
from tests.support.policies import OPEN, lenient
from tp_flower.features.sparse import dense
from tp_flower.learning.models.local_model import host_features
from tp_flower.methods.boost.messages import TREES
from tp_flower.objectives import takes_numbers
from tp_flower.privacy.plan import PartPlan
from tp_flower.protocol.messages import action_named
from tp_flower.protocol.packet import (
    ArrayKey,
    Packet,
    message_bytes,
    pack,
    unpack,
    unpack_bits,
)
from tp_flower.query import Query
from tp_flower.reports.records import RoundReport, RunReport

SOURCE = """FROM orders o JOIN customers c ON o.customer = c.id
JOIN items i ON o.item = i.item"""
FEATURES = "o.day, o.online, c.age, c.region, i.price, i.weight"
LABELS = {
    "squared": "o.qty",
    "logistic": "o.qty > 3",
    "softmax": "CASE WHEN o.qty > 4 THEN 'c' WHEN o.qty > 2 THEN 'b' ELSE 'a' END",
}
ALIASES = {"o": "orders", "c": "customers", "i": "items"}
COLUMNS = {"o": ("day", "online"), "c": ("age", "region"), "i": ("price", "weight")}
Frames = dict[str, pd.DataFrame]
Sites = Sequence[Mapping[str, list[pd.DataFrame]]]


def task_of(loss: str) -> str:
    return "regression" if takes_numbers(loss) else "classification"


def store_sql(loss: str) -> str:
    return f"SELECT {LABELS[loss]} AS label, {FEATURES} {SOURCE}"


def store(orders: int = 60, customers: int = 12, seed: int = 0) -> Frames:
    """Orders of customers; several parts per item, so that items are many-to-many."""
    rng = np.random.default_rng(seed)
    parts = pd.DataFrame(
        {
            "item": np.repeat(np.arange(7), [1, 2, 2, 3, 1, 2, 1]),
            "price": rng.gamma(2.0, 3.0, 12).round(2),
            "weight": rng.normal(5.0, 2.0, 12).round(2),
        }
    )
    parts.loc[4, "weight"] = np.nan
    age = rng.integers(18, 80, customers).astype(float)
    age[3] = np.nan
    people = pd.DataFrame(
        {
            "id": np.arange(customers),
            "age": age,
            "region": rng.choice(["US", "UK", "FR"], customers),
        }
    )
    people.loc[5, "region"] = None
    customer = rng.integers(0, customers + 1, orders).astype(float)
    # an order of nobody, one of an item that has no parts
    customer[1] = np.nan
    item = rng.integers(0, 7, orders)
    item[2] = 99
    day = rng.integers(1, 29, orders)
    online = rng.random(orders) < 0.4
    known = np.nan_to_num(age, nan=45.0)[
        np.nan_to_num(customer).astype(int) % customers
    ]
    mean_price = parts.groupby("item")["price"].mean().reindex(item).fillna(5.0)
    qty = 3 + 0.05 * (day - 14) + online + 0.03 * (known - 45)
    qty = qty - 0.2 * (mean_price.to_numpy() - 6) + 0.7 * rng.normal(size=orders)
    table = {"customer": customer, "item": item, "day": day, "online": online}
    return {
        "orders": pd.DataFrame({**table, "qty": qty.round(3)}),
        "customers": people,
        "items": parts,
    }


def write_site(
    folder: Path,
    tables: Mapping[str, pd.DataFrame],
    policies: Mapping[str, str] | None = None,
    site: str = "",
) -> Path:
    """Write tables, and return a tables file of a site, named like the folder.

    A policy is ``lenient`` but for its rules; a table without any is open.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text, policies = "", policies or {}
    for name, frame in tables.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
        text += f"[tables.{name}]\npath='{name}.csv'\nsite='{site or folder.name}'\n"
        if name in policies:
            rules = lenient(frame.columns, policies[name])
            text += f"[tables.{name}.policy]\n{rules}\n"
        else:
            text += OPEN
    file = folder / "tables.toml"
    file.write_text(text)
    return file


def site_per_table(
    folder: Path,
    tables: Mapping[str, pd.DataFrame],
    policies: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """Write a site for each table, with its name; see ``write_site``."""
    return {
        name: write_site(folder / name, {name: frame}, policies)
        for name, frame in tables.items()
    }


def store_on_disk(folder: Path) -> Path:
    """Write the store's tables, and return a tables file of site "shop"."""
    return write_site(folder, store(), site="shop")


def pieces(frame: pd.DataFrame, *cuts: int) -> list[pd.DataFrame]:
    """Cut a table into shards."""
    edges = [0, *cuts, len(frame)]
    return [
        frame.iloc[start:stop].reset_index(drop=True) for start, stop in pairwise(edges)
    ]


def one_per_site(shards: Mapping[str, Sequence[pd.DataFrame]]) -> Sites:
    """Give every shard a site of its own; shards keep their order."""
    return [{name: [frame]} for name, own in shards.items() for frame in own]


def whole(frames: Frames) -> dict[str, list[pd.DataFrame]]:
    """Every table in one shard."""
    return {name: [frame] for name, frame in frames.items()}


def named_sites(
    shards: Mapping[str, Sequence[pd.DataFrame]],
) -> dict[str, dict[str, list[pd.DataFrame]]]:
    """Give every shard a site of its own, named like its table with a number."""
    return {
        f"{name}-{number}": {name: [frame]}
        for name, frames in shards.items()
        for number, frame in enumerate(frames)
    }


def sharded(frames: Frames) -> dict[str, list[pd.DataFrame]]:
    """Orders in three shards, customers and items in two."""
    return {
        "orders": pieces(frames["orders"], 13, 40),
        "customers": pieces(frames["customers"], 4),
        "items": pieces(frames["items"], 7),
    }


LAYOUTS = {"whole": whole, "sharded": sharded}


@dataclass
class Seen:
    """One message as it passed, with the node at the site's end."""

    round: int
    action: str
    node: int
    is_reply: bool
    bytes: int
    header: dict
    arrays: dict


Change = Callable[[Seen], object]


def on_requests(*actions: str) -> Callable[[Change], Change]:
    """Let a change of messages be one of the requests of some actions alone."""
    return partial(_restricted, actions, False)


def on_replies(*actions: str) -> Callable[[Change], Change]:
    """Let a change of messages be one of the replies to some actions alone."""
    return partial(_restricted, actions, True)


def _restricted(actions: Sequence[str], is_reply: bool, change: Change) -> Change:
    def changed(seen: Seen) -> None:
        if seen.action in actions and seen.is_reply == is_reply:
            change(seen)

    return changed


class Watched:
    """Messages that have been seen, in their order."""

    seen: list[Seen]

    def sent(self, action: str, *, replies: bool = False) -> list[Seen]:
        kind = action, replies
        return [s for s in self.seen if (s.action, s.is_reply) == kind]

    def arrays(
        self, action: str, *, replies: bool = False
    ) -> dict[ArrayKey, np.ndarray]:
        """The arrays of all messages of a type, by part and name."""
        messages = self.sent(action, replies=replies)
        return dict(pair for seen in messages for pair in seen.arrays.items())


@dataclass
class Run(Watched):
    """A finished run.

    Attributes:
        parameters: per epoch (0 is the start), the parameters of each table.
        plans: by part number, what is done to its releases.
        features: per table, the encoded rows that take part, shard after shard.
        trained: per table (rows,) bool, which of all its rows are trained on.
        tested: per table (rows,) bool.
    """

    strategy: TrainingStrategy
    result: Result | None = None
    seen: list[Seen] = field(default_factory=list)
    parameters: list[dict[str, np.ndarray]] = field(default_factory=list)
    plans: dict[int, PartPlan] = field(default_factory=dict)
    features: dict[str, np.ndarray] = field(default_factory=dict)
    trained: dict[str, np.ndarray] = field(default_factory=dict)
    tested: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def report(self) -> RunReport:
        return self.strategy.report

    @property
    def problem(self) -> TrainingProblem:
        return self.strategy.training_problem

    @property
    def chosen(self) -> dict:
        """What the run has chosen for itself, by setting."""
        return self.strategy.chosen

    @property
    def history(self) -> list[RoundReport]:
        return self.report.history

    @property
    def theta(self) -> dict[str, np.ndarray]:
        """The tables' parameters at the end."""
        return self.parameters[-1]

    @property
    def flat(self) -> np.ndarray:
        """All parameters at the end, table after table in the query's order."""
        return np.concatenate(list(self.theta.values()))

    @property
    def sizes(self) -> dict[int, int]:
        """By part number, how many rows the site says it has."""
        replies = self.sent("query.extract", replies=True)
        return {
            part["id"]: part["rows"]
            for seen in replies
            for part in seen.header["parts"]
        }

    @property
    def lines(self) -> list[dict]:
        """The lines of all sites' ledgers."""
        return [line for own in self.strategy.ledgers.values() for line in own]

    @property
    def releases(self) -> list[dict]:
        """What has left the sites, by their ledgers."""
        return [line["release"] for line in self.lines]

    @property
    def losses(self) -> list[float]:
        return [item.train["loss"] for item in self.history if item.train]

    def requests(self, epoch: int) -> list[list[Seen]]:
        rounds = [item.round for item in self.history if item.epoch == epoch]
        return [
            [seen for seen in self.seen if seen.round == number and not seen.is_reply]
            for number in rounds
        ]


def train(
    sites: Sites | Grid, sql: str, method: str | type = "admm", **settings: object
) -> TrainingStrategy:
    """Run a strategy on sites or their grid; training has two epochs by default."""
    if not isinstance(sites, Grid):
        with LocalGrid(sites) as grid:
            return train(grid, sql, method, **settings)
    kind = STRATEGIES[method] if isinstance(method, str) else method
    trains = issubclass(kind, TrainingStrategy)
    has_label = kind.method_type.has_label if trains else True
    query = Query.from_sql(sql, needs_label=has_label)
    if not {"settings", "mode"} & settings.keys():
        settings.setdefault("num_epochs", 2)
    strategy = kind(query, **settings)
    strategy.start(sites)
    return strategy


def run(loss: str, sites: Sites, strategy: str = "admm", **settings: object) -> Run:
    """Train on the store's query; squared loss, for instance, with `run("squared")`."""
    settings.setdefault("task", task_of(loss))
    settings.setdefault("loss", loss)
    settings.setdefault("device", "cpu")
    return run_query(store_sql(loss), sites, strategy, **settings)


def run_query(
    sql: str,
    sites: Sites,
    strategy: str = "admm",
    change: Change | None = None,
    state: Path | None = None,
    **settings: object,
) -> Run:
    """Train on any query, and keep all that can be seen; see ``WatchedGrid``."""
    query = Query.from_sql(sql, needs_label=STRATEGIES[strategy].method_type.has_label)
    finished = Run(STRATEGIES[strategy](query, **settings))
    finished.strategy._on_round = lambda report: _after_round(finished, grid, report)
    with WatchedGrid(sites, change, state=state) as grid:
        finished.seen = grid.seen
        finished.result = finished.strategy.start(grid)
    _masks(finished)
    _check_ledgers(finished)
    return finished


def read(message: Message) -> Seen:
    """Return a message taken apart."""
    metadata = message.metadata
    packet = unpack(message.content)
    is_reply = bool(metadata.reply_to_message_id)
    return Seen(
        round=int(metadata.group_id or 0),
        action=metadata.message_type,
        node=metadata.src_node_id if is_reply else metadata.dst_node_id,
        is_reply=is_reply,
        bytes=message_bytes(message.content),
        header=packet.header,
        arrays={key: np.array(own) for key, own in packet.arrays.items()},
    )


class LocalGrid(InProcessGrid):
    """The sites' app in this process; a ``with`` closes it at its end."""

    def __init__(self, sites: Sites | int, **options: object) -> None:
        super().__init__(app, sites, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def site(self, node: int) -> Site:
        """The site of a node in the run that has come last."""
        return Site(self.contexts[node], self.run_name)

    def state_dir(self, node: int) -> Path:
        return Path(str(self.contexts[node].node_config["state-dir"]))

    def keep_state(self, node: int, folder: Path) -> None:
        """Let a site keep its state in a folder."""
        self.contexts[node].node_config["state-dir"] = str(folder)


class WatchedGrid(Watched, LocalGrid):
    """Messages as they arrived, in ``seen``; ``change`` may change each before that."""

    def __init__(
        self, sites: Sites, change: Change | None = None, **options: object
    ) -> None:
        super().__init__(sites, **options)
        self.change = change
        self.seen = []

    def _deliver(self, message: Message) -> Message:
        self._note(message)
        reply = super()._deliver(message)
        self._note(reply)
        return reply

    def _note(self, message: Message) -> None:
        seen = read(message)
        if self.change is not None:
            self.change(seen)
            message.content = pack(Packet(seen.header, seen.arrays))
        self.seen.append(seen)


def _after_round(finished: Run, grid: LocalGrid, report: RoundReport) -> None:
    if report.phase != "prepare" and not report.train:
        return
    parts = [
        part for node in grid.contexts for part in grid.site(node).parts(Stateless)
    ]
    parts.sort(key=lambda part: part.number)
    by_table: dict[str, list] = {}
    for part in parts:
        finished.plans[part.number] = part.data.plan
        by_table.setdefault(part.data.table, []).append(part)
    for table, shards in by_table.items():
        for shard in shards[1:]:
            if shard.data.spec.kind == TREES:
                break  # every shard grows its own
            # every shard of a table predicts with the same parameters
            np.testing.assert_array_equal(
                shard.model.parameters, shards[0].model.parameters
            )
        finished.features[table] = np.concatenate(
            [dense(host_features(s.data.features)) for s in shards]
        )
    finished.parameters.append(
        {name: own[0].model.parameters.copy() for name, own in by_table.items()}
    )


def _masks(finished: Run) -> None:
    """Put together what the sites were told about which rows take part."""
    sizes = finished.sizes
    told = finished.arrays("train.prepare")
    for name, target in (("trained", finished.trained), ("tested", finished.tested)):
        for alias, table in finished.problem.tables.items():
            numbers = [part.number for part in table.parts]
            bits = [
                unpack_bits(told[number, name], sizes[number]) for number in numbers
            ]
            target[alias] = np.concatenate(bits)


def _check_ledgers(finished: Run) -> None:
    """Assert that what left a part is in its site's ledger, as its message declares."""
    values = disclosure_values(finished.problem.exposure)
    noted = {(release["part"], release["what"]) for release in finished.releases}
    for seen in (seen for seen in finished.seen if seen.is_reply):
        left = {(part, name.partition("/")[0]) for part, name in seen.arrays}
        for part in seen.header.get("parts", ()):
            left |= {(part["id"], name) for name in part if part[name] != []}
        disclosed = action_named(seen.action).reply.discloses
        # a field that may tell less than a release is no sign of one
        others = {name for each in disclosed if not each.kinds for name in each.fields}
        for each in disclosed:
            names = {name.replace("_", "-") for name in {*each.fields} - others}
            is_release = each.kinds and (not each.when or values[each.when])
            for part in {p for p, name in left if name in names and is_release}:
                assert any((part, kind) in noted for kind in each.kinds), (
                    f"{names} of {seen.action} have left part {part}, but its site's "
                    f"ledger has none of {each.kinds}: plan the release (PartPlan) or "
                    "write it down in the handler (ledger_entries.note)"
                )
