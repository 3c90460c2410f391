"""A site in one run: the shards it hosts, what it keeps of them, and their state."""

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from flwr.app import Context

from client_apps.kept_features import KeptFeatures
from client_apps.outgoing import Outgoing
from client_apps.part import MODEL, FixedPart, Part, State
from client_apps.placement import place, release
from client_apps.store import IN_MEMORY, Entry, SiteStore
from tp_flower.errors import SettingsError, SiteError, TPFlowerError
from tp_flower.learning.features import Features
from tp_flower.learning.losses import FloatArray
from tp_flower.privacy.keyed_hash import KeyedHasher
from tp_flower.privacy.ledger import FILE as LEDGER_FILE
from tp_flower.privacy.ledger import Ledger, open_ledger
from tp_flower.privacy.noise import NoiseSource
from tp_flower.privacy.plan import PartPlan
from tp_flower.privacy.releases import Use
from tp_flower.protocol import AnyArray, ArrayKey, Packet, pack, unpack
from tp_flower.randomness import Stream
from tp_flower.sources.memory_name import MEMORY_PREFIX
from tp_flower.wire import Precision, Rounding

if TYPE_CHECKING:
    from client_apps.tables import SiteTables
    from tp_flower.extraction.extracted import ExtractedShard
    from tp_flower.sources.shards import ShardSource

STATE_DIR = "state-dir"
CACHE_GB = "cache-gb"
DEFAULT_CACHE_GB = 20
SECRET = "secret"
POSITION = "position"
FRAGMENT = "fragment"
FIXED = "fixed"


