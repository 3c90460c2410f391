"""A site in one run: the shards it hosts, what it keeps of them, and their state."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from flwr.app import Context

from client_apps.data.features import KeptFeatures, place, release, rows_of
from client_apps.data.ledger import Budget, RoundLedger, open_ledger
from client_apps.data.run_store import CommittedRound, Entry, SiteStore
from client_apps.operator.participant import FixedPart, Outgoing, Part, State
from client_apps.rounds.round import Round
from tp_flower.arrays import FloatArray
from tp_flower.errors import SiteError, TPFlowerError
from tp_flower.keyed_hash import KEY_BYTES, KeyedHasher
from tp_flower.learning.models.local_model import Features
from tp_flower.node_config import IN_MEMORY, TABLES, cache_limit, site_id, state_dir
from tp_flower.privacy.mechanisms import Planned, Use
from tp_flower.privacy.plan import PartPlan
from tp_flower.protocol import NO_RUN, Parcel
from tp_flower.randomness import NoiseSource
from tp_flower.sources.entries import MEMORY_PREFIX

if TYPE_CHECKING:
    from client_apps.data.tables import SiteTables
    from tp_flower.extraction.extracted import ExtractedShard
    from tp_flower.sources.shards import ShardSource

Item = TypeVar("Item")

SECRET = "secret"
REQUEST = "request"
NOISE = "noise"
POSITION = "position"
FRAGMENT = "fragment"
FIXED = "fixed"


class Site:
    """One site's view of one run, for the length of one message.

    Args:
        context: Flower's; nothing is kept in its state.
        run: the run's name, which has been checked.

    In deployment every message starts a process. What reads tables, parses queries or
    writes models is imported by the messages that do.

    Attributes:
        context: as given.
        run: as given.
        store: what is kept of the run.
        features: of the run's parts, in the site's cache.
        uses: of what is covered, that leave with this message.
    """

    def __init__(self, context: Context, run: str = NO_RUN) -> None:
        self.context, self.run = context, run
        root = state_dir(context.node_config)
        own = site_id(context.node_config, context.node_id)
        self.store = SiteStore(root, run, own, is_durable=not self.is_simulated)
        self._root, limit = root, cache_limit(context.node_config)
        self.features = KeptFeatures(root, limit, self.store)
        self.uses: list[Use] = []
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
        """Where the site keeps what outlives a run; None where nothing does."""
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
        """For what leaves."""
        return self.round.keys.noise

    @property
    def run_number(self) -> int:
        """The run's name as a number."""
        return int(self.run, 16)

    def bind(self, number: int, position: int, fragment: Mapping[str, Any]) -> None:
        """Keep which of the site's shards a part of the run is, and what it runs."""
        meta = {POSITION: position, FRAGMENT: fragment}
        self.store.save(_source_name(number), Entry({}, meta))

    def source(self, number: int) -> "ShardSource":
        """Return the shard that a part of the run is.

        Raises:
            SiteError: the part is none of this run.
        """
        self._check_known(_source_name(number), number)
        kept = self.store.load(_source_name(number))
        return self.shards()[int(kept.meta[POSITION])]

    def _check_known(self, name: str, number: int) -> None:
        """Refuse what the server asks of a part before its rows were extracted."""
        if not self.store.has(name):
            raise SiteError(
                f"malformed request: part {number} is none of this run at this site, "
                "or it is not at this point of the run"
            )

    def fragment(self, number: int) -> Mapping[str, Any]:
        """Return the part of the query that a part of the run is, as JSON.

        Raises:
            SiteError: the part is none of this run.
        """
        self._check_known(_source_name(number), number)
        fragment: Mapping[str, Any] = self.store.load(_source_name(number)).meta[
            FRAGMENT
        ]
        return fragment

    @property
    def is_simulated(self) -> bool:
        """Whether the data are the run's or this process's, not those of a real site.

        A real site has a tables file of its own.
        """
        own = str(self.context.node_config.get(TABLES, ""))
        return not own or own.startswith(MEMORY_PREFIX)

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
        """Return the keyed hash that the sites of the run share.

        Raises:
            SiteError: the site has not been given the run's secret.
        """
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
            LostStateError: they are gone.
        """
        self._check_known(rows_of(number), number)
        return self.tables.extracted(number)

    def each(self, bodies: Mapping[int, Item]) -> Iterator[tuple[int, Item]]:
        """Yield what is said of each part, by number; errors are about that part."""
        for number, body in bodies.items():
            self.current_part = number
            yield number, body
        self.current_part = None

    def save_part(self, number: int, entry: Entry) -> None:
        """Keep what never changes of a part in training."""
        self.store.save(f"part-{number}", self.features.without(number, entry))

    def parts(self) -> Iterator[Part]:
        """Yield the parts in training, with the current state.

        Raises:
            SiteError: the site has no models in this run.
        """
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
        kept = self.store.load(f"part-{number}")
        features = self.place(number, self.features.added_to(kept))
        known = self.store.recall(_fixed_name(number))
        fixed = None if known is None else known.meta[FIXED]
        if fixed is None or not fixed.is_of(kept, features):
            fixed = FixedPart.read(kept, features)
            self.store.remember(_fixed_name(number), Entry({}, {FIXED: fixed}))
        return cast(FixedPart, fixed)

    def place(self, number: int, entry: Entry) -> Features:
        """Return a part's features where its model is computed."""
        meta: Any = entry.meta
        features = entry.arrays["features"]
        return place(
            self.store, number, features, meta["device"], meta["model"]["kind"]
        )

    def outgoing(self, number: int, plan: PartPlan) -> Outgoing:
        """Return how a part's arrays leave with this message, by the plan of them."""
        return Outgoing(number, plan, self.noise, self.uses)

    def reserve(
        self, planned: Sequence[Planned], budgets: Mapping[str, Budget]
    ) -> None:
        """Set aside in the ledger what the run plans to release.

        A budget that does not suffice refuses the round when it is committed.
        """
        if planned:
            payment = self.round.keys.payment
            self.ledger.reserve(self.store.run, planned, budgets, payment)

    def pay(self) -> None:
        """Write what leaves with this message to the ledger, with the round's commit.

        What is beyond what the run may release refuses the round: nothing leaves.
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
        """Have the first state of a run, and nothing that there was before."""
        self.round.arrays.clear()
        self.round.change(states)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep all that is changed meanwhile, at once and at the end.

        Raises:
            SiteError: it cannot be written, or the ledger refuses it: then nothing has
                changed.
        """
        with self.store.together(self.features.make_room):
            yield

    def begin(self, number: int, digest: str, last: CommittedRound | None) -> None:
        """Begin a round.

        Args:
            number: of the round.
            digest: of its request.
            last: the committed round.
        """
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


def _source_name(number: int) -> str:
    return f"source-{number}"


def _fixed_name(number: int) -> str:
    return f"fixed-{number}"
