"""Checks of a run's proposal against this site, and of requests against the proposal.

A site takes one proposal in a run, with the request for its rows. What it can derive
from it, it does not take from later requests, and what these repeat is compared. A
request that says something else is refused, with the field and both values, and the
refusal is in the ledger.
"""

from collections.abc import Iterable, Mapping
from textwrap import shorten
from typing import Any, Final

import msgspec
import numpy as np

from client_apps.data.key_files import read_allowed_keys
from client_apps.data.run_store import Entry
from client_apps.data.saved_models import SavedModel, parts_of
from client_apps.privacy.keys import key_source, own_node, site_public_key
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.errors import MessageError, ModelError, ProposalError
from tp_flower.features.choice import TableChoice
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.model_names import find_version
from tp_flower.node_config import ALLOWED_KEYS
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.protocol.fields import Body
from tp_flower.protocol.messages import Action
from tp_flower.protocol.packet import pack_bits
from tp_flower.protocol.proposal import Proposal
from tp_flower.protocol.setup_messages import (
    ExtractPart,
    ProposedRun,
    StatisticsPart,
)
from tp_flower.protocol.training_messages import (
    Masking,
    PreparePart,
    PrivacyTerms,
    Union,
    Update,
)
from tp_flower.sources.derived.accounts import source_id

_ROWS: Final = "run-rows-{}"
"""Entry of a part: which of its rows have which role in the run, a bit each."""
_FOLD_ROWS: Final = "fold-rows-{}"
"""Entry of a part: the training rows of the folds that a search has had, a bit each."""
TRAINED = "training"
SAMPLED = "sampled"
TESTED = "held-out"
SCORED = "scored"
"""Roles of rows: those that encoders are fitted to, those of a sample to train on, the
held-out ones, and those scored alone."""
_LENGTH: Final = 200  # of a value in a message


def contradiction(field: str, proposed: object, requested: object) -> ProposalError:
    """Return the error about a request that says something else than the proposal."""
    texts = (
        shorten(repr(value), _LENGTH, placeholder=" ...")
        for value in (proposed, requested)
    )
    return ProposalError(
        "{}: the run was proposed with {}, and the request says {}".format(
            repr(field), *texts
        )
    )


def agree(field: str, proposed: object, requested: object) -> None:
    """Refuse a request that says something else than the proposal."""
    if proposed != requested:
        raise contradiction(field, proposed, requested)


def agree_in_all(proposed: Body, requested: Body, *, but: tuple[str, ...] = ()) -> None:
    """Refuse a structure unlike the proposed one; name the first field that differs."""
    for field in msgspec.structs.fields(proposed):
        if field.name not in but:
            values = (getattr(body, field.name) for body in (proposed, requested))
            agree(field.encode_name, *values)


def check_proposal(site: Site, request: ProposedRun) -> None:
    """Refuse a proposal that contradicts itself, its request or the site."""
    proposal = request.proposal
    terms = site.terms
    node = own_node(site)
    _check_joins(site)
    nodes = {part.node for part in proposal.parts.values()}
    agree("public keys", sorted(nodes), sorted(request.public_keys))
    for part in proposal.parts.values():
        agree("site keys", part.site_key, request.site_keys.get(part.node, ""))
    members = {
        group: sorted(sealed.members) for group, sealed in request.sealed.items()
    }
    groups = terms.groups_of(node)
    agree("sealed", {group: sorted(groups[group]) for group in sorted(groups)}, members)
    at_site = sorted(n for n, part in proposal.parts.items() if part.node == node)
    agree("parts", at_site, sorted(request.parts))
    for number, _ in site.each(request.parts):
        _check_part(site, proposal, number)
        _check_partners(site, proposal, number)


def check_extract(site: Site, number: int, body: ExtractPart) -> None:
    """Refuse a request for a part's rows that is not as proposed."""
    agree_in_all(
        site.terms.extract_parts[number],
        body,
        but=("readings", "types", "cutoffs", "sealed_keys", "sealed_partials"),
    )


def _check_joins(site: Site) -> None:
    """Refuse joins of a table to itself, and joins that do not fit the tables' keys.

    At a table that is joined to itself the masks of the join would cancel.
    """
    proposal = site.terms.proposal
    for index, join in enumerate(proposal.joins):
        if join.left == join.right:
            raise ProposalError(
                f"join {index} of the run's proposal joins {join.left!r} to itself"
            )
    for number, fragment in site.terms.fragments.items():
        agree("table", proposal.parts[number].table, fragment.table)
        keys = {side.key for side in site.terms.join_sides(number)}
        # every key is hashed for a join, but for those that split or name rows, which
        # come last
        if len(keys) > len(fragment.keys) or keys != set(range(len(keys))):
            raise ProposalError(
                "the joins of the run's proposal do not fit the keys of table "
                f"{fragment.table!r}"
            )
    if unknown := sorted(
        {*proposal.outer, proposal.label_table} - {*proposal.tables, ""}
    ):
        raise ProposalError(
            f"the run's proposal names {unknown[0]!r}, which no part is of"
        )


