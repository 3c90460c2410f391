"""Disclosures of a run: who learns what, which mechanism covers it, and at what cost.

The messages' disclosures are declared with the messages (:mod:`tp_flower.protocol`);
the run decides which messages are sent and what covers them.

The `privacy` entry of `report.json`::

    adversary, delta    of the figures below: who sees every message of the run
    messages  [{message, to, carries, protection}]   every message, in plain words
    ledger    {site: [{release: {table, source, part, action, what, unit, neighbours,
               adversary, mechanism or null, scope, site, per}, limit, used, ...}]}
    totals    [{site, table, source, per, features, models, scores, labels, delta,
               uncovered: [what]}]

The ledger is each node's own account of the run. `mechanism` is the cost of one use,
`used` the number of uses of the most used key, `limit` the planned number. A total has
the epsilons of a table's rows at one site, `per` row or unit of its policy, by what
they are true of (`tp_flower/privacy/epsilons.py`): a number, "none", or "" where
nothing of the kind left. Of features it is "none: " and the reason while anything that
depends on them leaves without noise, such as sums of scores. `uncovered` lists the
releases that no mechanism covers.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from strategies.run.exchange import Part
from strategies.run.sites import Inventory
from tp_flower.errors import ReplyError
from tp_flower.privacy.epsilons import Released, epsilons
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.privacy.mechanisms import Release
from tp_flower.protocol.fields import DP_SGD, LAPLACE, MASKED, SEALED, SERVER, Document
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update
from tp_flower.query import BoundQuery
from tp_flower.settings import PrivacySettings, Settings
from tp_flower.splits import GROUP, TIME
from tp_flower.terms.partials import makes_partials

NOTHING: Final = "nothing"  # the protection of a disclosure that no mechanism covers
SET_UP: Final = (Action.DESCRIBE, Action.SEAL, Action.EXTRACT)
"""The messages that every run begins with; cutoffs are sealed before the last."""


@dataclass(frozen=True)
class Disclosure:
    """A fact that somebody learns from a message."""

    message: str
    to: str
    carries: str
    protection: str


@dataclass(frozen=True)
class DisclosureValues:
    """The names that the disclosures of a method's own messages use, with their values.

    Attributes:
        values: by name, of the conditions (``when``) and of the names in the texts.
        protections: by name, the mechanism behind a ``covered_by``.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    protections: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Exposure:
    """The properties of a run that decide who learns what; tables are aliases.

    Attributes:
        messages: the run's messages, in order.
        sharded: the tables in several shards.
        updates: by table, how its shards train together; empty without training.
        grouped: the sharded tables that a GROUP BY runs over.
        sealed_cutoffs: the LATERAL sub-queries that take other sites' cutoffs.
        partials: those whose shards make one answer of partial ones.
        keys: where the sites take the key of the hashes from.
        weight: table and expression of the joined rows' weight; "" without one.
        has_offset: whether rows of the label's table have an offset.
        has_event: whether their label is the time of an event.
        split_groups: the columns whose values are held out; "" without any.
        split_times: the order or the values of a column by which rows are held out.
        has_batches: whether sites are told the rows of batches.
        has_label: whether the query has a label.
        keeps_labels: whether labels stay at the sites.
        has_joins: whether rows are joined.
        divided: the table whose regions a saved model reads.
        fits_effects: whether keys of tables may get effects of their own.
        fits_factors: whether keys of two tables may get factors.
        sends_factors: the tables whose rows' factors predictions need.
        bins: by table whose bin numbers leave in training, those of a column at most.
        scores_bins: whether a saved model asks for bin numbers of the rows it scores.
        metrics_by: the column that rows are grouped by, to evaluate; "" for none.
        fits: of a search; 0 without one.
        vectors: what vectors tell beyond scores, by the head; "" for nothing.
        fitted: the tables whose shards told each other statistics of their rows.
        method: the names that only its own messages use.
    """

    label_table: str
    messages: Collection[Action]
    sharded: Collection[str]
    grouped: Collection[str]
    is_linear: bool
    is_simulated: bool
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    keys: KeySource = KeySource.AGREED
    weight: str = ""
    is_weighted: bool = False
    has_offset: bool = False
    has_event: bool = False
    sealed_cutoffs: Collection[str] = ()
    partials: Collection[str] = ()
    has_label: bool = True
    has_batches: bool = False
    fits_effects: bool = False
    fits_factors: bool = False
    sends_factors: Collection[str] = ()
    bins: Mapping[str, int] = field(default_factory=dict)
    scores_bins: bool = False
    metrics_by: str = ""
    fits: int = 0
    keeps_labels: bool = False
    has_joins: bool = True
    updates: Mapping[str, Update] = field(default_factory=dict)
    fitted: Collection[str] = ()
    is_masked: bool = False
    has_outer: bool = False
    has_row_key: bool = False
    vectors: str = ""
    divided: str = ""
    split_groups: str = ""
    split_times: str = ""
    method: DisclosureValues = field(default_factory=DisclosureValues)

    def tables_that(self, update: Update) -> list[str]:
        """Return the tables whose shards train together in a way."""
        return [
            table
            for table, table_update in self.updates.items()
            if table_update is update
        ]


