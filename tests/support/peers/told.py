"""What a run tells its server: every masked, sealed and clear number that leaves, by its row.

``watch`` looks into the sites of this process while they make their masks. From what it has seen
follows, by linear algebra, which sums the server can make without a mask: those of an honest run
are the joined rows, and nothing else.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from client_apps.handlers import conjugate_gradients, coreset, inference, prepare
from client_apps.operator.participant import Participant
from client_apps.rounds.site import Site
from tp_flower.privacy.sealed_sums import ShardUnion
from tp_flower.privacy.shard_seals import ShardSeal

Row = tuple[int, int]  # of a part, at a position in its table
Mask = tuple[bytes, bytes, str]  # the key, the tag, and the name of the scores


@dataclass
class Word:
    """One score that left: its row, its value, and its masks with their signs."""

    row: Row
    value: float
    masks: tuple[tuple[Mask, int], ...]


@dataclass
class Told:
    """All that left the sites of a run, as they made it.

    Attributes:
        words: by the name of the scores; those in the clear are named "".
        products: by context, the (place, tables, part or table) of numbers under pairwise masks.
        shares: (key, shards, name, shard) of sealed sums, and their numbers; key b"" in the clear.
        sealed: (key, document, part) of what shards seal for each other.
        keys: by key, the nodes that have it.
    """

    words: defaultdict[str, list[Word]] = field(default_factory=lambda: defaultdict(list))
    products: defaultdict[str, list[tuple[int, int, bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    shares: list[tuple[tuple[Any, ...], bytes]] = field(default_factory=list)
    sealed: set[tuple[bytes, str, int]] = field(default_factory=set)
    keys: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    groups: dict[bytes, str] = field(default_factory=dict)
    is_paused: bool = False
    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def learn_keys(self, sites: list[Site]) -> None:
        """Note which nodes have which keys, after a run's secrets are distributed."""
        for site in sites:
            if site.store.has("secret"):
                for group, key in site.store.load("secret").arrays.items():
                    self.keys[key.tobytes()].add(site.context.node_id)
                    self.groups[key.tobytes()] = group

    def note_scores(self, part: int, positions: Any, masks: Any, scores: Any, index: Any) -> Any:
        """Note scores of rows at their positions in the table."""
        if self.is_paused:
            return
        name, at = index
        own = []
        for mask in () if masks is None else masks.joins:
            codes, sign = mask.codes[at], 1 if mask.is_positive else -1
            own.append((mask.key, mask.tags, codes, sign))
        for k, position in enumerate(positions):
            hidden = tuple(
                ((key, tags[codes[k]].tobytes(), name), sign)
                for key, tags, codes, sign in own
                if codes[k] >= 0
            )
            word = Word((part, int(position)), float(scores[k, 0]), hidden)
            self.words["" if masks is None else name].append(word)


@contextmanager
def watch() -> Iterator[Told]:
    """Note what leaves the sites of this process in the block."""
    told = Told()
    current: list[int] = []
    originals = {
        "prepare": prepare._prepare_part,
        "score": inference._scored,
        "encode": Participant._encoded,
        "share": ShardUnion.share,
        "seal": ShardSeal.seal,
    }

    def in_part(name):
        def call(site, number, *arguments):
            current.append(number)
            try:
                return originals[name](site, number, *arguments)
            finally:
                current.pop()

        return call

    def masks_of(function):
        def call(masking, body, join_keys, rows, keys):
            if not told.is_paused:
                told.rows[current[-1]] = np.asarray(rows)
            return function(masking, body, join_keys, rows, keys)

        return call

    def encoded(part, scores, masks, rows, name):
        if told.is_paused:
            return originals["encode"](part, scores, masks, rows, name)
        number = 0 if masks is None else int(part.vectors["scores_number"][0])
        base = np.arange(len(told.rows[part.number]))
        if masks is not None and masks is not part.data.masks:
            base = part.data.batch_rows
        positions = told.rows[part.number][base[rows]]
        told.note_scores(part.number, positions, masks, scores, (f"{number} {name}", rows))
        return originals["encode"](part, scores, masks, rows, name)

    def sent(function):
        def call(scores, masks, rows, name):
            part = current[-1]
            if not told.is_paused:
                told.note_scores(part, told.rows[part][rows], masks, scores, (name, rows))
            return function(scores, masks, rows, name)

        return call

    def pairs(function, purpose):
        def call(secret, place, size, count, context):
            if not told.is_paused:
                told.products[f"{purpose} {context.decode()}"].append((place, size, secret))
            return function(secret, place, size, count, context)

        return call

    def share(union, numbers, name, unit=1.0):
        place = union.key, union.shards, name, union.shard
        if not told.is_paused:
            told.shares.append((place, np.asarray(numbers).tobytes()))
        return originals["share"](union, numbers, name, unit)

    def seal(own, text, document, shard, request):
        if not told.is_paused:
            told.sealed.add((own.key, document, shard))
        return originals["seal"](own, text, document, shard, request)

    with (
        patch.object(prepare, "_prepare_part", in_part("prepare")),
        patch.object(inference, "_scored", in_part("score")),
        patch.object(prepare, "score_masks", masks_of(prepare.score_masks)),
        patch.object(inference, "score_masks", masks_of(inference.score_masks)),
        patch.object(inference, "sent_scores", sent(inference.sent_scores)),
        patch.object(Participant, "_encoded", encoded),
        patch.object(
            conjugate_gradients, "pair_masks", pairs(conjugate_gradients.pair_masks, "products")
        ),
        patch.object(coreset, "pair_masks", pairs(coreset.pair_masks, "sensitivities")),
        patch.object(ShardUnion, "share", share),
        patch.object(ShardSeal, "seal", seal),
    ):
        yield told


def sums_without_masks(words: list[Word]) -> np.ndarray:
    """Return a basis of the sums of words (k, words) in which all masks cancel."""
    masks = {mask: place for place, mask in enumerate({m: 0 for w in words for m, _ in w.masks})}
    matrix = np.zeros((len(words), len(masks)))
    for k, word in enumerate(words):
        for mask, sign in word.masks:
            matrix[k, masks[mask]] += sign
    return _kernel(matrix.T)


def foreign(words: list[Word], joined_rows: set[frozenset[Row]]) -> int:
    """Return how many independent sums of words have no mask and are none of joined rows."""
    known = {word.row: place for place, word in enumerate(words)}
    if len(known) < len(words):
        # a row twice under one name: equal scores are the same word again
        words = list({(word.row, word.value, word.masks): word for word in words}.values())
        known = {word.row: place for place, word in enumerate(words)}
    bare = sums_without_masks(words)
    allowed = np.zeros((len(joined_rows), len(words)))
    for place, rows in enumerate(joined_rows):
        if rows <= known.keys():
            allowed[place, [known[row] for row in rows]] = 1.0
    return _rank(np.vstack([bare, allowed])) - _rank(allowed)


def _kernel(matrix: np.ndarray) -> np.ndarray:
    if not matrix.size:
        return np.eye(matrix.shape[1])
    _, singular, right = np.linalg.svd(matrix)
    rank = int((singular > 1e-9 * max(singular.max(initial=0.0), 1.0)).sum())
    return right[rank:]


def _rank(matrix: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(matrix, tol=1e-7)) if matrix.size else 0