def _check_part(site: Site, proposal: Proposal, number: int) -> None:
    """Refuse a part that is of another table or site than its shard here."""
    part = proposal.parts[number]
    fragment = site.terms.fragments[number]
    if part.shard >= len(site.shards):
        raise MessageError(
            f"'shard' is {part.shard}; the site hosts {len(site.shards)}"
        )
    source = site.shards[part.shard]
    # as in DuckDB, identifiers are compared without case
    agree("name", fragment.name.lower(), source.table.lower())
    agree("site", part.site, source.site)


def _check_partners(site: Site, proposal: Proposal, number: int) -> None:
    """Refuse a run with a site that the owner of a part's table has not named."""
    policy = site.hosted(proposal.parts[number].shard).policy
    is_pinned = key_source(site) is KeySource.PINNED
    policy.check_pinned(is_pinned=is_pinned)
    if not is_pinned:
        return
    names = read_allowed_keys(str(site.context.node_config[ALLOWED_KEYS]))
    at_site = site_public_key(site)
    for part in proposal.parts.values():
        if part.site_key != at_site:
            policy.check_partner(names[bytes.fromhex(part.site_key)])


def check_begins(site: Site, action: Action) -> None:
    """Refuse a message that a run as proposed does not have."""
    settings = site.terms.settings
    if not site.terms.allows(action):
        begun = f"{action}, which such a run does not have"
        raise contradiction(
            "mode", f"{settings.mode}, strategy {settings.method_name}", begun
        )


def check_protection(
    site: Site, privacy: PrivacyTerms, masking: Masking | None
) -> None:
    """Refuse other mechanisms for models and scores than were proposed."""
    terms = site.terms
    agree_in_all(terms.privacy, privacy)
    agree("masking", terms.masks_scores, masking is not None)
    if masking is not None:
        agree("tables", len(terms.proposal.tables), masking.tables)


def agree_in_model(site: Site, number: int, spec: ModelSpec, l2: float) -> None:
    """Refuse another model of a part, or another penalty, than was proposed."""
    proposed = site.terms.spec(number, spec)
    for field in msgspec.structs.fields(spec):
        agree(
            f"model.{field.name}",
            getattr(proposed, field.name),
            getattr(spec, field.name),
        )
    if not np.isclose(site.terms.l2(spec), l2, rtol=1e-9, atol=0.0):
        raise contradiction("l2", site.terms.l2(spec), l2)


def check_prepared(site: Site, number: int, body: PreparePart, spec: ModelSpec) -> None:
    """Refuse a part whose training differs from the proposal."""
    agree_in_model(site, number, spec, body.l2)
    check_union(site, number, body.update, body.union)
    check_unmatched(site, number, body.unmatched)


def check_encoders(
    site: Site, number: int, choice: TableChoice, body: StatisticsPart
) -> None:
    """Refuse encoders of features, or shards of the table, other than proposed."""
    terms = site.terms
    agree("encoders", terms.choice(number), choice)
    agree("shards", terms.shards_of(number), body.shards)
    if body.describes:
        # under privacy.features nothing about rows leaves without noise for the report
        # alone
        agree("describes", not terms.privacy.covers_features, body.describes)


def check_trained(site: Site, number: int, rows: tuple[BoolArray, BoolArray]) -> None:
    """Refuse other training or held-out rows than in earlier messages of the run."""
    trained, tested = rows
    role = TRAINED
    if site.terms.trains_on_sample:
        role = SAMPLED
        if np.any(pack_bits(trained) & ~rows_of_run(site, number)[TRAINED]):
            raise ProposalError(
                f"part {number} has sampled rows that are none of the training"
            )
    agree_in_rows(site, number, role, trained)
    agree_in_rows(site, number, TESTED, tested)


def check_bins(site: Site, number: int, bins: int) -> None:
    """Refuse more bins of a part's columns than proposed, or than its policy allows."""
    policy = site.source(number).policy
    settings = site.terms.settings
    if bins > settings.bins_of(policy.releases.named_bins):
        proposed = f"bins = {settings.bins}"
        raise contradiction("bins", proposed, f"bin numbers of {bins} bins")
    policy.check_bins(bins)


def check_union(site: Site, number: int, update: Update, union: Union | None) -> None:
    """Refuse other shards in the sums of a table, or another key, than was proposed.

    A consensus is sought by the shards with rows to train on, which one site does not
    know.
    """
    terms = site.terms
    updates = terms.updates(number)
    if update not in updates:
        raise contradiction("update", " or ".join(updates), str(update))
    if union is None:
        return
    agree("group", terms.union_group(number), union.group)
    if union.shards is None:
        return
    keys = site.shard_keys(terms.proposal.parts[number].table)
    if update is Update.CONSENSUS and union.shards:
        keys = {n: key for n, key in keys.items() if n in union.shards}
    agree("shards", keys, union.shards)