def exposure_of(
    bound: BoundQuery,
    parts: Mapping[str, Sequence[Part]],
    settings: Settings,
    inventory: Inventory,
    messages: Collection[Action],
    **details: Any,
) -> Exposure:
    """Return the exposure of a run, from its own messages and more ``details``."""
    sharded = [name for name, shards in parts.items() if len(shards) > 1]
    nodes = inventory.nodes.values()
    split_kind = settings.split.kind
    columns = ", ".join(settings.split.columns)
    ordered = "the rank of"
    if bound.split_table in sharded:
        ordered = "the value of"
    sealed_cutoffs = [
        fragment.table
        for fragment in bound.fragments
        if fragment.subquery and fragment.subquery.has_sealed_cutoffs
    ]
    if details.get("fits"):
        messages = (Action.NEXT, *messages)
    set_up: tuple[Action, ...] = SET_UP
    partials = [
        name
        for name in sharded
        if makes_partials(bound.fragments_of(name)[0], settings)
    ]
    if sealed_cutoffs or partials:
        seals = (Action.CUTOFFS, *([Action.PARTIALS] if partials else []))
        set_up = (*SET_UP[:-1], *seals, SET_UP[-1])
    return Exposure(
        label_table=bound.label_table,
        messages=(*set_up, *messages, Action.FINISH),
        sharded=sharded,
        grouped=[
            name
            for name in sharded
            if name not in partials
            and any(part.subquery is not None for part in bound.fragments_of(name))
        ],
        sealed_cutoffs=list(dict.fromkeys(sealed_cutoffs)),
        partials=partials,
        is_linear=all(settings.model_of(name) == "linear" for name in parts),
        is_simulated=all(node.simulated for node in nodes),
        privacy=settings.privacy,
        # all sites agree on it, or the run has been refused
        keys=KeySource(next(iter(nodes)).keys),
        # a table that is not joined has nothing to be added to
        is_masked=settings.privacy.scores == MASKED and bool(bound.joins),
        has_outer=bool(bound.outer),
        has_offset=bool(bound.offset_sql),
        has_event=bound.names_event,
        split_groups=columns if split_kind == GROUP else "",
        split_times=f"{ordered} {columns}" if split_kind == TIME else "",
        **details,
    )


def disclosures(exposure: Exposure) -> list[Disclosure]:
    """Return everything that the messages of a run disclose, in their order."""
    values = disclosure_values(exposure)
    protections = _protections(exposure)
    return [
        Disclosure(
            message=str(action),
            to=declared.reader or message.reader,
            carries=declared.carries.format_map(values),
            protection=protections[declared.covered_by],
        )
        for action in exposure.messages
        for message in action.messages
        for declared in message.discloses
        if not declared.when or values[declared.when]
    ]


_PER: Final = "per row (or the privacy-unit of a policy) and run"
_LISTED: Final = (
    "sharded",
    "grouped",
    "sealed_cutoffs",
    "partials",
    "fitted",
    "sends_factors",
)


