"""What a run tells its server: every masked, sealed and clear number that leaves, by
its row.

``watch`` looks into the sites of this process while they make their masks. From what it
has seen follows, by linear algebra, which sums the server can make without a mask:
those of an honest run are the joined rows, and nothing else.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from client_apps.handlers import inference
from client_apps.methods import cg
from client_apps.methods.coreset import drawing
from client_apps.operator.participant import Participant
from client_apps.rounds.site import SECRET, Site
from client_apps.training import prepare
from tp_flower.methods.moments.exchange import PaddedShard, Pair
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
        products: by context, the (place, tables, part or table) of numbers under
            pairwise masks.
        shares: (key, shards, name, shard) of sealed sums, and their numbers; key b"" in
            the clear.
        sealed: (key, document, part) of what shards seal for each other.
        keys: by key, the nodes that have it.
        rows, scored: by part, the positions of its rows in training, and in prediction.
        pads: by pass and block of moments, what all shards have added to it.
        multiplicity: by pass, table and shard, how often moments count each row.
    """

    words: defaultdict[str, list[Word]] = field(
        default_factory=lambda: defaultdict(list)
    )
    products: defaultdict[str, list[tuple[int, int, bytes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    shares: list[tuple[tuple[Any, ...], bytes]] = field(default_factory=list)
    sealed: set[tuple[bytes, str, int]] = field(default_factory=set)
    keys: defaultdict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    is_paused: bool = False
    rows: dict[int, np.ndarray] = field(default_factory=dict)
    scored: dict[int, np.ndarray] = field(default_factory=dict)
    pads: defaultdict[tuple[str, Pair], list[np.ndarray]] = field(
        default_factory=lambda: defaultdict(list)
    )
    multiplicity: dict[tuple[str, str, int], bytes] = field(default_factory=dict)

    def learn_keys(self, site: Site) -> None:
        """Note which keys a site has, once the run's secrets are distributed."""
        if site.store.has(SECRET):
            for key in site.store.load(SECRET).arrays.values():
                self.keys[key.tobytes()].add(site.context.node_id)

    def note_scores(
        self, part: int, positions: Any, masks: Any, scores: Any, index: Any
    ) -> Any:
        """Note scores of rows at their positions in the table."""
        if self.is_paused:
            return
        name, at = index
        own = []
        for mask in () if masks is None else masks.joins:
            codes = mask.codes[at]
            sign = 1 if mask.is_positive else -1
            own.append((mask.key, mask.tags, codes, sign))
        for k, position in enumerate(positions):
            hidden = tuple(
                ((key, tags[codes[k]].tobytes(), name), sign)
                for key, tags, codes, sign in own
                if codes[k] >= 0
            )
            word = Word((part, int(position)), float(scores[k, 0]), hidden)
            self.words["" if masks is None else name].append(word)


_PREPARE = prepare._make_participant
_SCORE = inference._score_part
_ENCODE = Participant._scores_to_send
_SHARE = ShardUnion.share
_SEAL = ShardSeal.seal
_PAD = PaddedShard._padded_block


class _Watcher:
    """Notes what sites make, in place of the functions that make it."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self._parts: list[int] = []

    def in_part(self, function):
        """Know which part is being worked on."""

        def call(site, number, *arguments):
            self._parts.append(number)
            try:
                return function(site, number, *arguments)
            finally:
                self._parts.pop()

        return call

    def masks_of(self, function, rows):
        """Note where the rows that get masks are in their table."""

        def call(masking, masked, keys):
            if not self.told.is_paused:
                rows[self._parts[-1]] = np.asarray(masked.rows)
            return function(masking, masked, keys)

        return call

    def encoded(self, part, scores, masks, rows, name):
        """Note scores in training."""
        if not self.told.is_paused:
            number = 0 if masks is None else part.progress.scores_number
            base = np.arange(len(self.told.rows[part.number]))
            if masks is not None and masks is not part.data.masks:
                base = part.data.batch_rows
            positions = self.told.rows[part.number][base[rows]]
            self.told.note_scores(
                part.number, positions, masks, scores, (f"{number} {name}", rows)
            )
        return _ENCODE(part, scores, masks, rows, name)

    def sent(self, function):
        """Note scores of a saved model."""

        def call(scores, masks, rows, name):
            part = self._parts[-1]
            if not self.told.is_paused:
                positions = self.told.scored[part][rows]
                self.told.note_scores(part, positions, masks, scores, (name, rows))
            return function(scores, masks, rows, name)

        return call

    def pairs(self, function, purpose):
        """Note numbers under pairwise masks."""

        def call(secret, place, size, count, context):
            if not self.told.is_paused:
                key = f"{purpose} {context.decode()}"
                self.told.products[key].append((place, size, secret))
            return function(secret, place, size, count, context)

        return call

    def share(self, union, numbers, name, unit=1.0):
        """Note a share of a sum."""
        if not self.told.is_paused:
            place = union.key, union.shards, name, union.shard
            self.told.shares.append((place, np.asarray(numbers).tobytes()))
        return _SHARE(union, numbers, name, unit)

    def block(self, shard, pair):
        """Note the pad of a block of moments."""
        block = _PAD(shard, pair)
        if not self.told.is_paused:
            pad = block - shard._block(*pair)
            self.told.pads[shard.pass_name, pair].append(pad)
            place = shard.pass_name, shard.table, shard.masks.shard
            self.told.multiplicity[place] = shard.rows.multiplicity.tobytes()
        return block

    def seal(self, seal, text, document, shard, request):
        """Note a document that shards seal for each other."""
        if not self.told.is_paused:
            self.told.sealed.add((seal.key, document, shard))
        return _SEAL(seal, text, document, shard, request)


def _function(method):
    """Return a function: a class binds it to its objects, as it does not a bound
    method.
    """

    def call(*given):
        return method(*given)

    return call


@contextmanager
def watch() -> Iterator[Told]:
    """Note what leaves the sites of this process in the block."""
    told = Told()
    watcher = _Watcher(told)
    places = (
        (prepare, "_make_participant", watcher.in_part(_PREPARE)),
        (inference, "_score_part", watcher.in_part(_SCORE)),
        (prepare, "score_masks", watcher.masks_of(prepare.score_masks, told.rows)),
        (
            inference,
            "score_masks",
            watcher.masks_of(inference.score_masks, told.scored),
        ),
        (inference, "sent_scores", watcher.sent(inference.sent_scores)),
        (Participant, "_scores_to_send", _function(watcher.encoded)),
        (cg, "fixed_point_masks", watcher.pairs(cg.fixed_point_masks, "products")),
        (
            drawing,
            "fixed_point_masks",
            watcher.pairs(drawing.fixed_point_masks, "sensitivities"),
        ),
        (ShardUnion, "share", _function(watcher.share)),
        (ShardSeal, "seal", _function(watcher.seal)),
        (PaddedShard, "_padded_block", _function(watcher.block)),
    )
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(*place))
        yield told


def sums_without_masks(words: list[Word]) -> np.ndarray:
    """Return a basis of the sums of words (k, words) in which all masks cancel."""
    masks = {
        mask: place
        for place, mask in enumerate({m: 0 for w in words for m, _ in w.masks})
    }
    matrix = np.zeros((len(words), len(masks)))
    for k, word in enumerate(words):
        for mask, sign in word.masks:
            matrix[k, masks[mask]] += sign
    return _kernel(matrix.T)


def foreign(words: list[Word], joined_rows: set[frozenset[Row]]) -> int:
    """Return how many independent sums of words have no mask, and are none of joined
    rows.

    A row twice under one name with another score is a word of its own, that no joined
    row has.
    """
    words = list({(word.row, word.value, word.masks): word for word in words}.values())
    columns: dict[object, int] = {}
    for word in words:
        first = word.row if word.row not in columns else (word.row, word.value)
        columns.setdefault(first, len(columns))
    own = len(columns)
    for row in sorted({row for rows in joined_rows for row in rows}):
        columns.setdefault(row, len(columns))
    bare = np.zeros((0, len(columns)))
    if own:
        kernel = sums_without_masks(words)
        bare = np.hstack([kernel, np.zeros((len(kernel), len(columns) - own))])
    told = np.zeros((len(joined_rows), len(columns)))
    for place, rows in enumerate(joined_rows):
        told[place, [columns[row] for row in rows]] = 1.0
    return _rank(np.vstack([bare, told])) - _rank(told)


def _kernel(matrix: np.ndarray) -> np.ndarray:
    if not matrix.size:
        return np.eye(matrix.shape[1])
    _, singular, right = np.linalg.svd(matrix)
    rank = int((singular > 1e-9 * max(singular.max(initial=0.0), 1.0)).sum())
    return right[rank:]


def _rank(matrix: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(matrix, tol=1e-7)) if matrix.size else 0
