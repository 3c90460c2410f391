"""Regions at a site: divide rows, and take pairs of rows and regions for the rows."""

from collections.abc import Sequence

import numpy as np

from client_apps.handlers.training_rows import read_multiplicity
from client_apps.methods.boost.rounds import BoostState, Part, derivatives_of
from client_apps.operator.pairs import PairedRows, are_distinct, check_own_regions
from client_apps.privacy import ledger_entries
from client_apps.privacy.proposal_checks import contradiction
from client_apps.rounds.site import Site
from tp_flower.errors import MessageError
from tp_flower.learning.models.local_model import host_features
from tp_flower.methods.boost.messages import (
    TRAIN_REGIONS,
    BoostStep,
    Growth,
    PairedPart,
    PairsPart,
    PairsReply,
    PairsRequest,
    RegionsReply,
    RegionsRequest,
    RegionsUpdate,
)
from tp_flower.methods.boost.regions import (
    UNDIVIDED,
    RegionTree,
    grow_regions,
    may_have_regions,
    regions_of,
)
from tp_flower.methods.boost.settings import BoostSettings
from tp_flower.methods.boost.trees import TreeModel
from tp_flower.protocol.codec import check_positions, check_sizes
from tp_flower.protocol.packet import unpack_bits
from tp_flower.sources.derived.accounts import source_id


def divide(site: Site, request: RegionsRequest) -> RegionsReply:
    """Divide the rows of parts into regions, and reply with them, once in a run."""
    updates = {}
    parts = list(site.parts(BoostState))
    for part in parts:
        body = request.parts.get(part.number)
        if body is not None:
            have_told = _told_in_another_role(site, part, parts)
            updates[part.number] = _divide(
                site, part, request.growth, body, have_told=have_told
            )
            site.save(part)
    return RegionsReply(updates)


def _told_in_another_role(site: Site, part: Part, parts: Sequence[Part]) -> bool:
    """Whether a part's rows have told their regions in another role.

    Two divisions of the same rows make smaller regions than each, and more.
    """
    source = source_id(site.source(part.number))
    return any(
        other.state.regions is not None
        and source_id(site.source(other.number)) == source
        for other in parts
        if other.number != part.number
    )


def _agree_in_regions(site: Site, table: str) -> None:
    """Refuse regions of a table that the proposal has none of."""
    settings = site.terms.settings
    if not may_have_regions(settings, table):
        proposed = settings.of(BoostSettings).regions
        raise contradiction("regions", f"regions = {proposed}", table)


def _divide(
    site: Site, part: Part, growth: Growth, body: BoostStep, *, have_told: bool
) -> RegionsUpdate:
    """Divide a part's rows, and return the region of each that takes part.

    There is one where the same rows have told theirs in another role.
    """
    table = part.data.table
    _agree_in_regions(site, table)
    least_rows = site.terms.settings.of(BoostSettings).min_rows_per_leaf
    if growth.least_rows < least_rows:
        raise contradiction("growth.least_rows", least_rows, growth.least_rows)
    if part.state.regions is not None:
        raise MessageError(f"the regions of table {table!r} have left already")
    policy = site.source(part.number).policy
    policy.check_regions()
    model = part.model
    if not isinstance(model, TreeModel):
        raise MessageError("a table without features has no regions")
    tree = UNDIVIDED
    if not have_told:
        leaves = min(growth.leaves, policy.releases.regions)
        tree = grow_regions(
            part.data.features,
            model.forest.categorical,
            derivatives_of(part, body),
            part.data.multiplicity,
            growth.with_leaves(leaves),
            policy.min_rows,
        )
    part.state.regions = tree.bytes()
    if tree.regions == 1:
        return RegionsUpdate(count=1)
    ledger_entries.note_regions(site, part.number, TRAIN_REGIONS, tree.regions)
    regions = regions_of(tree, part.data.features)
    return RegionsUpdate(count=tree.regions, regions=regions)


def pair(site: Site, request: PairsRequest) -> PairsReply:
    """Take pairs of rows and regions in place of the rows, once in a run."""
    updates = {}
    for part in site.parts(BoostState):
        body = request.parts.get(part.number)
        if body is None:
            raise MessageError(f"it has no pairs of part {part.number}")
        updates[part.number] = PairedPart(_pair(site, part, request.table, body))
        site.save(part)
    return PairsReply(updates)


def _pair(site: Site, part: Part, table: str, body: PairsPart) -> int:
    """Let pairs take the rows' place, and return how many there are."""
    _agree_in_regions(site, table)
    if table not in site.terms.proposal.tables:
        raise MessageError(f"the run has no table {table!r}, whose regions these are")
    if part.state.is_paired:
        raise MessageError("the rows are pairs of rows and regions already")
    paired = _read_pairs(part, body)
    model, state = part.model, part.state
    if not isinstance(model, TreeModel):
        raise MessageError(f"models {part.data.spec.kind!r} read no regions")
    read = None
    if part.data.table == table:
        _take_own_regions(part, model, paired)
    else:
        site.source(part.number).policy.check_seen_regions()
        read = paired.regions
        model.read_regions(host_features(part.data.features).shape[1])
    site.keep(part.number, part.data.paired_entry(paired, read))
    state.pair(paired.rows, len(paired.multiplicity))
    return len(paired.rows)


def _take_own_regions(part: Part, model: TreeModel, paired: PairedRows) -> None:
    """Let the model of the divided table have its regions, which pairs must repeat."""
    table = part.data.table
    if part.state.regions is None:
        raise MessageError(f"table {table!r} has sent no regions")
    model.divide(RegionTree.of(part.state.regions))
    check_own_regions(model, part.data.features, paired.rows, paired.regions, table)


def _read_pairs(part: Part, body: PairsPart) -> PairedRows:
    """Return the pairs of a message.

    They must be distinct, and of each row as many joined rows as it has.

    Raises:
        MessageError: they are not.
    """
    data = part.data
    rows, regions = body.rows.astype(np.int64), body.regions
    counts = read_multiplicity(body.multiplicity, body.masses, data.joined_rows)
    trained = len(counts)
    check_sizes(body, pairs=len(rows), trained_pairs=trained)
    check_positions(rows, "rows", len(data.features))
    check_positions(rows[:trained], "rows", len(data.multiplicity))
    tested = unpack_bits(body.tested, len(rows))
    total = np.bincount(rows[:trained], counts, minlength=len(data.multiplicity))
    is_whole = (
        trained <= len(rows)
        and are_distinct(rows, regions)
        and np.allclose(total, data.multiplicity, rtol=1e-5)
        and np.array_equal(np.unique(rows[tested]), np.flatnonzero(data.tested))
        and tested[trained:].all()
    )
    if not is_whole:
        raise MessageError("the pairs are not those of the rows that take part")
    return PairedRows(rows, regions, counts, tested)