def disclosure_values(exposure: Exposure) -> dict[str, object]:
    """Return the values of the names that declared disclosures use, in a run.

    A disclosure is made if the value of its ``when`` is true, of a list if it is not
    empty. In its text, the values replace names in braces.
    """
    sharded = ", ".join(exposure.sharded)
    gram = ", ".join(exposure.tables_that(Update.GRAM))
    consensus = ", ".join(exposure.tables_that(Update.CONSENSUS))
    is_solved = bool(exposure.tables_that(Update.GIVEN))
    has_joins = exposure.has_joins
    privacy = exposure.privacy
    rows_or_weight = "to how many rows"
    if exposure.is_weighted:
        rows_or_weight = "the total weight of their joined rows"
    alignment = f"which rows of the site are joined, and {rows_or_weight}"
    shared = ""
    if sharded:
        shared = f", the same for all shards of {sharded}"
    tables = {name: ", ".join(getattr(exposure, name)) for name in _LISTED}
    proposals = ""
    if consensus:
        proposals = f"parameters that the shards of {consensus} fitted"
    moments = ""
    if gram:
        moments = f"features times score steps of {gram}"
    scores = "a score per row, computed from the row's features"
    if exposure.is_masked:
        scores = "the sum of the tables' scores for every joined row"
    if exposure.vectors:
        scores = f"{scores}, {exposure.vectors}"
    shares = "numbers of each shard that add up to"
    if privacy.unions == SEALED:
        shares = "words that add up, for the shards alone, to"
    return {
        **vars(exposure),
        **tables,
        "gram": gram,
        "scored": f"{scores}; anew in every epoch",
        "shares_of": shares,
        "terms": "; ".join(filter(None, (moments, proposals))),
        "sums_gradients": bool(exposure.tables_that(Update.SUM)),
        "counted": rows_or_weight,
        "describes": not privacy.covers_features and has_joins,
        "alignment": alignment,
        "common": f"the parameters of the model of the site's table{shared}",
        "is_solved": is_solved,
        "sums_scores": has_joins,
        "has_label": exposure.has_label and not exposure.keeps_labels,
        # the shards of the label's table add up sums in one fixed point
        "shares_scale": exposure.keeps_labels
        and has_joins
        and not privacy.covers_features
        and exposure.label_table in exposure.sharded,
        "masks_outer": exposure.is_masked and exposure.has_outer,
        "has_first_scores": not exposure.is_linear,
        "has_clear_curvature": not (is_solved or privacy.covers_features),
        "takes_parameters": bool(exposure.sharded) or is_solved,
        "fits_effects": exposure.fits_effects,
        "fits_factors": exposure.fits_factors,
        "bins": max(exposure.bins.values(), default=0),
        **exposure.method.values,
    }


_KEYS: Final = {
    KeySource.PINNED: "under pinned keys, the server does not have the key",
    KeySource.AGREED: "an honest server does not have the key",
}
_SEALED: Final = {
    KeySource.PINNED: "sealed to each site (X25519), under keys their owners pinned",
    KeySource.AGREED: "sealed to each site (X25519), under keys that nobody checked",
}


