"""A site in one run: its shards, its entries of them, and the round in progress.

A request may be carried out again: because the process was killed before it was
answered, or because the site has lost its state and is sent all rounds anew. Then noise
must not be drawn a second time, as two draws tell more than one, and not be paid for a
second time either. So both follow from a key of the run that the site keeps to itself
and from the run's *history*: the rounds up to this one, with the digests of their
requests, and the rows that were read. The same history has the same noise, and one
payment; any other one has other noise, and is paid for.
"""

import hashlib
import hmac
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
from flwr.app import Context

from client_apps.data.features import KeptFeatures, place, release, rows_of
from client_apps.data.ledger import Budget, RoundLedger, open_ledger
from client_apps.data.run_store import CommittedRound, Entry, SiteStore
from client_apps.operator.participant import FixedPart, Outgoing, Part, State
from tp_flower.arrays import AnyArray, FloatArray
from tp_flower.errors import SiteError, TPFlowerError
from tp_flower.keyed_hash import KEY_BYTES, KeyedHasher
from tp_flower.learning.models.local_model import Features
from tp_flower.node_config import IN_MEMORY, TABLES, cache_limit, site_id, state_dir
from tp_flower.privacy.mechanisms import Reservation, Spend
from tp_flower.privacy.plan import MODEL, PartPlan
from tp_flower.protocol.messages import NO_RUN
from tp_flower.protocol.packet import ArrayKey, Parcel
from tp_flower.randomness import NoiseSource
from tp_flower.sources.entries import MEMORY_PREFIX

if TYPE_CHECKING:
    from client_apps.data.tables import SiteTables
    from tp_flower.extraction.extracted import ExtractedShard
    from tp_flower.sources.shards import ShardSource


NO_HISTORY: Final = ""
_ID_DIGITS: Final = 32


class RoundKeys:
    """The noise of a round, and the name of its payments.

    ``key`` returns the site's key of the run; called if there is something to draw or
    to pay.

    >>> first, again = (RoundKeys(lambda: b"key", "a") for _ in range(2))
    >>> other = RoundKeys(lambda: b"key", "b")
    >>> first.payment == again.payment, first.payment == other.payment
    (True, False)
    >>> bool(first.noise.uniform(1) == again.noise.uniform(1))
    True
    """

    def __init__(self, key: Callable[[], bytes], history: str) -> None:
        self._key, self._history = key, history
        self.noise = NoiseSource(lambda: self._derived(b"noise"))

    @property
    def payment(self) -> str:
        """The name of the round's payments."""
        return self._derived(b"payment").hex()[:_ID_DIGITS]

    def _derived(self, purpose: bytes) -> bytes:
        text = purpose + b" " + self._history.encode()
        return hmac.digest(self._key(), text, hashlib.sha256)


class Round:
    """A round in progress; nothing of it is kept before it is committed.

    Attributes:
        digest: of its request.
        arrays: the state by (part, name), as it is now.
        obsolete: the names of entries that are forgotten with the commit.
        is_over: whether all of the run is.
    """

    def __init__(
        self,
        last: CommittedRound | None,
        key: Callable[[], bytes],
        number: int,
        digest: str,
    ) -> None:
        self.number, self.digest = number, digest
        before = NO_HISTORY if last is None else last.history
        self._history = later(before, number, digest)
        self.arrays: dict[ArrayKey, AnyArray] = {} if last is None else {**last.arrays}
        self.keys = RoundKeys(key, self._history)
        self.obsolete: list[str] = []
        self.is_over = False

    def change(self, states: Mapping[int, State]) -> None:
        """Change the model and the other vectors of parts, by part number."""
        for number, (model, vectors) in states.items():
            self.arrays[number, MODEL] = model.parameters
            for name, vector in vectors.items():
                self.arrays[number, name] = vector

    def learn(self, rows: str) -> None:
        """Add the rows that were read, by an identifier of them, to the history."""
        self._history = later(self._history, rows)

    def forget(self, *entries: str) -> None:
        """Forget entries once the round is committed."""
        self.obsolete += entries

    def end_run(self) -> None:
        """Forget all of the run once the round is committed."""
        self.arrays.clear()
        self.is_over = True

    def committed(self) -> CommittedRound:
        """Return the round as it is committed."""
        return CommittedRound(
            self.number, self.digest, self._history, self.arrays, self.is_over
        )


def later(history: str, *facts: object) -> str:
    """Return a history with more facts, of plain JSON types."""
    return hashlib.sha256(json.dumps([history, *facts]).encode()).hexdigest()


Item = TypeVar("Item")

SECRET = "secret"
REQUEST = "request"
NOISE = "noise"