class Site:
    """One node's view of one run, for the length of one message.

    In deployment every message starts a process. What reads tables, parses queries or
    writes models is imported by the messages that do.

    Attributes:
        context: Flower's.
        current_part: number of the part that is being worked on, which an error is
            about; None between parts.
        store: what is kept of the run.
        features: of the run's parts, in the site's cache.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.current_part: int | None = None
        root = state_dir(context.node_config)
        self.store = SiteStore(root, context.run_id, context.node_id)
        self.store.touch()
        self._root = root
        self.features = KeptFeatures(root, self._cache_limit(), self.store)
        self._uses: list[Use] = []
        self._read: Packet | None = None

    @cached_property
    def tables(self) -> "SiteTables":
        """The rows of the run's parts."""
        from client_apps.tables import SiteTables

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
    def ledger(self) -> Ledger:
        """The ledger of the site, over all its runs."""
        is_kept = self._root != IN_MEMORY
        return open_ledger(Path(self._root) / LEDGER_FILE if is_kept else None)

    @cached_property
    def noise(self) -> NoiseSource:
        """For what leaves."""
        return NoiseSource()

    def bind(self, number: int, position: int, fragment: Mapping[str, Any]) -> None:
        """Keep which of the site's shards a part of the run is, and what it runs."""
        meta = {POSITION: position, FRAGMENT: fragment}
        self.store.save(f"source-{number}", Entry({}, meta))

    def source(self, number: int) -> "ShardSource":
        """Return the shard that a part of the run is.

        Raises:
            SiteError: the part is none of this run.
        """
        return self.shards()[int(self.store.load(f"source-{number}").meta[POSITION])]

    def fragment(self, number: int) -> Mapping[str, Any]:
        """Return the part of the query that a part of the run is, as JSON.

        Raises:
            SiteError: the part is none of this run.
        """
        fragment: Mapping[str, Any] = self.store.load(f"source-{number}").meta[FRAGMENT]
        return fragment

    @property
    def is_simulated(self) -> bool:
        """Whether the data are the run's or this process's, not those of a real site.

        A real site has a tables file of its own.
        """
        own = str(self.context.node_config.get("tables", ""))
        return not own or own.startswith(MEMORY_PREFIX)

    def without_places(self, text: str) -> str:
        """Return an error's text as the server may know it; the site's log has it all.

        Paths and addresses of a real site are nobody else's business.
        """
        if self.is_simulated:
            return text
        tables = str(self.context.node_config["tables"])
        try:
            sources = self.shards()
        except TPFlowerError:
            sources = ()
        for source in sources:
            text = source.without_place(text)
        for path in (str(Path(tables).expanduser()), tables):
            text = text.replace(path, "of the site")
        return text.replace(str(self._root), "<state-dir>")

    def keep_secret(self, secret: bytes) -> None:
        """Keep what the sites of the run share."""
        self.store.save(SECRET, Entry({SECRET: np.frombuffer(secret, np.uint8)}, {}))

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

    def _cache_limit(self) -> int:
        """Bytes that the cache may take."""
        given = self.context.node_config.get(CACHE_GB, DEFAULT_CACHE_GB)
        try:
            limit = float(given)
        except (TypeError, ValueError):
            limit = -1.0
        if not 0 <= limit < float("inf"):
            raise SettingsError(
                f"node config {CACHE_GB} must be a number of gigabytes from 0 on, "
                f"not {given!r}"
            )
        return int(limit * 1e9)

    def extracted(self, number: int) -> "ExtractedShard":
        """Return the rows of a part that were extracted in this run."""
        return self.tables.extracted(number)

    def save_part(self, number: int, entry: Entry) -> None:
        """Keep what never changes of a part in training."""
        self.store.save(f"part-{number}", self.features.without(number, entry))

    def parts(self, draw: int = 0) -> Iterator[Part]:
        """Yield the parts in training, with the current state.

        Args:
            draw: tells the message's rounding from that of all others.

        Raises:
            SiteError: if the site has no state for this run.
        """
        state = self._state()
        vectors: dict[int, dict[str, FloatArray]] = {}
        for (number, name), array in state.wide_arrays().items():
            vectors.setdefault(number, {})[name] = np.array(array)
        for number in sorted(vectors):
            self.current_part = number
            fixed = self._fixed(number)
            outgoing = self.outgoing(number, fixed.plan, fixed.wire, draw)
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

    def outgoing(
        self, number: int, plan: PartPlan, wire: Mapping[str, Any], draw: int = 0
    ) -> Outgoing:
        """Return what decides how a part's arrays leave with this message.

        Args:
            number: of the part.
            plan: of its releases.
            wire: what the run says of arrays that travel: ``precision`` and ``seed``.
            draw: tells the message's rounding from that of all others.
        """
        precision, seed = Precision(wire["precision"]), wire["seed"]
        rounding = Rounding(precision, seed, Stream.ROUND_UP, draw, number)
        return Outgoing(number, plan, self.noise, rounding, self._uses)

    def pay(self) -> None:
        """Write what leaves with this message to the ledger, before it leaves.

        Raises:
            SiteError: it is beyond what the run may release, or the ledger cannot be
                written: then nothing may leave.
        """
        if self._uses:
            self.ledger.spend(self.store.run, self._uses)
            self._uses.clear()

    def save_state(self, states: Mapping[int, State]) -> None:
        """Keep the model and the other vectors of parts, by part number.

        The last thing an action does: an action that fails must leave the state alone.
        """
        self._write_state(self._state().wide_arrays(), states)

    def start_state(self, states: Mapping[int, State]) -> None:
        """Keep the first state of a run, and nothing that a failed run left."""
        self._write_state({}, states)

    def _write_state(
        self, arrays: dict[ArrayKey, AnyArray], states: Mapping[int, State]
    ) -> None:
        for number, (model, vectors) in states.items():
            arrays[number, MODEL] = model.parameters
            for name, vector in vectors.items():
                arrays[number, name] = vector
        for name, record in pack(Packet({}, arrays)).items():
            self.context.state[name] = record
        self._read = None

    def clear(self) -> None:
        """Forget the run."""
        release(self.store)
        self.features.release()
        self.store.clear()
        for name in list(self.context.state):
            del self.context.state[name]

    def _state(self) -> Packet:
        if not len(self.context.state):
            raise SiteError(
                "the site has no state for this run (was it restarted?); "
                "start the run again"
            )
        if self._read is None:
            self._read = unpack(self.context.state)
        return self._read


def _fixed_name(number: int) -> str:
    return f"fixed-{number}"


def state_dir(node_config: Mapping[str, object]) -> str:
    """Return the folder for what a site keeps; ``":memory:"`` is none."""
    if given := str(node_config.get(STATE_DIR) or ""):
        if given == IN_MEMORY:
            return given
        # of a relative one, "." say, errors would be cleaned of more than a path
        return str(Path(given).expanduser().absolute())
    home = os.environ.get("TP_FLOWER_HOME")
    return str((Path(home) if home else Path.home() / ".tp_flower") / "state")
