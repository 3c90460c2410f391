"""Who will learn what: every message, what it carries, and what covers it.

The server and the other sites are honest but curious. "Nothing" is said where nothing
covers a release, so that nobody takes silence for protection.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from tp_flower.explain.coreset_releases import coreset_releases
from tp_flower.explain.explanation import NOTHING, SERVER, SITES, Release
from tp_flower.explain.personal_releases import (
    OwnModels,
    personal_rounds,
    personal_set_up,
)
from tp_flower.explain.solved import solved_releases
from tp_flower.methods import ADMM, CORESET, PERSONAL, SGD
from tp_flower.privacy.key_source import KeySource
from tp_flower.privacy.mechanisms import DP_SGD, LAPLACE, OUTSIDER
from tp_flower.protocol import Action
from tp_flower.settings import PrivacySettings

_KEYS: Final = {
    KeySource.FILE: "from a secret file, the server does not have the key",
    KeySource.PINNED: "under pinned keys, the server does not have the key",
    KeySource.AGREED: "an honest server does not have the key",
}
_SEALED: Final = {
    KeySource.PINNED: "sealed to each site (X25519), under keys their owners pinned",
    KeySource.AGREED: "sealed to each site (X25519), under keys that nobody checked",
}


@dataclass(frozen=True)
class Audience:
    """What decides who learns what.

    Attributes:
        label_table: alias of the table with the label.
        family: of the method, "admm", "sgd" or "coreset".
        sharded: aliases of the tables in several shards.
        gram: those of them that send statistics.
        grouped: aliases of the tables in several shards that a GROUP BY runs over.
        is_linear: whether all models are.
        is_simulated: whether the key of the hashes is that of a simulation.
        privacy: what the run protects.
        keys: where the sites take the key of the hashes from.
        weight: table and expression that joined rows weigh; "" without one.
        is_weighted: whether joined rows weigh other than alike.
        is_expanded: whether messages go by joined rows (VFL), not by the tables' rows.
        is_measured: whether a coreset is drawn by the sensitivities of the rows.
        sends: what leaves of sampled rows where the server solves; "" elsewhere.
        has_label: whether labels leave.
        graph: what the similarity of sites with models of their own is made of.
        graph_epsilon: of the noise on that; 0 for none.
        fitted: aliases of the tables with encoders that are fitted to statistics.
    """

    label_table: str
    family: str
    sharded: Collection[str]
    gram: Collection[str]
    grouped: Collection[str]
    is_linear: bool
    is_simulated: bool
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    keys: KeySource = KeySource.AGREED
    weight: str = ""
    is_weighted: bool = False
    is_expanded: bool = False
    is_measured: bool = False
    sends: str = ""
    has_label: bool = True
    graph: str = ""
    graph_epsilon: float = 0.0
    fitted: Collection[str] = ()

    @property
    def row(self) -> str:
        """What messages have a number for."""
        return "joined row" if self.is_expanded else "own row"

    @property
    def scored(self) -> str:
        """What a score per row tells."""
        rows = "joined row" if self.is_expanded else "row"
        return (
            f"a score per {rows}, which reads the row's features; in every epoch anew"
        )

    @property
    def hashes(self) -> str:
        """What covers that which is hashed."""
        if self.is_simulated:
            return (
                "keyed hash (HMAC-SHA-256), but the key of a simulation is known to all"
            )
        return f"keyed hash (HMAC-SHA-256; {_KEYS[self.keys]})"

    @property
    def labels(self) -> str:
        """What covers a label."""
        own = self.privacy
        if not own.covers_labels:
            return NOTHING
        amount = (
            f"epsilon {own.label_epsilon:g}"
            if own.label_epsilon
            else f"lambda {own.label_noise:g}"
        )
        name = "Laplace noise" if own.labels == LAPLACE else "randomised response"
        return f"{name} on each label ({amount}), drawn once and kept"

    @property
    def models(self) -> str:
        """What covers gradients, statistics and parameters."""
        own = self.privacy
        if not own.covers_features:
            return NOTHING
        amount = (
            f"noise multiplier {own.noise_multiplier:g}"
            if own.noise_multiplier
            else f"epsilon {own.epsilon:g}"
        )
        if own.adversary == OUTSIDER and not own.noise_multiplier:
            amount += " against an outsider"
        name = "DP-SGD" if own.features == DP_SGD else "noisy clipped statistics"
        return f"{name} ({amount}, delta {own.delta:g}, per row and run)"

    @property
    def scores(self) -> str:
        """What covers the scores of single rows."""
        own = self.privacy
        if not own.covers_predictions:
            return NOTHING
        amount = f"epsilon {own.predictions:g}, delta {own.delta:g}"
        return f"Gaussian noise on clipped scores ({amount}, per row and run)"

    @property
    def messages(self) -> str:
        """What covers that which is made from labels and all tables' scores."""
        own = self.privacy
        if own.covers_labels and own.covers_predictions:
            return "made from labels and scores that are covered"
        if own.covers_labels:
            return "the labels are covered, the scores are not"
        return NOTHING


def releases(audience: Audience) -> list[Release]:
    """Return what every message of the run tells whom, in the order of the messages."""
    if audience.family == PERSONAL:
        own = OwnModels(
            audience.label_table,
            audience.graph,
            audience.graph_epsilon,
            audience.privacy.delta,
        )
        told = personal_set_up(_set_up(audience), audience.label_table)
        return [*told, *personal_rounds(own), *_end(audience)]
    training = {ADMM: _admm, SGD: _sgd, CORESET: _solved}[audience.family]
    return [*_set_up(audience), *training(audience), *_end(audience)]


