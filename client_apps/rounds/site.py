"""A site in one run: its shards, its state, and the round in progress.

A request may be carried out twice: the process was killed before it replied, or the
site has lost its state and is sent all rounds again. Noise must not be drawn a second
time, because two draws reveal more than one, and must not be paid for twice either. So
noise and payment follow from a secret key that the site keeps for the run and from the
run's *history*: the rounds so far, with the digests of their requests, and the rows
that were read. Equal histories get equal noise and one payment; a different history
gets other noise, which is paid for.
"""

import hashlib
import hmac
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np
from flwr.app import Context
from msgspec import convert, to_builtins

from client_apps.data import counter
from client_apps.data.features import CachedFeatures, move_to_device, release, rows_of
from client_apps.data.ledger import Line, RoundLedger, open_ledger
from client_apps.data.run_store import CommittedRound, Entry, SiteStore, lost_state
from client_apps.data.score_counts import ScoreLimit
from client_apps.operator import participant
from client_apps.operator.masks import Masked
from client_apps.operator.releases import Releaser
from client_apps.operator.state import Progress, State, read_state, write_state
from tp_flower.arrays import AnyArray
from tp_flower.errors import MessageError, SiteError, TPFlowerError
from tp_flower.keyed_hash import KEY_BYTES, RUN_GROUP, KeyedHasher
from tp_flower.node_config import IN_MEMORY, TABLES, cache_limit, site_id, state_dir
from tp_flower.privacy.mechanisms import Spend
from tp_flower.privacy.plan import MODEL, PartPlan
from tp_flower.protocol.messages import NO_RUN
from tp_flower.protocol.packet import ArrayKey, Parcel
from tp_flower.randomness import NoiseSource
from tp_flower.sources.entries import MEMORY_PREFIX, OWNER_ONLY

if TYPE_CHECKING:
    from client_apps.data.tables import SiteTables
    from tp_flower.extraction.extracted import ExtractedKey, ExtractedShard
    from tp_flower.protocol.proposal import Proposal
    from tp_flower.query import Fragment
    from tp_flower.sources.policy import Policy
    from tp_flower.sources.shards import ShardSource
    from tp_flower.terms.run_terms import RunTerms

SECRET: Final = "secret"
EXTRACTED: Final = "extracted"
PROPOSAL: Final = "proposal"
FIT: Final = "fit"
KEPT: Final = "kept-{}"
"""In memory: what a part computes alike in the fits of a search on the same rows."""
REQUEST: Final = "request"  # in an entry: the digest of the request that brought it
RULES: Final = "rules"  # stored where a table of the run has rules
FAMILY: Final = "family"  # in the entry of a part: of the method that trains it
_NOISE: Final = "noise"
_ID_DIGITS: Final = 32

Item = TypeVar("Item")
Number = TypeVar("Number", int, float)


class Round:
    """A round in progress; nothing of it is stored before the commit.

    ``key`` returns the site's key for the run; it is called when there is something to
    draw or to pay.

    >>> first, again, other = (Round(None, lambda: b"key", 1, d) for d in "aab")
    >>> first.payment == again.payment, first.payment == other.payment
    (True, False)
    >>> bool(first.noise.uniform(1) == again.noise.uniform(1))
    True

    ``digest`` is the request's, ``arrays`` the current state by (part, name), ``noise``
    the source of the reply's noise.
    """

    def __init__(
        self,
        last: CommittedRound | None,
        key: Callable[[], bytes],
        number: int,
        digest: str,
    ) -> None:
        self.number = number
        self.digest = digest
        history = "" if last is None else last.history
        self._history = self._begun = extend_history(history, number, digest)
        self._key = key
        self.noise = NoiseSource(lambda: self._derive(b"noise"))
        self.arrays: dict[ArrayKey, AnyArray] = {} if last is None else {**last.arrays}
        # a site may have a thousand parts: none looks through the arrays of all
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        for part, name in self.arrays:
            self._names[part].append(name)
        self.is_over = False

    @property
    def payment(self) -> str:
        """The identifier of the round's payments."""
        return self._derive(b"payment").hex()[:_ID_DIGITS]

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(
            self._key(), purpose + b" " + self._begun.encode(), hashlib.sha256
        )

    def keep(self, part: int, arrays: Mapping[str, AnyArray]) -> None:
        """Make arrays the current state of a part, in place of those that it has."""
        for name in self._names.pop(part, []):
            # those of all parts may have been forgotten
            self.arrays.pop((part, name), None)
        self._names[part] = list(arrays)
        for name, array in arrays.items():
            self.arrays[part, name] = array

    def learn(self, rows: str) -> None:
        """Add an identifier of the rows that were read to the history."""
        self._history = extend_history(self._history, rows)

    def committed(self) -> CommittedRound:
        """Return the committed form of the round."""
        return CommittedRound(
            self.number, self.digest, self._history, self.arrays, self.is_over
        )


