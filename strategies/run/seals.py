"""What sites seal for each other and the server relays, before rows are extracted.

One site of each group seals the group's secret for the others (``seal``). Sites seal
the cutoffs of their rows, or the keys of their shard, for LATERAL sub-queries of others
(``cutoffs``), and shards their partial answers about keys that an earlier one has, too
(``partials``).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import replace

from strategies.run.exchange import Part, Replies, Requests, ask
from strategies.run.sites import Inventory
from tp_flower.arrays import AnyArray
from tp_flower.errors import ReplyError, SettingsError
from tp_flower.extraction.partials import partial_plan
from tp_flower.keyed_hash import RUN_GROUP
from tp_flower.privacy.key_agreement import KeySource
from tp_flower.protocol import setup_messages
from tp_flower.protocol.codec import encode
from tp_flower.protocol.cutoff_messages import (
    CutoffsRequest,
    PartialsRequest,
    SealedPart,
    SealedPartials,
)
from tp_flower.protocol.messages import Action
from tp_flower.protocol.proposal import Proposal
from tp_flower.query import Fragment
from tp_flower.settings import Settings
from tp_flower.terms.cutoffs import SealedPairs, recipients, sealed_pairs
from tp_flower.terms.groups import members_of_groups
from tp_flower.terms.partials import Overlap, overlaps

Bodies = Mapping[int, setup_messages.ExtractPart]
Relayed = Generator[Requests, Replies, Bodies]


def relay_seals(
    inventory: Inventory,
    proposal: Proposal,
    settings: Settings,
    parts: Mapping[int, Part],
    bodies: Bodies,
) -> Generator[
    Requests, Replies, tuple[dict[int, setup_messages.ExtractRequest], Bodies]
]:
    """Relay all that sites seal for each other before they extract a run's rows.

    Return, for each node, the request that brings it its secrets and the proposal,
    without parts; and the requests for the rows of the ``parts``, with their seals.

    Raises:
        QueryError: shards would make an aggregate of partial ones that cannot be.
    """
    check_partials(proposal, settings)
    by_node = yield from relay_secrets(inventory, proposal, settings)
    sealing = _Sealing(proposal, settings, parts, by_node)
    bodies = yield from sealing.relay(bodies)
    return by_node, dict(bodies)


@dataclass(frozen=True)
class _Sealing:
    """The seals of a run for LATERAL sub-queries.

    Attributes:
        parts: of the proposal, by number.
        by_node: for each node the request for rows, without parts.
    """

    proposal: Proposal
    settings: Settings
    parts: Mapping[int, Part]
    by_node: Mapping[int, setup_messages.ExtractRequest]

    def relay(self, bodies: Bodies) -> Relayed:
        """Return the requests for rows with all that other sites seal for them."""
        bodies = yield from self._relay_cutoffs(bodies)
        return (yield from self._relay_partials(bodies))

    @cached_property
    def _overlaps(self) -> tuple[Overlap, ...]:
        return overlaps(self.proposal, self.settings)

    def _relay_cutoffs(self, bodies: Bodies) -> Relayed:
        """Let sites seal their cutoffs, and their keys for later shards, if any do.

        Each node gets cutoffs once, with its first part that takes them.
        """
        relayed = dict(bodies)
        fragments = {
            number: Fragment.from_json(part.fragment)
            for number, part in self.proposal.parts.items()
        }
        taken = sealed_pairs(self.proposal, fragments)
        senders = {pairs.part for each in taken.values() for pairs in each}
        senders |= {overlap.earlier for overlap in self._overlaps}
        if not senders:
            return relayed
        replies = yield self._ask(CutoffsRequest, senders, bodies)
        for overlap in self._overlaps:
            part = self.parts[overlap.earlier]
            keys = _sealed(replies.body(part, SealedPart).sealed_keys, overlap, part)
            body = relayed[overlap.later]
            sealed_keys = {**body.sealed_keys, overlap.name: keys}
            relayed[overlap.later] = replace(body, sealed_keys=sealed_keys)
        for pairs, nodes in recipients(self.proposal, taken).items():
            part = self.parts[pairs.part]
            sealed = replies.body(part, SealedPart).cutoffs
            for node in nodes:
                first = min(n for n in taken if self.proposal.parts[n].node == node)
                if (name := pairs.name_for(node)) not in sealed:
                    raise ReplyError(
                        f"site {part.site!r}, table {part.table!r} has not sealed its "
                        f"cutoffs for node {node}"
                    )
                body = relayed[first]
                cutoffs = {**body.cutoffs, pairs.name: sealed[name]}
                relayed[first] = replace(body, cutoffs=cutoffs)
        return relayed

    def _relay_partials(self, bodies: Bodies) -> Relayed:
        """Let shards seal partial answers for earlier ones, if any do."""
        relayed = dict(bodies)
        if not self._overlaps:
            return relayed
        senders = {overlap.later for overlap in self._overlaps}
        replies = yield self._ask(PartialsRequest, senders, bodies)
        for overlap in self._overlaps:
            part = self.parts[overlap.later]
            answers = replies.body(part, SealedPartials).sealed_partials
            body = relayed[overlap.earlier]
            sealed = {
                **body.sealed_partials,
                overlap.name: _sealed(answers, overlap, part),
            }
            relayed[overlap.earlier] = replace(body, sealed_partials=sealed)
        return relayed

    def _ask(
        self,
        kind: type[CutoffsRequest] | type[PartialsRequest],
        senders: Collection[int],
        bodies: Bodies,
    ) -> Requests:
        """Return the requests to the nodes of some parts, with all parts of these."""
        nodes = {self.parts[number].node for number in senders}
        requests = {
            node: kind(**{n: getattr(request, n) for n in request.__struct_fields__})
            for node, request in self.by_node.items()
            if node in nodes
        }
        parts = [part for part in self.parts.values() if part.node in nodes]
        request = replace(
            next(iter(requests.values())),
            parts={part.number: bodies[part.number] for part in parts},
        )
        return ask(request, parts, requests)


def check_partials(proposal: Proposal, settings: Settings) -> None:
    """Refuse aggregates that are not made of those of shards, where these send them.

    Raises:
        QueryError: it names the aggregate, and what to write.
    """
    for overlap in overlaps(proposal, settings):
        part = proposal.parts[overlap.earlier]
        if subquery := Fragment.from_json(part.fragment).subquery:
            partial_plan(subquery, part.table)


def sealed_bytes(
    bodies: Iterable[setup_messages.ExtractPart],
) -> dict[int, int]:
    """Return by part the bytes of all that it has sealed for other sites."""
    total: Counter[int] = Counter()
    for body in bodies:
        for name, sealed in body.cutoffs.items():
            total[SealedPairs.named(name).part] += sealed.nbytes
        for name, sealed in body.sealed_keys.items():
            total[Overlap.named(name).earlier] += sealed.nbytes
        for name, sealed in body.sealed_partials.items():
            total[Overlap.named(name).later] += sealed.nbytes
    return dict(total)


def relay_secrets(
    inventory: Inventory, proposal: Proposal, settings: Settings
) -> Generator[Requests, Replies, dict[int, setup_messages.ExtractRequest]]:
    """Let one node of every group of nodes make a secret for the group.

    Return, for each node, the request that brings it its secrets and the proposal,
    without parts.
    """
    groups = members_of_groups(
        proposal,
        has_join_secrets=settings.has_join_secrets,
        has_label_secrets=settings.has_label_secrets,
    )
    nodes = sorted(map(int, groups[RUN_GROUP]))
    described = {node: inventory.nodes[node] for node in nodes}
    names = {node: inventory.site_names.get(node, f"node {node}") for node in nodes}
    source = _common_source(described, names)
    public_keys = {str(node): site.public_key for node, site in described.items()}
    site_keys = {
        str(node): (site.site_key or "") if source is KeySource.PINNED else ""
        for node, site in described.items()
    }
    sealed_groups = {
        group: sorted(members, key=int) for group, members in groups.items()
    }
    groups_by_leader: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for group, members in sealed_groups.items():
        groups_by_leader[members[0]][group] = members
    requests = {
        int(leader): setup_messages.SealRequest(
            keys=source.value,
            public_keys=public_keys,
            site_keys=site_keys,
            groups=leader_groups,
            simulated=all(site.simulated for site in described.values()),
            seed=settings.seed,
        )
        for leader, leader_groups in groups_by_leader.items()
    }
    sealed = yield from _request_seals(requests, names)
    return {
        node: setup_messages.ExtractRequest(
            keys=source.value,
            public_keys=public_keys,
            site_keys=site_keys,
            sealed={
                group: setup_messages.SealedSecret(
                    members=members, text=sealed[group][str(node)]
                )
                for group, members in sealed_groups.items()
                if str(node) in members
            },
            proposal=proposal,
            parts={},
        )
        for node in nodes
    }


def _request_seals(
    requests: Mapping[int, setup_messages.SealRequest], names: Mapping[int, str]
) -> Generator[Requests, Replies, dict[str, dict[str, str]]]:
    """Return the secret of each group, sealed to each of its nodes by its leader."""
    sealed: dict[str, dict[str, str]] = {}
    if not requests:
        return sealed
    replies = yield Requests(
        Action.SEAL,
        {leader: encode(request) for leader, request in requests.items()},
        phase="seal",
        message=next(iter(requests.values())),
    )
    for leader, request in requests.items():
        reply = replies.messages(setup_messages.SealReply)[leader].sealed
        for group, members in request.groups.items():
            if not set(members) <= reply.get(group, {}).keys():
                raise ReplyError(
                    f"site {names[leader]!r} did not seal the secret of group "
                    f"{group!r} to all its sites"
                )
            sealed[group] = reply[group]
    return sealed


def _common_source(
    described: Mapping[int, setup_messages.DescribeReply], names: Mapping[int, str]
) -> KeySource:
    """Return where all nodes take the key from, checked before any round."""
    by_source = _group_names(
        {node: site.keys for node, site in described.items()}, names
    )
    if len(by_source) > 1:
        text = "; ".join(f"{key}: {sites}" for key, sites in by_source.items())
        raise SettingsError(
            f"the sites take the key of the hashes from different places ({text}): "
            "give every site allowed-keys in its node config, or no site"
        )
    return KeySource(next(iter(by_source)))


def _group_names(values: Mapping[int, str], names: Mapping[int, str]) -> dict[str, str]:
    grouped: dict[str, list[str]] = {}
    for node, value in values.items():
        grouped.setdefault(value, []).append(repr(names[node]))
    return {value: ", ".join(listed) for value, listed in grouped.items()}


def _sealed(
    documents: Mapping[str, AnyArray], overlap: Overlap, part: Part
) -> AnyArray:
    """Return what a part has sealed for the other shard of an overlap."""
    if overlap.name not in documents:
        raise ReplyError(
            f"site {part.site!r}, table {part.table!r} has sealed nothing for another "
            "shard of its table"
        )
    return documents[overlap.name]