def _solved(audience: Audience) -> list[Release]:
    return solved_releases(audience.sharded, audience.sends, audience.scored, NOTHING)


def _end(audience: Audience) -> list[Release]:
    shown = (
        "the final coefficients of a table's linear model, if the table's policy says "
        "that they may be shown"
    )
    digest = "a digest of each part of the model that the site keeps"
    return [
        _release(Action.FINISH, SITES, "that the run is over, and its name", NOTHING),
        _release(Action.FINISH, SERVER, digest, NOTHING),
        _release(Action.FINISH, SERVER, shown, audience.models),
    ]


def _set_up(audience: Audience) -> list[Release]:
    hashed, label = audience.hashes, audience.label_table
    shared = "the merged statistics of the own table's shards"
    encoders = shared if audience.fitted else "the declared encoders"
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
        *sealed(audience.keys),
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
        *([_label(audience)] if audience.has_label else []),
        *([_weight(audience)] if audience.weight else []),
        *(groups if audience.grouped else []),
        _release(
            Action.STATISTICS, SITES, f"which rows of {label} are held out", NOTHING
        ),
        _release(
            Action.STATISTICS,
            SERVER,
            "per feature: the kind of value, and the length of vectors",
            NOTHING,
        ),
        *(_statistics(audience) if audience.fitted else []),
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
        *(
            coreset_releases(_listed(audience.sharded), _COUNTED[audience.is_weighted])
            if audience.is_measured
            else []
        ),
        _release(
            Action.PREPARE,
            SITES,
            f"{encoders}; {_alignment(audience)}",
            NOTHING,
        ),
        *_prepared(audience),
    ]


def _statistics(audience: Audience) -> list[Release]:
    """Return the releases that encoders are fitted to."""
    return [
        _release(
            Action.STATISTICS,
            SERVER,
            f"per feature of {_listed(audience.fitted)}, unless its encoder was "
            "declared: count, mean, deviation; range or quantiles if it needs them",
            NOTHING,
        ),
        _release(
            Action.STATISTICS,
            SERVER,
            "per category: how many rows; rare ones stay (min-count)",
            audience.hashes,
        ),
    ]


def _label(audience: Audience) -> Release:
    carries = f"the label of every row of {audience.label_table}"
    return _release(Action.EXTRACT, SERVER, carries, audience.labels)


def _weight(audience: Audience) -> Release:
    carries = f"the weight of every row of {audience.weight}"
    return _release(Action.EXTRACT, SERVER, carries, NOTHING)


def sealed(keys: KeySource) -> list[Release]:
    """Return how the key of the hashes comes to the sites, if it has to."""
    if keys is KeySource.FILE:
        return []
    carries = "the key of the hashes, by way of the server"
    return [_release(Action.SEAL, SITES, carries, _SEALED[keys])]


def _prepared(audience: Audience) -> list[Release]:
    found = []
    if audience.family == ADMM and audience.gram:
        found.append(
            _release(
                Action.PREPARE,
                SERVER,
                f"second moments of the features of {_listed(audience.gram)} (Gram)",
                audience.models,
            )
        )
    if not audience.is_linear:
        found.append(
            _release(
                Action.PREPARE,
                SERVER,
                "scores of every row, untrained model",
                audience.scores,
            )
        )
    if audience.family != CORESET and not audience.privacy.covers_features:
        carries = "one number of curvature per shard"
        found.append(_release(Action.PREPARE, SERVER, carries, NOTHING))
    return found


def _admm(audience: Audience) -> list[Release]:
    found = [
        _release(
            Action.ADMM,
            SITES,
            f"a target per {audience.row}, made from labels and all tables' scores",
            audience.messages,
        )
    ]
    seeking = [table for table in audience.sharded if table not in audience.gram]
    if audience.gram:
        carries = (
            f"features times targets, summed per shard of {_listed(audience.gram)}"
        )
        found.append(_release(Action.ADMM, SERVER, carries, audience.models))
    if seeking:
        carries = f"parameters that each shard of {_listed(seeking)} fitted"
        found.append(_release(Action.ADMM, SERVER, carries, audience.models))
    found.append(_release(Action.ADMM, SERVER, audience.scored, audience.scores))
    if audience.sharded:
        listed = _listed(audience.sharded)
        found += [
            _release(
                Action.CONSENSUS,
                SITES,
                f"the common parameters of {listed}",
                audience.models,
            ),
            _release(Action.CONSENSUS, SERVER, audience.scored, audience.scores),
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
            f"the loss's derivative per {audience.row} of a batch, made from labels "
            "and all tables' scores",
            audience.messages,
        ),
        _release(Action.SGD, SERVER, audience.scored, audience.scores),
    ]
    if audience.sharded:
        listed = _listed(audience.sharded)
        found += [
            _release(
                Action.SGD,
                SERVER,
                f"gradients of each shard of {listed}",
                audience.models,
            ),
            _release(
                Action.STEP, SITES, f"the summed gradients of {listed}", audience.models
            ),
            _release(Action.STEP, SERVER, audience.scored, audience.scores),
        ]
    return found


_COUNTED = {False: "to how many rows", True: "what the joined rows of each weigh"}


def _alignment(audience: Audience) -> str:
    if not audience.is_expanded:
        return f"which own rows are joined, and {_COUNTED[audience.is_weighted]}"
    weighs = ", and what that weighs" if audience.is_weighted else ""
    return f"which own row is behind each joined row, in their order{weighs}"


def _release(action: Action, to: str, carries: str, protection: str) -> Release:
    return Release(str(action), to, carries, protection)


def _listed(tables: Collection[str]) -> str:
    return ", ".join(tables)
