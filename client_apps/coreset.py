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

from client_apps import costs
from client_apps.costs import Shard
from client_apps.guard import Guard
from client_apps.orders import FloatArray, Order, header_of, part_orders, whole_numbers
from client_apps.sensitivities import (
    MOST_JOINED,
    Measured,
    measured_clusters,
    measured_columns,
    scored,
    trained_rows,
)
from client_apps.site import Site
from client_apps.store import Entry
from tp_flower.coresets.masks import MOST_PARTS, pair_masks, to_fixed
from tp_flower.coresets.sampling import draw_rows
from tp_flower.coresets.sensitivity import CLUSTERS, SENSITIVITIES
from tp_flower.errors import SiteError
from tp_flower.privacy.policy import LABELS, MODELS, SCORES
from tp_flower.privacy.releases import Release
from tp_flower.protocol import AnyArray, ArrayKey, Packet
from tp_flower.settings import MOST_CLUSTERS, MOST_ROWS, PrivacySettings

MASKS: Final = "coreset masks"
_IN_CLEAR: Final = PrivacySettings()

Arrays = dict[ArrayKey, AnyArray]


def measure(site: Site, request: Packet) -> Packet:
    """Reply with what the sensitivities of each part's trained rows sum to.

    Of a table in several shards with what it takes to know that: a shard's Gram matrix,
    or the cost of its clusters.
    """
    parts: list[dict[str, Any]] = []
    arrays: Arrays = {}
    kept: dict[str, Entry] = {}
    noted: list[Release] = []
    for number, order in part_orders(site, request):
        is_shard = order.flag("is-shard")
        found = _measure_part(site, number, order, request)
        kept[_measured(number)] = found.kept
        sent = found.of_shard if is_shard else found.of_table
        parts.append({"id": number, **sent.facts})
        arrays.update({(number, name): own for name, own in sent.arrays.items()})
        shard = Shard.of(site, number, site.source(number))
        noted.append(costs.measured(shard, is_shard=is_shard))
    return _answer(site, Packet({"parts": parts}, arrays), kept, noted)


def _measure_part(site: Site, number: int, order: Order, request: Packet) -> Measured:
    header, guard, source = header_of(request), Guard(site), site.source(number)
    table = site.extracted(number).table
    kinds = [SCORES]
    kinds += [MODELS] if order.flag("is-shard") else []
    kinds += [LABELS] if order.has("label") else []
    guard.check_plan(source, _IN_CLEAR, kinds)
    joined_rows = header.count("joined-rows", low=1, most=MOST_JOINED)
    rows = trained_rows(site, number, request, joined_rows)
    guard.check_rows(source, len(rows.own), f"the sensitivities of table {table!r}")
    if header.text("sensitivities", SENSITIVITIES) == CLUSTERS:
        clusters = header.count("clusters", low=1, most=MOST_CLUSTERS)
        return measured_clusters(site, number, order, rows, clusters)
    return measured_columns(site, number, order, rows)


def draw(site: Site, request: Packet) -> Packet:
    """Reply with rows drawn in proportion to what their joined rows are worth."""
    parts: list[dict[str, Any]] = []
    arrays: Arrays = {}
    kept: dict[str, Entry] = {}
    noted: list[Release] = []
    for number, order in part_orders(site, request):
        measured = _kept(site, _measured(number), "measured")
        scale = order.number("scale", 1.0, above_zero=True)
        count = order.count("count", most=MOST_ROWS)
        scores = scale * scored(site, number, measured, order, request)
        mass = measured.arrays["masses"] * scores
        drawn = _made(draw_rows, mass, count, site.noise.generator())
        arrays[number, "drawn"] = drawn.astype(np.uint32)
        kept[_drawn(number)] = Entry({"scores": scores}, {})
        parts.append({"id": number})
        noted.append(costs.drawn(Shard.of(site, number, site.source(number))))
    return _answer(site, Packet({"parts": parts}, arrays), kept, noted)


def weigh(site: Site, request: Packet) -> Packet:
    """Reply with the masked sensitivities of the sample's rows; 0 of those elsewhere.

    What was kept for it is forgotten: the next sample of a run is measured anew.
    """
    header = header_of(request)
    joined_rows = header.count("joined-rows", low=1, most=MOST_JOINED)
    summed = header.count("summed", low=1, most=MOST_PARTS)
    secret = site.hasher().purpose(MASKS).secret
    # all parts are asked in one round, and a round is answered once
    context = f"round {site.round.number}".encode()
    parts: list[dict[str, Any]] = []
    arrays: Arrays = {}
    noted: list[Release] = []
    for number, order in part_orders(site, request):
        scores = _kept(site, _drawn(number), "drawn").arrays["scores"]
        place = order.count("place", most=summed - 1)
        own = _own_scores(request.array(number, "rows"), scores)
        masks = pair_masks(secret, place, summed, len(own), context)
        arrays[number, "masked"] = _made(to_fixed, own, joined_rows) + masks
        parts.append({"id": number})
        noted.append(costs.weighed(Shard.of(site, number, site.source(number))))
    for part in parts:
        site.round.forget(_measured(part["id"]), _drawn(part["id"]))
    return _answer(site, Packet({"parts": parts}, arrays), {}, noted)


def _answer(
    site: Site, reply: Packet, kept: Mapping[str, Entry], noted: list[Release]
) -> Packet:
    """Keep what the next round needs, and note what leaves."""
    for name, entry in kept.items():
        site.store.save(name, entry)
    site.ledger.note(site.store.run, noted)
    return reply


def _own_scores(rows: AnyArray, scores: FloatArray) -> FloatArray:
    """Return the scores (k,) of rows (k,); 0 where a row is -1, another part's."""
    wanted = whole_numbers(rows, "rows", low=-1, high=len(scores) - 1)
    if len(wanted) > MOST_ROWS:
        raise SiteError(
            f"malformed request: array 'rows' has {len(wanted)} rows; a sample has at "
            f"most {MOST_ROWS}"
        )
    own: FloatArray = np.append(scores, 0.0)[wanted]
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
