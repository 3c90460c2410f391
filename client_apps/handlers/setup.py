"""Setting a run up at a site: describe, extract, check.

Each handler takes the site and the request and returns the reply. It changes the site's
state last, so that a failure changes nothing.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import structs

from client_apps.data.run_store import Entry
from client_apps.handlers.inference import check_row_key, leave_hashes
from client_apps.handlers.training_rows import told_split
from client_apps.privacy import guard, ledger_entries
from client_apps.privacy.keys import key_fields, key_source, take_secrets
from client_apps.privacy.ledger_entries import note
from client_apps.privacy.local_labels import (
    is_label_covered,
    local_label_facts,
    magnitude_of,
)
from client_apps.privacy.noisy_labels import released_label
from client_apps.privacy.proposal_checks import (
    check_begins,
    check_extract,
    check_proposal,
)
from client_apps.privacy.sealed_pairs import check_sealed, open_pairs
from client_apps.privacy.sealed_partials import check_sealed_shards, merged_answers
from client_apps.rounds.site import EXTRACTED, REQUEST, Site
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import MessageError, ProposalError, SiteError
from tp_flower.extraction.extract import extract
from tp_flower.extraction.extracted import ExtractedShard, LabelColumn
from tp_flower.extraction.pairs import merge_pairs, read_pairs, split_pairs
from tp_flower.extraction.select_plan import drop_enum_values, kind_of
from tp_flower.keyed_hash import HashArray
from tp_flower.node_config import NUM_PARTITIONS
from tp_flower.privacy.key_agreement import GUARANTEES, SIMULATED
from tp_flower.privacy.label_mechanisms import LabelPlan
from tp_flower.protocol import setup_messages
from tp_flower.protocol.codec import parse
from tp_flower.protocol.messages import Action
from tp_flower.protocol.setup_messages import ProposedRun
from tp_flower.protocol.text_readings import AS_TEXT, TextReading
from tp_flower.query import Fragment
from tp_flower.query.fragment import SURVIVAL, Role, spell
from tp_flower.query.lateral_tables import pair_names
from tp_flower.query.parsing import EVERY_COLUMN
from tp_flower.sources.csv_shards import text_columns
from tp_flower.sources.policy import SECOND_MOMENTS
from tp_flower.sources.shards import ShardSource
from tp_flower.splits import BY_HASH
from tp_flower.terms.extraction import shares_label_scale
from tp_flower.terms.groups import compared_keys


def describe(
    site: Site, request: setup_messages.DescribeRequest
) -> setup_messages.DescribeReply:
    """Reply with the columns, types and row counts of the requested shards.

    Only the tables that the query names are opened; the others are listed by name, as
    are those without a policy, which may not be requested. Where an owner approves
    runs, the description precedes the approval, and has no number of rows and no column
    without a value. The reply also carries the site's public key for the run.
    """
    for run in site.store.forget_stale():
        # a run that has been idle for so long will not use its reservations
        site.ledger.close(run)
    requested = {name.lower() for name in request.tables}
    shards = []
    for position, source in enumerate(site.shards):
        if source.table.lower() not in requested:
            continue
        schema = guard.visible_schema(site, site.hosted(position))
        compared = [
            name
            for name in schema.texts
            if name.lower() in request.compared or EVERY_COLUMN in request.compared
        ]
        merging = site.tables.merging_texts(source, compared)
        texts = {
            name: structs.replace(column, merge_texts=name in merging)
            for name, column in schema.texts.items()
        }
        absent = [name for name in source.absent if name in schema.columns]
        needs_approval = source.policy.approved_runs is not None
        shards.append(
            setup_messages.ShardDescription(
                table=source.table,
                site=source.site,
                index=source.index,
                position=position,
                columns={
                    name: drop_enum_values(kind)
                    for name, kind in schema.columns.items()
                },
                rows=None if needs_approval else schema.rows,
                all_null=absent if needs_approval else list(schema.all_null),
                unlisted=source.policy.unlisted(schema.columns),
                absent=absent,
                texts=texts,
                unread=schema.unread,
                ranks=source.policy.asks_ranks,
                regions=source.policy.releases.regions,
                sees_regions=source.policy.sees_regions,
                bins=source.policy.releases.named_bins,
            )
        )
    return setup_messages.DescribeReply(
        shards=shards,
        tables=list(dict.fromkeys(source.table for source in site.shards)),
        partitions=int(str(site.context.node_config.get(NUM_PARTITIONS, 0))),
        simulated=site.is_simulated,
        **key_fields(site),
    )


def extract_rows(
    site: Site, request: setup_messages.ExtractRequest
) -> setup_messages.ExtractReply:
    """Run the query's fragments; reply with hashed join keys and labels."""
    site.check_once(EXTRACTED, "another request has already extracted this run's rows")
    site.keep_proposal(request.proposal, request.public_keys)
    take_secrets(site, request)
    check_proposal(site, request)
    check_sealed(site, request.parts)
    check_sealed_shards(site, request.parts, with_partials=True)
    parts = {
        n: _extract_part(site, n, request.parts) for n, _ in site.each(request.parts)
    }
    guard.check_selections(site, parts)
    rows = guard.RowsOfParts.of(site, parts)
    for number, body in request.parts.items():
        if body.label_privacy is not None:
            guard.check_noisy_label(site, number, rows)
    site.store.save(EXTRACTED, Entry({}, {REQUEST: site.round.digest}))
    return setup_messages.ExtractReply(parts)