def check_unmatched(site: Site, number: int, unmatched: Mapping[str, AnyArray]) -> None:
    """Refuse unmasked rows where no LEFT JOIN is, and any change of them in the run."""
    outer = site.terms.proposal.outer
    groups = {
        side.group for side in site.terms.join_sides(number) if side.other in outer
    }
    if wrong := sorted(unmatched.keys() - groups):
        raise contradiction("unmatched", sorted(groups), wrong)
    for group in groups:
        # rows that are in a LEFT JOIN without a partner are in every round of the run
        bits = unmatched.get(group)
        _agree_in_rows(
            site, number, f"unmatched {group}", np.zeros(0) if bits is None else bits
        )


def agree_in_rows(site: Site, number: int, role: str, rows: BoolArray) -> None:
    """Refuse other rows (n,) of a part in a role than in an earlier message."""
    _agree_in_rows(site, number, role, pack_bits(rows))


def _agree_in_rows(site: Site, number: int, role: str, bits: AnyArray) -> None:
    """Store the rows of a role, or refuse rows other than the stored ones."""
    by_role = rows_of_run(site, number)
    if role not in by_role:
        site.store.save(_ROWS.format(number), Entry({**by_role, role: bits}, {}))
    elif not np.array_equal(by_role[role], bits):
        raise ProposalError(
            f"the {role} rows of part {number} are not those of an earlier message of "
            "the run"
        )


def rows_of_run(site: Site, number: int) -> Mapping[str, Any]:
    """Return the rows of a part by role, a bit each, as far as messages name them."""
    name = _ROWS.format(number)
    if not site.store.has(name):
        return {}
    return site.store.load(name).arrays


def check_aliases(site: Site, numbers: Iterable[int]) -> None:
    """Refuse training rows that differ in few rows between two aliases of one table.

    What leaves of both would tell of the rows in which they differ. Rows of a
    sub-query, of a database and of a derived table are in an order of their alias: that
    they are the same cannot be seen.
    """
    by_source: dict[str, list[tuple[bool, AnyArray]]] = {}
    for number in numbers:
        source = site.source(number)
        bits = rows_of_run(site, number)[TRAINED]
        is_sorted = not source.has_order or site.fragment(number).subquery is not None
        difference = (
            "the difference of the training rows of two aliases of table "
            f"{source.table!r}"
        )
        for other_is_sorted, other in by_source.setdefault(source_id(source), []):
            if is_sorted or other_is_sorted or len(other) != len(bits):
                source.policy.check_rows(1, difference)
                continue
            for rows in (bits & ~other, other & ~bits):
                if count := int(np.bitwise_count(rows).sum()):
                    source.policy.check_rows(count, difference)
        by_source[source_id(source)].append((is_sorted, bits))


def forget_fold(site: Site, number: int) -> None:
    """Forget the rows of a part in a search's fold but for those that it trained on."""
    by_role = rows_of_run(site, number)
    if TRAINED in by_role:
        name = _FOLD_ROWS.format(number)
        folds = dict(site.store.load(name).arrays) if site.store.has(name) else {}
        folds[str(len(folds))] = by_role[TRAINED]
        site.store.save(name, Entry(folds, {}))
    site.store.drop(_ROWS.format(number))


def check_folds(site: Site, numbers: Iterable[int]) -> None:
    """Refuse training rows that differ in few rows between two folds of a search.

    What leaves of both would tell of the rows in which they differ.
    """
    for number in numbers:
        name = _FOLD_ROWS.format(number)
        if not site.store.has(name):
            continue
        source = site.source(number)
        bits = rows_of_run(site, number)[TRAINED]
        table = source.table
        difference = f"the difference of two folds' training rows of table {table!r}"
        for other in site.store.load(name).arrays.values():
            for rows in (bits & ~other, other & ~bits):
                if count := int(np.bitwise_count(rows).sum()):
                    source.policy.check_rows(count, difference)


def check_named(site: Site, name: str, version: str) -> None:
    """Refuse another saved model than was proposed, where the proposal names one.

    A model that was boosted from another one is scored with that one.
    """
    named = proposed = site.terms.saved_model
    # a model may start from an earlier version of its own name, which means the latest
    lineage: set[str] = set()
    while proposed and proposed not in lineage:
        if proposed == (f"{name}@{version}" if "@" in proposed else name):
            return
        lineage.add(proposed)
        proposed = _start_of(site, proposed)
    if named:
        raise contradiction("model name", named, f"{name}@{version}")


def _start_of(site: Site, name: str) -> str:
    """Return the model that a saved one was boosted from, "" for none."""
    if site.state_folder is None:
        return ""
    try:
        model = find_version(site.state_folder, name)
    except ModelError:
        return ""
    folders = parts_of(site.state_folder, model).values()
    return next((SavedModel.load(folder).start for folder in folders), "")