class Site:
    """One site's view of one run, for the length of one message.

    In deployment every message starts a process. What reads tables, parses queries or
    writes models is imported by the messages that do.

    Attributes:
        context: Flower's; nothing is kept in its state.
        run: the run's name, which has been checked.
        uses: of covered releases, that leave with this message.
    """

    def __init__(self, context: Context, run: str = NO_RUN) -> None:
        self.context, self.run = context, run
        self._root = root = state_dir(context.node_config)
        name = site_id(context.node_config, context.node_id)
        self.store = SiteStore(root, run, name, is_durable=not self.is_simulated)
        limit = cache_limit(context.node_config)
        self.features = KeptFeatures(root, limit, self.store)
        self.uses: list[Spend] = []
        self._round: Round | None = None

    @property
    def current_part(self) -> int | None:
        """The part that is being worked on, which an error is about; None between."""
        return self.store.changes.part

    @current_part.setter
    def current_part(self, number: int | None) -> None:
        self.store.changes.part = number

    @cached_property
    def tables(self) -> "SiteTables":
        """The rows of the run's parts."""
        from client_apps.data.tables import SiteTables

        return SiteTables(self.features, is_simulated=self.is_simulated)

    @property
    def state_folder(self) -> Path | None:
        """The folder of what outlives a run; None where nothing does."""
        return None if self._root == IN_MEMORY else Path(self._root)

    def shards(self) -> tuple["ShardSource", ...]:
        """Return the shards that this site hosts."""
        from tp_flower.sources.shards import hosted_shards

        return hosted_shards(self.context.node_config, self.context.run_config)

    @cached_property
    def ledger(self) -> RoundLedger:
        """The ledger of the site, over all its runs, as the round writes it."""
        return RoundLedger(open_ledger(self._root), self.store.changes)

    @property
    def noise(self) -> NoiseSource:
        """The noise of what leaves with this message."""
        return self.round.keys.noise

    @property
    def run_number(self) -> int:
        """The run's name as a number."""
        return int(self.run, 16)

    def bind(self, number: int, position: int, fragment: Mapping[str, Any]) -> None:
        """Keep which of the site's shards a part of the run is, and what it runs."""
        meta = {"position": position, "fragment": fragment}
        self.store.save(f"source-{number}", Entry({}, meta))

    def source(self, number: int) -> "ShardSource":
        """Return the shard that a part of the run is; SiteError if it is none."""
        return self.shards()[int(self._bound(number)["position"])]

    def fragment(self, number: int) -> Mapping[str, Any]:
        """Return the fragment of a part, as JSON; SiteError if it is not of the run."""
        fragment: Mapping[str, Any] = self._bound(number)["fragment"]
        return fragment

    def _bound(self, number: int) -> Mapping[str, Any]:
        self._check_part(f"source-{number}", number)
        return self.store.load(f"source-{number}").meta

    def _check_part(self, name: str, number: int) -> None:
        """Refuse what the server asks of a part before its rows were extracted."""
        if not self.store.has(name):
            raise SiteError(
                f"malformed request: part {number} is none of this run at this site, "
                "or it is not at this point of the run"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether the data are the run's or this process's, not those of a real site.

        A real site has a tables file of its own.
        """
        tables = str(self.context.node_config.get(TABLES, ""))
        return not tables or tables.startswith(MEMORY_PREFIX)

    def without_places(self, text: str) -> str:
        """Return an error's text as the server may know it; the site's log has it all.

        Paths and addresses of a real site are nobody else's business.
        """
        if self.is_simulated:
            return text
        tables = str(self.context.node_config[TABLES])
        try:
            sources = self.shards()
        except TPFlowerError:
            sources = ()
        for source in sources:
            text = source.without_place(text)
        for path in (str(Path(tables).expanduser()), tables):
            text = text.replace(path, "of the site")
        return text.replace(str(self._root), "<state-dir>")

    def keep_secret(self, secret: bytes, request: str) -> None:
        """Keep what the sites of the run share, for the request that brought it."""
        arrays = {SECRET: np.frombuffer(secret, np.uint8)}
        self.store.save(SECRET, Entry(arrays, {REQUEST: request}))

    @property
    def secret_of(self) -> str | None:
        """The digest of the request that the run's secret came with; None for none."""
        if not self.store.has(SECRET):
            return None
        return str(self.store.load(SECRET).meta[REQUEST])

    def hasher(self) -> KeyedHasher:
        """Return the keyed hash that the sites of the run share."""
        return KeyedHasher(self.store.load(SECRET).arrays[SECRET].tobytes())

    def join_hasher(self, group: str) -> KeyedHasher:
        """Return the keyed hash of the join keys of one group.

        Keys of one group are compared across the run's tables; those of two groups
        share nothing. The server names the groups, as it does the joins: one that names
        two columns of a request alike learns which of their values are equal.
        """
        return self.hasher().purpose(f"join keys {group}")

    def extracted(self, number: int) -> "ExtractedShard":
        """Return the rows of a part that were extracted in this run.

        Raises:
            SiteError: none were, or its features have replaced them.
        """
        self._check_part(rows_of(number), number)
        return self.tables.extracted(number)

    def each(self, bodies: Mapping[int, Item]) -> Iterator[tuple[int, Item]]:
        """Yield the body of each part, by number; errors are about that part."""
        for number, body in bodies.items():
            self.current_part = number
            yield number, body
        self.current_part = None

    def save_part(self, number: int, entry: Entry) -> None:
        """Keep what never changes of a part in training."""
        self.store.save(f"part-{number}", self.features.without(number, entry))

    def parts(self) -> Iterator[Part]:
        """Yield the parts in training, with the current state."""
        if not self.round.arrays:
            raise SiteError(
                "malformed request: no model has been prepared in this run at this site"
            )
        vectors: dict[int, dict[str, FloatArray]] = {}
        for (number, name), array in self.round.arrays.items():
            vectors.setdefault(number, {})[name] = np.array(array)
        for number in sorted(vectors):
            self.current_part = number
            fixed = self._fixed(number)
            outgoing = self.outgoing(number, fixed.plan)
            yield fixed.part(number, vectors[number], outgoing)
        self.current_part = None

    def _fixed(self, number: int) -> FixedPart:
        """Return what never changes of a part; a process reads it once."""
        entry, name = self.store.load(f"part-{number}"), f"fixed-{number}"
        features = self.place(number, self.features.added_to(entry))
        cached = self.store.recall(name)
        fixed = None if cached is None else cached.meta[name]
        if fixed is None or not fixed.is_of(entry, features):
            fixed = FixedPart.read(entry, features)
            self.store.remember(name, Entry({}, {name: fixed}))
        return cast(FixedPart, fixed)

    def place(self, number: int, entry: Entry) -> Features:
        """Return a part's features where its model is computed."""
        features, meta = entry.arrays["features"], entry.meta
        kind = meta["model"]["kind"]
        return place(self.store, number, features, meta["device"], kind)

    def outgoing(self, number: int, plan: PartPlan) -> Outgoing:
        """Return how a part's arrays leave with this message, by their plan."""
        return Outgoing(number, plan, self.noise, self.uses)

    def reserve(
        self, planned: Sequence[Reservation], budgets: Mapping[str, Budget]
    ) -> None:
        """Reserve planned releases; too small a budget refuses the round's commit."""
        if planned:
            payment = self.round.keys.payment
            self.ledger.reserve(self.store.run, planned, budgets, payment)

    def pay(self) -> None:
        """Write the uses of this message to the ledger, with the round's commit.

        A use beyond the reservation refuses the round: nothing leaves.
        """
        if self.uses:
            self.ledger.spend(self.store.run, self.uses.copy(), self.round.keys.payment)
            self.uses.clear()

    def save_state(self, states: Mapping[int, State]) -> None:
        """Change the model and the other vectors of parts, by part number.

        Nobody sees it before the round is committed.
        """
        self.round.change(states)

    def start_state(self, states: Mapping[int, State]) -> None:
        """Set the first state of a run, instead of all there was before."""
        self.round.arrays.clear()
        self.round.change(states)

    def transaction(self) -> AbstractContextManager[None]:
        """Write all changes at the end; if that raises SiteError, there are none."""
        return self.store.together(self.features.make_room)

    def begin(self, number: int, digest: str, last: CommittedRound | None) -> None:
        """Begin a round, after the committed one; ``digest`` is of its request."""
        self._round = Round(last, self._noise_key, number, digest)

    def commit(self, reply: Parcel) -> None:
        """Have the round be the committed one, with the transaction."""
        for name in self.round.obsolete:
            self.store.drop(name)
        self.store.commit(self.round.committed(), reply)

    def settle(self) -> None:
        """Forget what a run that is over has left; again, if it was begun."""
        release(self.store)
        self.features.release()
        self.store.end()

    @property
    def round(self) -> Round:
        """The round in progress; between two of them, one that is never committed."""
        if self._round is None:
            last = self.store.last()
            self._round = Round(last, self._noise_key, 0, "")
        return self._round

    def _noise_key(self) -> bytes:
        """Return the key of the run's noise; made when it is asked for first."""
        if not self.store.has(NOISE):
            key = np.frombuffer(token_bytes(KEY_BYTES), np.uint8)
            self.store.save(NOISE, Entry({NOISE: key}, {}))
        return self.store.load(NOISE).arrays[NOISE].tobytes()