def _protections(exposure: Exposure) -> dict[str, str]:
    """Return the mechanism behind each ``covered_by`` of the declared disclosures."""
    privacy = exposure.privacy
    delta = f"delta {exposure.privacy.delta:g}"
    key = f"; {_KEYS[exposure.keys]})"
    if exposure.is_simulated:
        key = "), but the key of a simulation is known to all"
    scores = messages = NOTHING
    if privacy.covers_predictions:
        amount = f"scores: epsilon {privacy.predictions:g}, {delta}, {_PER}"
        scores = f"Gaussian noise on clipped scores ({amount}{features_note(privacy)})"
    table_scores = scores
    if exposure.is_masked:
        masks = "masked by join keys (AES-256): an honest server sees the sums alone"
        scores = masks if scores == NOTHING else f"{scores}; {masks}"
    if privacy.covers_labels:
        messages = "the labels are covered, the scores are not"
        if privacy.covers_predictions:
            messages = "made from labels and scores that are covered"
    models = NOTHING
    if privacy.covers_features:
        models = _model_noise(privacy)
    unions = models
    if privacy.unions == SEALED:
        seal = "sealed by the table's key (SHAKE-256): an honest server reads nothing"
        unions = seal if models == NOTHING else f"{models}; {seal}"
    return {
        "nothing": NOTHING,
        "hashes": f"keyed hash (AES-256-CMAC{key}",
        "labels": _label_noise(privacy) if privacy.covers_labels else NOTHING,
        "models": models,
        "scores": scores,
        "noise": table_scores,
        "messages": messages,
        "shards": f"sealed from shard to shard (ChaCha20-Poly1305{key}",
        "sites": f"sealed from site to site (ChaCha20-Poly1305{key}",
        "sealed": _SEALED.get(exposure.keys, NOTHING),
        "masked": "masked pairwise (ChaCha20): an honest server sees only the sum",
        "unions": unions,
        **exposure.method.protections,
    }


def _label_noise(privacy: PrivacySettings) -> str:
    """Return the mechanism that covers labels, with its parameters."""
    if privacy.label_epsilon:
        amount = f"labels: epsilon {privacy.label_epsilon:g}"
    else:
        amount = f"lambda {privacy.label_noise:g}"
    name = "randomised response"
    if privacy.labels == LAPLACE:
        name = "Laplace noise"
    return f"{name} on each label ({amount}), drawn once and kept"


def _model_noise(privacy: PrivacySettings) -> str:
    """Return the mechanism that covers models, with its parameters."""
    name = "noisy clipped statistics"
    if privacy.features == DP_SGD:
        name = "DP-SGD"
    if privacy.noise_multiplier:
        amount = f"noise multiplier {privacy.noise_multiplier:g}"
    else:
        amount = f"epsilon {privacy.epsilon:g}"
    amount = f"models: {amount}, delta {privacy.delta:g}, {_PER}"
    return f"{name} ({amount}{features_note(privacy)})"


def features_note(privacy: PrivacySettings) -> str:
    """Return a note that features have no epsilon, unless all that leaves has noise."""
    if privacy.covers_features and privacy.covers_predictions:
        return ""
    return "; features: none"


def privacy_report(
    messages: Iterable[Disclosure],
    ledgers: Mapping[str, Sequence[Document]],
    settings: PrivacySettings,
    *,
    is_complete: bool,
) -> dict[str, object]:
    """Return the `privacy` entry of a report.

    An incomplete run counts what it had planned, as its sites do for now.
    """
    return {
        "adversary": SERVER,
        "delta": settings.delta,
        "messages": [dict(vars(message)) for message in messages],
        "ledger": ledgers,
        "totals": [
            total
            for site, accounts in ledgers.items()
            for total in _totals(site, accounts, settings, is_complete=is_complete)
        ],
    }


def _totals(
    site: str,
    accounts: Sequence[Document],
    settings: PrivacySettings,
    *,
    is_complete: bool,
) -> Iterable[dict[str, object]]:
    """Yield the epsilons of a site's tables from its account of the run."""
    by_source: defaultdict[str, list[tuple[Release, int]]] = defaultdict(list)
    for account in accounts:
        try:
            release = msgspec.convert(account["release"], Release)
            # a charge counts once
            times = int(account.get("used" if is_complete else "limit", 1))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ReplyError(f"site {site!r} sent a malformed ledger") from None
        by_source[release.source].append((release, times))
    for source, uses in by_source.items():
        released = [
            Released(release.what, release.scope, release.mechanism, times)
            for release, times in uses
        ]
        uncovered = [release.what for release in released if release.mechanism is None]
        any_release = uses[0][0]
        yield {
            "site": any_release.site or site,
            "table": any_release.table,
            "source": source,
            "per": any_release.per,
            **vars(epsilons(released, settings.delta)),
            "delta": settings.delta,
            "uncovered": list(dict.fromkeys(uncovered)),
        }