def begin_sealing(
    site: Site, request: ProposedRun, name: str, words: str, action: Action
) -> None:
    """Take a request to seal something of the parts' rows, before they are extracted.

    It is answered once in a run: two answers of other rows would tell how these differ.
    ``name`` is that of what is sealed in the store, ``words`` in messages.
    """
    site.check_once(name, f"another request has already sealed this run's {name}")
    if site.store.has(EXTRACTED) and not site.store.has(name):
        raise SiteError(f"{words} are sealed before the rows of a run are extracted")
    site.keep_proposal(request.proposal, request.public_keys)
    take_secrets(site, request)
    check_proposal(site, request)
    check_begins(site, action)


def bind_parts(site: Site, bodies: Mapping[int, setup_messages.ExtractPart]) -> None:
    """Bind the parts of a request as proposed, and check what they select together.

    That comes before anything of them is told: it is two answers in which rows may
    differ.
    """
    for number, body in site.each(bodies):
        check_extract(site, number, body)
        site.bind(number, body.shard, site.terms.fragments[number])
    guard.check_selections(site, bodies)


def _extract_part(
    site: Site, number: int, bodies: Mapping[int, setup_messages.ExtractPart]
) -> setup_messages.ExtractedPart:
    """Run a part's fragment; return hashed keys, labels and counts of its rows."""
    body = bodies[number]
    source, groups, extracted = read_part(site, number, bodies)
    fragment = site.fragment(number)
    label = values = None
    if extracted.label is not None:
        label, values = _label(site, number, body, extracted.label)
    elif body.local_label is not None:
        raise SiteError(f"table {extracted.table}: its rows were kept without a label")
    keys = extracted.keys
    # keys that only name or split rows come last and are not joined on
    hashed = {
        str(position): key.hashed(site.join_hasher(group))
        for position, (key, group) in enumerate(zip(keys, groups, strict=False))
    }
    split = told_split(site, body.split, keys)
    note(site, number, ledger_entries.COUNTS)
    if groups or body.groups or body.row_key or "subset" in split:
        note(site, number, ledger_entries.KEYS, key_guarantee(site))
    if "times" in split:
        note(site, number, ledger_entries.TIMES)
    return setup_messages.ExtractedPart(
        rows=extracted.rows,
        keys=[key.kind for key in keys],
        engine=extracted.contents.engine,
        pushed=list(extracted.contents.pushed),
        label=label,
        codes={key: column.codes for key, column in hashed.items()},
        hashes={key: column.hashes for key, column in hashed.items()},
        group_hashes=_group_hashes(site, source, fragment) if body.groups else None,
        label_values=values,
        row_hashes=_row_hashes(site, number, body, extracted),
        **split,
        **_numbers(site, number, body, extracted),
    )


