"""Who will learn what: every message, what it carries, and what covers it.

The server and the other sites are honest but curious. "Nothing" is said where nothing
covers a release, so that nobody takes silence for protection.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tp_flower.explain.explanation import Release
from tp_flower.protocol import Action

NOTHING = "nothing"
SERVER, SITES = "server", "sites"


@dataclass(frozen=True)
class Audience:
    """What decides who learns what.

    Attributes:
        label_table: alias of the table with the label.
        strategy: "admm" or "sgd".
        sharded: aliases of the tables in several shards.
        gram: those of them that send statistics.
        grouped: aliases of the tables in several shards that a GROUP BY runs over.
        is_linear: whether all models are.
        is_simulated: whether the key of the hashes is that of a simulation.
    """

    label_table: str
    strategy: str
    sharded: Collection[str]
    gram: Collection[str]
    grouped: Collection[str]
    is_linear: bool
    is_simulated: bool


def releases(audience: Audience) -> list[Release]:
    """Return what every message of the run tells whom, in the order of the messages."""
    training = _admm(audience) if audience.strategy == "admm" else _sgd(audience)
    end = _release(Action.FINISH, SITES, "that the run is over", NOTHING)
    return [*_set_up(audience), *training, end]


def _set_up(audience: Audience) -> list[Release]:
    hashed = (
        "keyed hash (HMAC-SHA-256), but the key of a simulation is known to all"
        if audience.is_simulated
        else "keyed hash (HMAC-SHA-256; the server does not have the key)"
    )
    label = audience.label_table
    groups = [
        _release(
            Action.EXTRACT,
            SERVER,
            f"group keys of {_listed(audience.grouped)}: which are in several shards",
            hashed,
        )
    ]
    return [
        _release(
            Action.DESCRIBE,
            SERVER,
            "names of the hosted tables; columns, types and rows of the query's",
            NOTHING,
        ),
        _release(
            Action.SEAL,
            SITES,
            "the key of the hashes, by way of the server",
            "sealed to each site (X25519)",
        ),
        _release(Action.EXTRACT, SITES, "the query's expressions", NOTHING),
        _release(
            Action.EXTRACT,
            SERVER,
            "join keys: which rows share one, how often, and across tables",
            hashed,
        ),
        _release(
            Action.EXTRACT,
            SERVER,
            "the order of every shard's rows: by it go keys, labels and scores",
            NOTHING,
        ),
        _release(Action.EXTRACT, SERVER, f"the label of every row of {label}", NOTHING),
        *(groups if audience.grouped else []),
        _release(
            Action.STATISTICS, SITES, f"which rows of {label} are held out", NOTHING
        ),
        _release(
            Action.STATISTICS,
            SERVER,
            "per feature: count, mean, deviation; range or quantiles if its encoder "
            "needs them",
            NOTHING,
        ),
        _release(
            Action.STATISTICS,
            SERVER,
            "per category: how many rows; rare ones stay (min-count)",
            hashed,
        ),
        _release(
            Action.CHECK,
            SITES,
            "in explain only: one own row of every matched key, and a random weight",
            NOTHING,
        ),
        _release(
            Action.CHECK,
            SERVER,
            "in explain only: per join, one weighted sum of keyed hashes",
            hashed,
        ),
        _release(
            Action.PREPARE,
            SITES,
            "the merged statistics of the own table's shards; which own rows are "
            "joined, and to how many rows",
            NOTHING,
        ),
        *_prepared(audience),
    ]


def _prepared(audience: Audience) -> list[Release]:
    found = []
    if audience.strategy == "admm" and audience.gram:
        found.append(
            _release(
                Action.PREPARE,
                SERVER,
                f"second moments of the features of {_listed(audience.gram)} (Gram)",
                NOTHING,
            )
        )
    if not audience.is_linear:
        found.append(
            _release(
                Action.PREPARE, SERVER, "scores of every row, untrained model", NOTHING
            )
        )
    return [
        *found,
        _release(Action.PREPARE, SERVER, "one number of curvature per shard", NOTHING),
    ]


def _admm(audience: Audience) -> list[Release]:
    found = [
        _release(
            Action.ADMM,
            SITES,
            "a target per own row, made from labels and all tables' scores",
            NOTHING,
        )
    ]
    seeking = [table for table in audience.sharded if table not in audience.gram]
    if audience.gram:
        carries = (
            f"features times targets, summed per shard of {_listed(audience.gram)}"
        )
        found.append(_release(Action.ADMM, SERVER, carries, NOTHING))
    if seeking:
        carries = f"parameters that each shard of {_listed(seeking)} fitted"
        found.append(_release(Action.ADMM, SERVER, carries, NOTHING))
    found.append(_release(Action.ADMM, SERVER, _SCORES, NOTHING))
    if audience.sharded:
        listed = _listed(audience.sharded)
        found += [
            _release(
                Action.CONSENSUS, SITES, f"the common parameters of {listed}", NOTHING
            ),
            _release(Action.CONSENSUS, SERVER, _SCORES, NOTHING),
        ]
    return found


def _sgd(audience: Audience) -> list[Release]:
    found = [
        _release(
            Action.PREPARE, SITES, "which own rows every batch has, by number", NOTHING
        ),
        _release(
            Action.SGD,
            SITES,
            "the loss's derivative per own row of a batch, made from labels and all "
            "tables' scores",
            NOTHING,
        ),
        _release(Action.SGD, SERVER, _SCORES, NOTHING),
    ]
    if audience.sharded:
        listed = _listed(audience.sharded)
        found += [
            _release(
                Action.SGD, SERVER, f"gradients of each shard of {listed}", NOTHING
            ),
            _release(Action.STEP, SITES, f"the summed gradients of {listed}", NOTHING),
            _release(Action.STEP, SERVER, _SCORES, NOTHING),
        ]
    return found


_SCORES = "a score per row, which reads the row's features; in every epoch anew"


def _release(action: Action, to: str, carries: str, protection: str) -> Release:
    return Release(str(action), to, carries, protection)


def _listed(tables: Collection[str]) -> str:
    return ", ".join(tables)