def names_of_shards(keys: Mapping[str, str]) -> tuple[str, ...]:
    """Return a name of each shard that no other has, from its site's key by number."""
    return tuple(sorted(f"{key} {shard}" for shard, key in keys.items()))


def extend_history(history: str, *items: object) -> str:
    """Return a history extended by items of plain JSON types."""
    return hashlib.sha256(json.dumps([history, *items]).encode()).hexdigest()


class Site:
    """One site's view of one run, for the length of one message.

    In deployment every message starts a process: modules that read tables, parse
    queries or write models are imported by the messages that need them. Nothing is kept
    in Flower's context. ``uses`` are the covered releases that leave with the reply,
    ``masked`` what leaves in it under masks. ``ledger_end`` is the checksum of the
    ledger's last line, once :meth:`confirm` has read it. ``queries`` are the ledger's
    lines about the fragments of the request, by part, with a ``source`` once rows are
    read; ``quotas`` are those of these sources.
    """

    def __init__(self, context: Context, run: str = NO_RUN) -> None:
        self.context = context
        self.run = run
        self._root = root = state_dir(context.node_config)
        name = site_id(context.node_config, context.node_id)
        self.store = SiteStore(root, run, name, is_durable=not self.is_simulated)
        self.changes = self.store.changes
        self.features = CachedFeatures(
            root, cache_limit(context.node_config), self.store
        )
        self.uses: list[Spend] = []
        self.scored: Counter[tuple[int, ScoreLimit]] = Counter()
        self.masked: list[Masked] = []
        self.ledger_end: str | None = None
        self.queries: dict[int, Line] = {}
        self.quotas: dict[str, int] = {}
        self._shard_names: dict[str, tuple[str, ...]] = {}
        self._round: Round | None = None

    @cached_property
    def tables(self) -> "SiteTables":
        """The rows of the run's parts."""
        from client_apps.data.tables import SiteTables

        return SiteTables(self.features, is_simulated=self.is_simulated)

    @property
    def state_folder(self) -> Path | None:
        """The folder of what outlives a run; None if nothing does."""
        if self._root == IN_MEMORY:
            return None
        return Path(self._root)

    @cached_property
    def shards(self) -> tuple["ShardSource", ...]:
        """The shards that this site hosts."""
        from tp_flower.sources.shards import hosted_shards

        return hosted_shards(self.context.node_config, self.context.run_config)

    @cached_property
    def quotas_by_rows(self) -> dict[str, int]:
        """The queries that policies allow a day, by the identifier of the rows."""
        return self._least_by_rows(lambda policy: policy.queries_per_day or None)

    @cached_property
    def most_scores_by_rows(self) -> dict[str, float]:
        """``scores-per-rank`` of policies, by the identifier of the rows."""
        return self._least_by_rows(lambda policy: policy.most_scores)

    def _least_by_rows(
        self, rule: "Callable[[Policy], Number | None]"
    ) -> "dict[str, Number]":
        """Return a rule of policies, by the identifier of the rows.

        If several entries of the tables file share rows, their smallest applies.
        """
        from tp_flower.sources.derived.accounts import source_id

        least: dict[str, Number] = {}
        for shard in self.shards:
            if (value := rule(shard.policy)) is not None:
                name = source_id(shard)
                least[name] = min(value, least.get(name, value))
        return least

    @cached_property
    def ledger(self) -> RoundLedger:
        """The site's ledger over all its runs, as the round writes it."""
        return RoundLedger(open_ledger(self._root), self.changes)

    @property
    def terms(self) -> "RunTerms":
        """The terms of the run, by the proposal that the site received.

        A process reads it once.
        """
        from tp_flower.protocol.proposal import Proposal
        from tp_flower.terms.run_terms import RunTerms

        if not self.store.has(PROPOSAL):
            raise MessageError(
                "no run has been proposed to this site, or not at this point of it"
            )
        entry = self.store.load(PROPOSAL)
        cached = self.store.memory.get(PROPOSAL)
        if cached is None or cached.meta["entry"] is not entry:
            proposal = convert(entry.meta["proposal"], Proposal, str_keys=True)
            cached = Entry({}, {"entry": entry, "terms": RunTerms(proposal)})
            self.store.memory[PROPOSAL] = cached
        terms: RunTerms = cached.meta["terms"]
        if (counted := self._counted_fit) is None:
            return terms
        return self._terms_of_fit(terms, *counted)

    def _terms_of_fit(
        self, terms: "RunTerms", number: int, candidate: int
    ) -> "RunTerms":
        """Return the terms of a fit of a search; a process derives them once."""
        counted = (number, candidate)
        cached = self.store.memory.get(FIT)
        if (
            cached is None
            or cached.meta["of"] is not terms
            or cached.meta["counted"] != counted
        ):
            of_fit = terms.of_fit(number, candidate)
            meta = {"of": terms, "counted": counted, "terms": of_fit}
            cached = self.store.memory[FIT] = Entry({}, meta)
        fit_terms: RunTerms = cached.meta["terms"]
        return fit_terms

    @property
    def _counted_fit(self) -> tuple[int, int] | None:
        """The number and the candidate of a search's fit; None before the first."""
        if not self.store.has(FIT):
            return None
        meta = self.store.load(FIT).meta
        return int(meta["number"]), int(meta["candidate"])

    @property
    def fit(self) -> int:
        """The number of a search's fit, from 1; 0 before the first, and without one."""
        counted = self._counted_fit
        return 0 if counted is None else counted[0]

    @property
    def repeats_fold(self) -> bool:
        """Whether a fit has encoded the same rows as the one before it in a search."""
        return self.fit > 0 and not self.store.load(FIT).meta["begins"]

    def count_fit(self, number: int, candidate: int, *, begins_fold: bool) -> None:
        """Begin a fit of a search: models and state of the last one are forgotten."""
        meta = {"number": number, "candidate": candidate, "begins": begins_fold}
        self.store.save(FIT, Entry({}, meta))
        self.round.arrays.clear()
        self.ledger.count_fit(
            self.store.run, number, candidate, ident=self.round.payment
        )

    @property
    def public_keys(self) -> Mapping[str, str]:
        """The public keys of the run's sites, by node."""
        keys: Mapping[str, str] = self.store.load(PROPOSAL).meta["public_keys"]
        return keys

    def shard_keys(self, table: str) -> dict[str, str]:
        """Return the run's key of the site of each shard of a table, by number."""
        keys = self.public_keys
        shards = self.terms.proposal.shards_of(table)
        return {str(number): keys[part.node] for number, part in shards.items()}

    def shard_names(self, table: str) -> tuple[str, ...]:
        """Return a name of each shard of a table, in the order of their masks."""
        if table not in self._shard_names:
            self._shard_names[table] = names_of_shards(self.shard_keys(table))
        return self._shard_names[table]

    def keep_proposal(
        self, proposal: "Proposal", public_keys: Mapping[str, str]
    ) -> None:
        """Store the proposal of the run, and the public keys of its sites."""
        meta = {
            "proposal": to_builtins(proposal, str_keys=True),
            "public_keys": public_keys,
        }
        self.store.save(PROPOSAL, Entry({}, meta))

    def confirm(self) -> None:
        """Check that the database is not behind its counter, and update the counter.

        Called before a message is answered and before its reply leaves. LedgerError if
        the database is behind.
        """
        if not self.is_simulated:
            self.ledger_end = counter.confirm(self._root).checksum

    def bind(
        self, number: int, position: int, fragment: "Fragment", join_keys: int = 0
    ) -> None:
        """Store a part's shard and fragment, and how many of its keys are joined on."""
        meta = {
            "position": position,
            "fragment": fragment.to_json(),
            "join_keys": join_keys,
        }
        self.store.save(f"source-{number}", Entry({}, meta))
        if not self.shards[position].policy.is_open:
            self.store.save(RULES, Entry({}, {}))

    @property
    def has_rules(self) -> bool:
        """Whether any table of the run has rules.

        If the site has read its tables, all of them count.
        """
        if "shards" in vars(self):
            return not all(source.policy.is_open for source in self.shards)
        return self.store.has(RULES)

    def source(self, number: int) -> "ShardSource":
        """Return the shard of a participant of the run; SiteError if there is none."""
        return self.hosted(int(self._source_entry(number).meta["position"]))

    def hosted(self, position: int) -> "ShardSource":
        """Return a shard of this site; PolicyError if it has no policy."""
        source = self.shards[position]
        source.check_policy()
        return source

    def fragment(self, number: int) -> "Fragment":
        """Return a participant's fragment; SiteError if it is not in the run."""
        from tp_flower.query import Fragment

        return Fragment.from_json(self._source_entry(number).meta["fragment"])

    def join_keys(self, number: int) -> "tuple[ExtractedKey, ...]":
        """Return the keys of a part that joins compare, not those that name rows."""
        count = int(str(self._source_entry(number).meta["join_keys"]))
        return self.kept(
            f"join-keys-{number}", lambda: self.extracted(number).keys[:count]
        )

    def join_key_names(self, number: int) -> tuple[str, ...]:
        """Return those keys as the query writes them."""
        count = int(str(self._source_entry(number).meta["join_keys"]))
        keys = self.fragment(number).keys[:count]
        return tuple(", ".join(expressions) for expressions in keys)

    def _source_entry(self, number: int) -> Entry:
        self._check_part(f"source-{number}", number)
        return self.store.load(f"source-{number}")

    def extracted(self, number: int) -> "ExtractedShard":
        """Return a part's rows; they are gone once its features have replaced them."""
        self._check_part(rows_of(number), number)
        extracted = self.kept(
            f"rows-of-{number}", lambda: self.tables.extracted(number)
        )
        policy = self.source(number).policy
        units = extracted.contents.units
        extracted_unit = (units.name, units.width) if units else ("row", 1)
        if extracted_unit != (policy.per, policy.rows_per_unit):
            # the policy has changed since
            raise lost_state()
        return extracted

    def kept(self, name: str, make: Callable[[], Item]) -> Item:
        """Return what is made once in a process that answers many requests.

        The rows of such a run do not change once they are extracted.
        """
        if name not in self.store.memory:
            if not (self.store.has(EXTRACTED) and self.terms.is_resident):
                return make()
            self.store.memory[name] = Entry({}, {"kept": make()})
        value: Item = self.store.memory[name].meta["kept"]
        return value

    def _check_part(self, name: str, number: int) -> None:
        """Raise MessageError unless the part's rows have been extracted."""
        if not self.store.has(name):
            raise MessageError(
                f"part {number} does not belong to this run at this site, "
                "or not at this point of the run"
            )

    @property
    def is_simulated(self) -> bool:
        """Whether the data come from the run or this process, not from a real site.

        A real site has a tables file of its own.
        """
        tables = str(self.context.node_config.get(TABLES, ""))
        return not tables or tables.startswith(MEMORY_PREFIX)

    def redact_places(self, text: str) -> str:
        """Return the error text that the server may see; the site's log has all of it.

        Paths and addresses of a real site do not leave it.
        """
        if self.is_simulated:
            return text
        tables = str(self.context.node_config[TABLES])
        try:
            sources = self.shards
        except TPFlowerError:
            sources = ()
        for source in sources:
            text = source.redact_place(text)
        for path in (str(Path(tables).expanduser()), tables):
            text = text.replace(path, "of the site")
        text = text.replace(f"{Path(tables).expanduser().absolute().parent}/", "")
        for phrase in OWNER_ONLY:
            text = text.partition(phrase)[0]
        return text.replace(str(self._root), "<state-dir>")

    def hasher(self) -> KeyedHasher:
        """Return the keyed hash that the sites of the run share."""
        return KeyedHasher(self.group_key(RUN_GROUP))

    def private_hasher(self) -> KeyedHasher:
        """Return the keyed hash, of this run, that no other site can repeat."""
        return KeyedHasher(self._noise_key())

    def group_key(self, group: str) -> bytes:
        """Return the key that the sites of a group share; each fit has its own."""
        key = self.run_key(group)
        if not (fit := self.fit):
            return key
        from tp_flower.terms.fits import fit_key

        return fit_key(key, fit)

    def run_key(self, group: str) -> bytes:
        """Return the key that the sites of a group share in all fits of a search."""
        keys = self.store.load(SECRET).arrays
        if group not in keys:
            raise MessageError(f"this site has no key of group {group!r}")
        return keys[group].tobytes()

    def join_hasher(self, group: str) -> KeyedHasher:
        """Return the keyed hash of the join keys of one group.

        Keys of one group are compared across the run's tables; keys of different groups
        are unrelated. The groups follow from the joins of the run's proposal.
        """
        return self.hasher().purpose(f"join keys {group}")

    def each(self, bodies: Mapping[int, Item]) -> Iterator[tuple[int, Item]]:
        """Yield each participant's body by number; errors are attributed to it."""
        for number, body in bodies.items():
            self.changes.part = number
            yield number, body
        self.changes.part = None

    @property
    def family(self) -> str:
        """The family of the method whose training has begun."""
        number = min(self._arrays_by_part())
        meta = self.store.load(f"part-{number}").meta
        if FAMILY not in meta:
            # the state of an older version: the site is sent all rounds again
            raise lost_state()
        return str(meta[FAMILY])

    def parts(self, state: type[State]) -> Iterator[participant.Participant[State]]:
        """Yield the participants in training, with their current state."""
        arrays = self._arrays_by_part()
        for number in sorted(arrays):
            self.changes.part = number
            data = self._data(number)
            # rebuilt every time: what a factory's model keeps besides its parameters
            # must not differ between processes
            model = participant.make_model(
                data.spec, data.features.shape[1], data.device
            )
            model.parameters = np.array(arrays[number][MODEL])
            yield participant.Participant(
                number,
                data,
                model,
                read_state(state, arrays[number]),
                self.releaser(number, data.plan),
                read_state(Progress, arrays[number]),
            )
        self.changes.part = None

    def _arrays_by_part(self) -> dict[int, dict[str, AnyArray]]:
        """Return the current state by part; MessageError before any training."""
        if not self.round.arrays:
            raise MessageError("no model has been prepared in this run at this site")
        arrays: dict[int, dict[str, AnyArray]] = {}
        for (number, name), array in self.round.arrays.items():
            arrays.setdefault(number, {})[name] = array
        return arrays

    def _data(self, number: int) -> participant.ShardData:
        """Return a participant's training data; a process reads them once."""
        entry = self.store.load(f"part-{number}")
        name = f"data-{number}"
        host = self.features.read(entry)
        device = entry.meta["device"]
        kind = entry.meta["model"]["kind"]
        features = move_to_device(self.store, number, host, device, kind)
        cached = self.store.memory.get(name)
        source = {"entry": entry, "features": features}
        if cached is not None and all(cached.meta[k] is v for k, v in source.items()):
            unchanged: participant.ShardData = cached.meta["data"]
            return unchanged
        data = participant.ShardData.read(entry, features, self.group_key)
        self.store.memory[name] = Entry({}, {"data": data, **source})
        return data

    def check_once(self, name: str, refusal: str) -> None:
        """Refuse, with ``refusal``, any request but the one that brought an entry.

        The same one comes again where the site has lost its state, and is sent all
        rounds anew.
        """
        if (
            self.store.has(name)
            and self.store.load(name).meta[REQUEST] != self.round.digest
        ):
            raise SiteError(refusal)

    def releaser(self, number: int, plan: PartPlan) -> Releaser:
        """Return how a participant's arrays leave with this message, by its plan."""
        return Releaser(
            number, plan, self.round.noise, self.uses, self.scored, self.masked
        )

    def pay(self) -> None:
        """Record this message's releases, and what masks hide, with the round's commit.

        A release beyond the reservation refuses the round, as does a score vector
        beyond those that a policy allows, or masks that have hidden something else:
        nothing leaves.
        """
        if self.scored:
            self.ledger.count_scores(
                self.store.run, self.scored.copy(), self.round.payment
            )
            self.scored.clear()
        if self.uses:
            self.ledger.spend(self.store.run, self.uses.copy(), self.round.payment)
            self.uses.clear()
        # the masks of a simulation are no secret
        if not self.is_simulated:
            for item in self.masked:
                self.changes.part = item.part
                name = item.name
                if fit := self.fit:
                    name = f"fit {fit}: {name}"
                self.store.record_masked(item.part, name, item.digest)
        self.changes.part = None
        self.masked.clear()

    def start(
        self,
        part: participant.Participant[Any],
        family: str,
        arrays: Mapping[str, AnyArray],
        *,
        keeps_rows: bool = False,
        **meta: object,
    ) -> None:
        """Store a participant whose training by a family of methods begins.

        ``arrays`` and ``meta`` are what its method keeps and never changes. Its
        features replace its rows, unless their keys are needed once more.
        """
        stored = part.data.entry(arrays, {**meta, FAMILY: family})
        entry = self.features.drop_cached(part.number, stored)
        self.store.save(f"part-{part.number}", entry)
        # the next fit of a search encodes them, too
        if not (keeps_rows or self.fit):
            self.store.drop(rows_of(part.number))
        self.save(part)

    def forget_part(self, number: int) -> None:
        """Forget what is stored of a participant: its rows are encoded anew."""
        self.store.drop(f"part-{number}")
        self.store.memory.pop(KEPT.format(number), None)

    def last_entry(self, number: int) -> Entry | None:
        """Return the entry of a participant in the last fit, if it had the same rows.

        Its rows may have become pairs since: then there is none.
        """
        name = f"part-{number}"
        if not (self.repeats_fold and self.store.has(name)):
            return None
        entry = self.store.load(name)
        return None if participant.PAIR_ROWS in entry.arrays else entry

    def kept_of_fold(self, number: int) -> dict[Any, Any]:
        """Return what this process has computed of a part in other fits of the fold."""
        if not self.fit:
            return {}
        name = KEPT.format(number)
        if not (self.repeats_fold and name in self.store.memory):
            self.store.memory[name] = Entry({}, {"kept": {}})
        kept: dict[Any, Any] = self.store.memory[name].meta["kept"]
        return kept

    def keep(self, number: int, change: Entry) -> None:
        """Change what is stored of a participant, whose training has begun.

        For example a solver, or the pairs that take its rows' place.
        """
        entry = self.store.load(f"part-{number}")
        arrays = {**entry.arrays, **change.arrays}
        self.store.save(f"part-{number}", Entry(arrays, {**entry.meta, **change.meta}))

    def save(self, part: participant.Participant[Any]) -> None:
        """Change a participant's model, which must be finite, and its state.

        The change is invisible until the round is committed.
        """
        arrays = {MODEL: part.finite(part.model.parameters)}
        for state in (part.progress, part.state):
            state_arrays = write_state(state)
            if clashes := sorted(arrays.keys() & state_arrays.keys()):
                raise ValueError(
                    f"{type(state).__name__}: the name {clashes[0]} is taken"
                )
            arrays |= state_arrays
        self.round.keep(part.number, arrays)

    def begin(self, number: int, digest: str, last: CommittedRound | None) -> None:
        """Begin a round after the committed one, for a request with this digest."""
        self._round = Round(last, self._noise_key, number, digest)

    def commit(self, reply: Parcel) -> None:
        """Make this the committed round, as part of the transaction."""
        self.store.commit(self.round.committed(), reply)

    def settle(self) -> None:
        """Delete the state of a finished run; may be repeated after an interruption."""
        release(self.store)
        self.features.release()
        self.store.end()

    @property
    def round(self) -> Round:
        """The round in progress; between rounds, one that is never committed."""
        if self._round is None:
            self.begin(0, "", self.store.last())
        return cast(Round, self._round)

    def _noise_key(self) -> bytes:
        """Return the key of the run's noise, created when it is first needed."""
        if not self.store.has(_NOISE):
            key = np.frombuffer(token_bytes(KEY_BYTES), np.uint8)
            self.store.save(_NOISE, Entry({_NOISE: key}, {}))
        return self.store.load(_NOISE).arrays[_NOISE].tobytes()