def read_part(
    site: Site, number: int, bodies: Mapping[int, setup_messages.ExtractPart]
) -> tuple[ShardSource, list[str], ExtractedShard]:
    """Run a part's fragment, as its policy allows.

    Return its shard as the request reads it, the groups of its join keys, and its rows.
    """
    body = bodies[number]
    source, fragment, groups = admit_part(site, number, body)
    pairs = _pairs(site, number, fragment, bodies)
    no_rows = site.terms.no_rows(number)
    extracted = site.tables.extract(number, source, fragment, pairs, no_rows)
    site.queries[number]["rows"] = extracted.rows
    guard.check_extracted(source, fragment, extracted.rows)
    site.bind(number, body.shard, fragment, len(groups))
    site.round.learn(site.tables.identity(number))
    return source, groups, extracted


def admit_part(
    site: Site, number: int, body: setup_messages.ExtractPart
) -> tuple[ShardSource, Fragment, list[str]]:
    """Refuse a part's fragment that its policy does not allow, or one query too many.

    Return its shard as the request reads it, the fragment, and the groups of its keys.
    """
    fragment = parse(body.fragment, "fragment", Fragment.from_json)
    guard.list_query(site, number, _shard(site, body), fragment)
    source = site.hosted(body.shard)
    groups = _key_groups(site, source, body, fragment)
    source = _as_requested(site, body)
    check_extract(site, number, body)
    guard.admit_query(site, number, source)
    return source, fragment, groups


def key_guarantee(site: Site) -> str:
    """Return what is promised of the keys that sites share, for the ledger."""
    return SIMULATED if site.is_simulated else GUARANTEES[key_source(site)]


def _shard(site: Site, body: setup_messages.ExtractPart) -> ShardSource:
    """Return the shard that a request names; MessageError if the site has none."""
    hosted = len(site.shards)
    if body.shard >= hosted:
        raise MessageError(f"'shard' is {body.shard}; the site hosts {hosted}")
    return site.shards[body.shard]


def _as_requested(site: Site, body: setup_messages.ExtractPart) -> ShardSource:
    """Return the shard of a request, with the types and readings of its columns."""
    source = _add_types(site, site.hosted(body.shard), body.types)
    return replace(source, readings=_check_readings(source, body.readings))


def _pairs(
    site: Site,
    number: int,
    fragment: Fragment,
    bodies: Mapping[int, setup_messages.ExtractPart],
) -> pa.Table | None:
    """Return the keys and cutoffs of the table around a LATERAL sub-query.

    They are a join key of that table's own parts of the run, which come before, or what
    other sites have sealed. None without a sub-query, or where it has a grid. Of shards
    that merge partial answers, they have the answers beside them.
    """
    subquery = fragment.subquery
    if subquery is None or subquery.cutoffs is None:
        return None
    if site.terms.shares_keys(number):
        source = _as_requested(site, bodies[number])
        return merged_answers(site, number, source, bodies)
    if not subquery.cutoffs.table:
        return None
    if subquery.cutoffs.sealed:
        source = _as_requested(site, bodies[number])
        return open_pairs(site, number, source, bodies)
    around = subquery.cutoffs.table
    proposal = site.terms.proposal
    key, around_key = compared_keys(proposal, fragment.table, around)
    names = pair_names(fragment, key)
    part = proposal.parts[number]
    tables = []
    for other, at in proposal.shards_of(around).items():
        if (at.node, at.site) != (part.node, part.site):
            raise ProposalError(
                f"table {fragment.table!r} takes the cutoffs of table {around!r}, of "
                f"which site {part.site!r} has not all shards"
            )
        around_fragment = site.terms.fragments[other]
        outer = around_fragment.keys[around_key]
        if why := _why_no_pairs(
            site, other, around_fragment, fits=len(outer) == len(names)
        ):
            raise ProposalError(
                f"table {fragment.table!r} takes the cutoffs of table {around!r}, {why}"
            )
        columns = dict(zip(names, outer, strict=True))
        guard.check_pairs(site.hosted(at.shard), fragment, columns)
        source = _as_requested(site, bodies[other])
        pairs = read_pairs(
            source, around_fragment, around_key, names, site.tables.order_key
        )
        tables.append(pairs)
    return _own_pairs(site, number, fragment, bodies, merge_pairs(tables, around))


