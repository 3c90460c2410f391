"""What a site does to draw a coreset: measure, draw, weigh (three rounds).

``measure`` brings what the sensitivities of a part's rows sum to; ``draw`` row numbers,
drawn in proportion to them; ``weigh`` the sensitivities of the rows of the sample,
under masks that cancel in the sum over all parts. What a site keeps of a round for the
next one never changes, so that a round that is answered again is answered alike.

An honest server says of how many parts it sums: a part that is told that it is alone
adds no mask.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from client_apps.data.run_store import Entry
from client_apps.handlers.importance import (
    Measured,
    measured_clusters,
    measured_columns,
    scored,
    trained_rows,
)
from client_apps.privacy import ledger_entries
from client_apps.privacy.guard import Guard
from client_apps.privacy.ledger_entries import Shard
from client_apps.rounds.site import Site
from tp_flower.arrays import FloatArray
from tp_flower.coresets.leverage import CLUSTERS
from tp_flower.coresets.sampling import draw_rows
from tp_flower.errors import SiteError
from tp_flower.privacy.masked_sums import MOST_PARTS, pair_masks, to_fixed
from tp_flower.privacy.releases import Release
from tp_flower.protocol import (
    AnyArray,
    DrawnPart,
    DrawReply,
    DrawRequest,
    MeasuredPart,
    MeasurePart,
    MeasureReply,
    MeasureRequest,
    WeighedPart,
    WeighReply,
    WeighRequest,
)
from tp_flower.settings import MOST_ROWS, PrivacySettings
from tp_flower.sources.policy import LABELS, MODELS, SCORES

MASKS: Final = "coreset masks"
_IN_CLEAR: Final = PrivacySettings()


def measure(site: Site, request: MeasureRequest) -> MeasureReply:
    """Reply with what the sensitivities of each part's trained rows sum to.

    Of a table in several shards with what it takes to know that: a shard's Gram matrix,
    or the cost of its clusters.
    """
    parts: dict[int, MeasuredPart] = {}
    kept: dict[str, Entry] = {}
    noted: list[Release] = []
    for number, body in site.each(request.parts):
        measured = _measure_part(site, number, body, request)
        kept[_measured(number)] = measured.kept
        parts[number] = measured.of_shard if body.is_shard else measured.of_table
        shard = Shard.of(site, number, site.source(number))
        noted.append(ledger_entries.measured(shard, is_shard=body.is_shard))
    _keep(site, kept, noted)
    return MeasureReply(parts)


def _measure_part(
    site: Site, number: int, body: MeasurePart, request: MeasureRequest
) -> Measured:
    guard, source = Guard(site), site.source(number)
    table = site.extracted(number).table
    kinds = [SCORES]
    kinds += [MODELS] if body.is_shard else []
    kinds += [LABELS] if body.label is not None else []
    guard.check_plan(source, _IN_CLEAR, kinds)
    rows = trained_rows(site, number, body, request.joined_rows)
    guard.check_rows(source, len(rows.own), f"the sensitivities of table {table!r}")
    if request.sensitivities == CLUSTERS:
        return measured_clusters(site, number, body, rows, request.clusters)
    return measured_columns(site, number, body, rows)


def draw(site: Site, request: DrawRequest) -> DrawReply:
    """Reply with rows drawn in proportion to what their joined rows are worth."""
    parts: dict[int, DrawnPart] = {}
    kept: dict[str, Entry] = {}
    noted: list[Release] = []
    for number, body in site.each(request.parts):
        measured = _kept(site, _measured(number), "measured")
        scores = body.scale * scored(site, number, measured, body)
        mass = measured.arrays["masses"] * scores
        drawn = _made(draw_rows, mass, body.count, site.noise.generator())
        parts[number] = DrawnPart(drawn.astype(np.uint32))
        kept[_drawn(number)] = Entry({"scores": scores}, {})
        noted.append(ledger_entries.drawn(Shard.of(site, number, site.source(number))))
    _keep(site, kept, noted)
    return DrawReply(parts)


def weigh(site: Site, request: WeighRequest) -> WeighReply:
    """Reply with the masked sensitivities of the sample's rows; 0 of those elsewhere.

    What was kept for it is forgotten: the next sample of a run is measured anew.
    """
    if request.summed > MOST_PARTS:
        raise SiteError(
            f"malformed request: 'summed' is {request.summed}; at most {MOST_PARTS}"
        )
    secret = site.hasher().purpose(MASKS).secret
    # all parts are asked in one round, and a round is answered once
    context = f"round {site.round.number}".encode()
    parts: dict[int, WeighedPart] = {}
    noted: list[Release] = []
    for number, body in site.each(request.parts):
        scores = _kept(site, _drawn(number), "drawn").arrays["scores"]
        if body.place >= request.summed:
            raise SiteError(
                f"malformed request: 'place' is {body.place}, of {request.summed} parts"
            )
        own = _own_scores(body.rows, scores)
        masks = pair_masks(secret, body.place, request.summed, len(own), context)
        fixed = _made(to_fixed, own, request.joined_rows)
        parts[number] = WeighedPart(fixed + masks)
        noted.append(
            ledger_entries.weighed(Shard.of(site, number, site.source(number)))
        )
    for number in parts:
        site.round.forget(_measured(number), _drawn(number))
    _keep(site, {}, noted)
    return WeighReply(parts)


def _keep(site: Site, kept: Mapping[str, Entry], noted: list[Release]) -> None:
    """Keep what the next round needs, and note what leaves."""
    for name, entry in kept.items():
        site.store.save(name, entry)
    site.ledger.note(site.store.run, noted)


def _own_scores(rows: AnyArray, scores: FloatArray) -> FloatArray:
    """Return the scores (k,) of rows (k,); 0 where a row is -1, another part's."""
    if rows.size and rows.max() >= len(scores):
        raise SiteError(
            "malformed request: array 'rows' must hold numbers from -1 to "
            f"{len(scores) - 1}"
        )
    if len(rows) > MOST_ROWS:
        raise SiteError(
            f"malformed request: array 'rows' has {len(rows)} rows; a sample has at "
            f"most {MOST_ROWS}"
        )
    own: FloatArray = np.append(scores, 0.0)[rows]
    return own


def _made(make: Callable[..., Any], *given: Any) -> AnyArray:
    """Return what is made of numbers, some of which the server has chosen.

    Raises:
        SiteError: they do not allow it.
    """
    try:
        made: AnyArray = make(*given)
    except ValueError as error:
        raise SiteError(f"malformed request: {error}") from None
    return made


def _kept(site: Site, name: str, what: str) -> Entry:
    if not site.store.has(name):
        raise SiteError(
            f"malformed request: no rows have been {what} at this point of the run"
        )
    return site.store.load(name)


def _measured(number: int) -> str:
    return f"measured-{number}"


def _drawn(number: int) -> str:
    return f"drawn-{number}"
