"""A release: who learns what from a message, and what covers it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strategies.run.exchange import Part
from strategies.run.sites import Inventory
from tp_flower.methods import ADMM, CORESET, DP_SGD, LAPLACE, OUTSIDER, PERSONAL, SGD
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.privacy.plan import CENTRES, SAMPLED_ROWS
from tp_flower.protocol import EXCHANGES, Action
from tp_flower.query import BoundQuery
from tp_flower.settings import PrivacySettings, Settings

NOTHING: Final = "nothing"
"""What covers a release where nothing does."""
SERVER: Final = "server"
SITES: Final = "sites"


@dataclass(frozen=True)
class Release:
    """What somebody will learn from a message.

    Attributes:
        message: its type.
        to: who receives it.
        carries: what it says.
        protection: the mechanism that covers it; "nothing" where nothing does.
    """

    message: str
    to: str
    carries: str
    protection: str


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
        by_joined_rows: whether messages go by joined rows (VFL), not by tables' rows.
        is_measured: whether a coreset is drawn by the importance of the rows.
        sends: what leaves of sampled rows where the server solves; "" elsewhere.
        has_label: whether labels leave.
        graph: what the similarity of sites with models of their own is made of.
        graph_epsilon: of the noise on that; 0 for none.
        fitted: aliases of the tables with encoders that are fitted to statistics.
        is_stale: whether gradients of shards come a batch late.
        has_inner_rounds: whether consensus takes several rounds of an epoch.
        is_prediction: whether a saved model is used, and none is trained.
        has_row_key: of a prediction: whether a keyed hash of what names a row leaves.
        is_delivered: of a prediction: whether the label table's sites are sent it.
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
    by_joined_rows: bool = False
    is_measured: bool = False
    sends: str = ""
    has_label: bool = True
    graph: str = ""
    graph_epsilon: float = 0.0
    fitted: Collection[str] = ()
    is_stale: bool = False
    has_inner_rounds: bool = False
    is_prediction: bool = False
    has_row_key: bool = False
    is_delivered: bool = False

    @property
    def row(self) -> str:
        """What messages have a number for."""
        return "joined row" if self.by_joined_rows else "own row"

    @property
    def scored(self) -> str:
        """What a score per row tells."""
        rows = "joined row" if self.by_joined_rows else "row"
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

    @property
    def nothing(self) -> str:
        """What is said where nothing covers a release."""
        return NOTHING

    @property
    def sealed(self) -> str:
        """What covers the key of the hashes on its way."""
        return _SEALED.get(self.keys, NOTHING)

    @property
    def masked(self) -> str:
        """What covers a sum of which nobody but its sender knows the summands."""
        return "masked pairwise (ChaCha20): an honest server sees the sum alone"

    @property
    def summaries(self) -> str:
        """What covers the summaries that a graph of sites is made of."""
        if not self.graph_epsilon or self.graph == "models":
            return NOTHING
        amount = f"epsilon {self.graph_epsilon:g}, delta {self.privacy.delta:g}"
        return f"Gaussian noise ({amount})"


def audience_of(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    settings: Settings,
    inventory: Inventory,
    **facts: Any,
) -> Audience:
    """Return what decides who learns what.

    Args:
        bound: the query over the sites' columns.
        parts: by table, its shards.
        settings: of the run.
        inventory: of the sites.
        facts: further fields, which those above do not decide.
    """
    sharded = [name for name, shards in parts.items() if len(shards) > 1]
    nodes = list(inventory.nodes.values())
    return Audience(
        label_table=bound.label_table,
        family=settings.family,
        sharded=sharded,
        grouped=[
            name
            for name in sharded
            if any(own.subquery is not None for own in bound.fragments_of(name))
        ],
        is_linear=all(settings.model_of(name) == "linear" for name in parts),
        is_simulated=all(node.is_simulated for node in nodes),
        privacy=settings.privacy,
        # all sites have the same, or the run has been refused
        keys=nodes[0].keys,
        **facts,
    )


class _Facts:
    """Facts of a run by the names that the messages' disclosures have for them.

    A disclosure is made where its fact is true: a list is, if it is not empty.
    """

    def __init__(self, audience: Audience) -> None:
        self._audience = audience
        is_admm, is_sgd = (audience.family == family for family in (ADMM, SGD))
        is_solved, is_own = (
            audience.family == family for family in (CORESET, PERSONAL)
        )
        seeking = [name for name in audience.sharded if name not in audience.gram]
        self._values: dict[str, object] = {
            "row": audience.row,
            "scored": audience.scored,
            "label_table": audience.label_table,
            "weight": audience.weight,
            "sharded": ", ".join(audience.sharded),
            "grouped": ", ".join(audience.grouped),
            "fitted": ", ".join(audience.fitted),
            "gram": ", ".join(audience.gram) if is_admm else "",
            "seeking": ", ".join(seeking) if is_admm else "",
            "encoders": "the merged statistics of the own table's shards"
            if audience.fitted
            else "the declared encoders",
            "counted": _COUNTED[audience.is_weighted],
            "alignment": _alignment(audience),
            "common": _common(audience),
            "summary": _SUMMARY.get(audience.graph, "") if is_own else "",
            "seals_key": audience.keys is not KeySource.FILE,
            "has_joins": not is_own,
            "joins_rows": not is_own,
            "keeps_labels": is_own,
            "has_label": audience.has_label and not is_own,
            "has_row_key": audience.has_row_key,
            "has_batches": is_sgd,
            "has_first_scores": not audience.is_linear,
            "has_clear_curvature": not (is_solved or audience.privacy.covers_features),
            "has_inner_rounds": audience.has_inner_rounds,
            "takes_parameters": bool(audience.sharded) or is_solved,
            "is_stale": audience.is_stale,
            "sends_rows": audience.sends == SAMPLED_ROWS,
            "sends_centres": audience.sends == CENTRES,
        }

    def holds(self, name: str) -> bool:
        """Whether a fact is true of the run; "" always is."""
        return not name or bool(self._values[name])

    def fill(self, carries: str) -> str:
        """Return the words of a disclosure with the facts in their places."""
        return carries.format_map(self._values)


def releases(audience: Audience) -> list[Release]:
    """Return what every message of the run tells whom, in the order of the messages."""
    facts = _Facts(audience)
    found = []
    for action in _actions(audience):
        for message in EXCHANGES[action]:
            for told in message.discloses:
                if facts.holds(told.when):
                    reader = told.reader or message.reader
                    protection = str(getattr(audience, told.covered_by))
                    words = facts.fill(told.carries)
                    found.append(Release(str(action), reader, words, protection))
    return found


def _actions(audience: Audience) -> list[Action]:
    """Return the messages of a run, in their order."""
    set_up = [Action.DESCRIBE, Action.SEAL, Action.EXTRACT]
    if audience.is_prediction:
        delivered = [Action.DELIVER] if audience.is_delivered else []
        return [*set_up, Action.SCORE, *delivered, Action.FINISH]
    set_up += [Action.STATISTICS]
    if audience.family != PERSONAL:
        set_up += [Action.CHECK]
    if audience.is_measured:
        set_up += [Action.MEASURE, Action.DRAW, Action.WEIGH]
    further = {ADMM: Action.CONSENSUS, SGD: Action.STEP}.get(audience.family)
    rounds = list(_ROUNDS[audience.family])
    if further is not None and not audience.sharded:
        rounds.remove(further)
    return [*set_up, *rounds, Action.FINISH]


_ROUNDS: Final = {
    ADMM: (Action.PREPARE, Action.ADMM, Action.CONSENSUS),
    SGD: (Action.PREPARE, Action.SGD, Action.STEP),
    CORESET: (Action.PREPARE, Action.ROWS, Action.CONSENSUS),
    PERSONAL: (Action.PERSONALISE, Action.SUMMARISE, Action.PERSONAL),
}
_COUNTED: Final = {
    False: "to how many rows",
    True: "what the joined rows of each weigh",
}
_SUMMARY: Final = {
    "data": "the mean of random features of each site's rows and labels",
    "features": "the covariance of each site's features",
    "models": "the parameters of a model that each site has trained alone",
}


def _alignment(audience: Audience) -> str:
    if not audience.by_joined_rows:
        return f"which own rows are joined, and {_COUNTED[audience.is_weighted]}"
    weighs = ", and what that weighs" if audience.is_weighted else ""
    return f"which own row is behind each joined row, in their order{weighs}"


def _common(audience: Audience) -> str:
    """Return whose parameters the server sends."""
    listed = ", ".join(audience.sharded)
    if audience.family != CORESET:
        return f"the common parameters of {listed}"
    shared = f", the same for all shards of {listed}" if listed else ""
    return f"the parameters of the own table's model{shared}"