def _split_pairs(
    site: Site,
    number: int,
    bodies: Mapping[int, setup_messages.ExtractPart],
    pairs: pa.Table,
    *,
    is_own: bool,
) -> pa.Table:
    """Return the pairs of a part's keys, or all others."""
    source = _as_requested(site, bodies[number])
    fragment = site.terms.fragments[number]
    return split_pairs(source, fragment, pairs, site.tables.order_key, is_own=is_own)


def _own_pairs(
    site: Site,
    number: int,
    fragment: Fragment,
    bodies: Mapping[int, setup_messages.ExtractPart],
    pairs: pa.Table,
) -> pa.Table:
    """Return the pairs that a part answers, of a table in several shards of this site.

    They are those of its keys. The last part answers what no other one does: for keys
    without rows there are empty windows.
    """
    *others, last = site.terms.proposal.shards_of(fragment.table)
    if number != last:
        return _split_pairs(site, number, bodies, pairs, is_own=True)
    for other in others:
        if "rows" not in site.queries.get(other, {}):
            raise ProposalError(
                f"table {fragment.table!r} takes cutoffs of rows of this site, which "
                "has not all of its own shards, or not before its last one"
            )
        pairs = _split_pairs(site, other, bodies, pairs, is_own=False)
    return pairs


def _why_no_pairs(site: Site, number: int, around: Fragment, *, fits: bool) -> str:
    """Return why a part's rows give a LATERAL sub-query no cutoffs; "" if they do.

    They are read once the part itself was: as its policy allows, and counted.
    """
    if not fits:
        return "whose key has not as many parts"
    if around.subquery is not None and around.subquery.cutoffs is not None:
        return "which is a LATERAL sub-query itself"
    if "rows" not in site.queries.get(number, {}):
        return "whose rows come after it"
    return ""


def _row_hashes(
    site: Site,
    number: int,
    body: setup_messages.ExtractPart,
    extracted: ExtractedShard,
) -> HashArray | None:
    """Return hashes of the rows' keys, (n, 2); None if the rows have none."""
    if not body.row_key:
        return None
    return leave_hashes(site, number, body.row_key, extracted)


def _add_types(
    site: Site, source: ShardSource, types: Mapping[str, str]
) -> ShardSource:
    """Return a source whose columns without a value have the types of other shards.

    The types that the owner declares come first.
    """
    if not types:
        return source
    empty = guard.visible_schema(site, source).all_null
    for name, kind in types.items():
        if name not in empty or kind_of(kind) is None:
            raise MessageError(
                f"'types' declares {name!r} as {kind}, which it cannot be"
            )
    declared = {spell(name, types) or name: kind for name, kind in source.types.items()}
    return replace(source, types={**types, **declared})


def _key_groups(
    site: Site,
    source: ShardSource,
    body: setup_messages.ExtractPart,
    fragment: Fragment,
) -> list[str]:
    """Return the groups of the keys that joins compare.

    The keys that name rows are valid, and the fragment may read all that it names,
    under the noise of the run.
    """
    groups = body.key_groups
    split = body.split
    check_row_key(body.row_key, len(fragment.keys))
    # by its last key rows are held out, or grouped for metrics
    has_other_key = site.terms.proposal.split_table == fragment.table
    joined = len(fragment.keys) - len(body.row_key) - int(has_other_key)
    if len(groups) != joined:
        raise MessageError(
            f"'key-groups' must name a group for each of the {joined} join keys"
        )
    guard.check_fragment(site, source, fragment)
    guard.check_noise(site, source, fragment)
    guard.check_inspection(site, source, fragment)
    if split is not None and split.by != BY_HASH:
        # the values of the last key leave in the clear, as those of a weight do
        guard.check_fragment(
            site, source, replace(fragment, weight=fragment.keys[-1][0])
        )
    return groups


def _check_readings(
    source: ShardSource, readings: Mapping[str, TextReading]
) -> Mapping[str, TextReading]:
    """Return a request's readings; MessageError for any that the site did not list."""
    columns = text_columns(source) if readings else {}
    for name, reading in readings.items():
        if name not in columns:
            raise MessageError(
                f"'readings' names {name!r}, which is no column of texts here"
            )
        if reading not in (*columns[name].readings, AS_TEXT):
            raise MessageError(
                f"'readings' has a reading of {name!r} that does not fit its texts"
            )
    return readings


def _numbers(
    site: Site,
    number: int,
    body: setup_messages.ExtractPart,
    extracted: ExtractedShard,
) -> dict[str, Any]:
    """Note and return the numbers of each row that the query has: its weight, say.

    An offset may not be missing; others may, which the server finds.
    """
    numbers: dict[str, Any] = {}
    for role in site.fragment(number).numbers:
        values = extracted.number(role)
        if values is None:
            raise SiteError(
                f"table {extracted.table}: its rows were kept without a {role}"
            )
        if role is Role.OFFSET:
            _check_offset(extracted, values)
        if role in SURVIVAL and body.local_label is not None:
            raise SiteError(
                f"table {extracted.table}: the {role} would leave, and its label stays"
            )
        # those of survival times leave with the label, as its entry says
        if role not in SURVIVAL:
            note(site, number, ledger_entries.NUMBERS[role])
        numbers[role] = values
    return numbers


def _check_offset(extracted: ExtractedShard, offset: FloatArray) -> None:
    """Refuse an offset that no score can have."""
    if count := int(np.count_nonzero(~np.isfinite(offset))):
        raise SiteError(
            f"table {extracted.table}: the offset is NULL or NaN in {count} of "
            f"{len(offset)} rows: leave them out, WHERE exposure > 0 for "
            "LN(exposure), or write COALESCE(..., 0) AS offset where NULL stands for "
            "none"
        )


def _label(
    site: Site, number: int, body: setup_messages.ExtractPart, label: LabelColumn
) -> tuple[setup_messages.LabelFacts, AnyArray | None]:
    """Return the label's type, with its values unless they stay at the site."""
    source = site.source(number)
    terms = body.label_privacy
    if body.local_label is not None or terms is None:
        _check_classes(source, label)
    if body.local_label is not None:
        sql = site.fragment(number).label or "label"
        is_covered = is_label_covered(site, number)
        label_facts = local_label_facts(
            source, label, body.local_label, sql, is_covered=is_covered
        )
        run_terms = site.terms
        is_shared = shares_label_scale(run_terms.proposal, run_terms.settings)
        if is_shared and label_facts.classes is None:
            guard.check_plan(source, (SECOND_MOMENTS,))
            note(site, number, ledger_entries.LABEL_MAGNITUDE)
            label_facts = structs.replace(
                label_facts, magnitude=magnitude_of(label.values)
            )
        return label_facts, None
    plan = None
    if terms is not None:
        plan = LabelPlan(terms.mechanism, terms.epsilon, terms.classes, terms.limits)
    released = released_label(site, number, plan, label)
    return setup_messages.LabelFacts(
        released.kind, list(released.categories)
    ), released.values


def _check_classes(source: ShardSource, label: LabelColumn) -> None:
    """Refuse text labels with rare classes, because labels leave in the clear."""
    if source.min_count <= 1:
        return
    codes = label.codes
    classes = len(label.categories)
    rows = np.bincount(codes[codes >= 0], minlength=classes)[:classes]
    if rare := int(np.count_nonzero(rows < source.min_count)):
        raise SiteError(
            f"the label has {rare} classes of fewer than min-count = "
            f"{source.min_count} rows, which may not leave the site: filter them out, "
            "or put them into one class with CASE"
        )


def _group_hashes(site: Site, source: ShardSource, fragment: Fragment) -> HashArray:
    """Return the keyed hashes of a sub-query's groups, before HAVING and filters."""
    if fragment.subquery is None:
        raise SiteError(f"table {fragment.table}: the fragment has no groups")
    if () in fragment.subquery.partitions:
        raise SiteError(f"table {fragment.table}: a window has no PARTITION BY")
    hashes = []
    for number, grouped in enumerate(fragment.all_groups):
        groups = extract(source, grouped, order_key=site.tables.order_key).groups
        if groups is None:
            raise SiteError(f"table {fragment.table}: the sub-query has no groups")
        purpose = f"groups of {fragment.table}"
        # equal values of another PARTITION BY are no group in common
        hasher = site.hasher().purpose(f"{purpose}, {number}" if number else purpose)
        hashes.append(groups.hashed(hasher).hashes)
    return np.concatenate(hashes)
