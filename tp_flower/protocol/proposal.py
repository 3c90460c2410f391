"""The proposal of a run: what an operator asks of all tables' owners, in one document.

Every site of a run gets the same proposal, once, with ``query.extract``. From it a site
derives what it would otherwise have to take from each request: the sides and signs of
its joins, whose keys hide its scores, the model, the epochs and the mechanisms. What a
later request says is compared with it. Its digest is part of every key that sites share
in the run, so that sites that were told different proposals share no key: their masks
do not cancel, and nothing is read.
"""

import json
from hashlib import sha256
from typing import Annotated, Final

import msgspec

from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body

FILE: Final = "proposal.json"  # in the folder of a run's report
MODE: Final = "mode"
EXPLAIN_AS_TRAIN: Final = {"explain": "train"}
"""Who approves training approves that it is explained, which is its beginning."""


class ProposedPart(Body, frozen=True, kw_only=True):
    """A shard in one role.

    Attributes:
        table: alias in the query.
        site: name of the organisation's site.
        site_key: its long-term public key, where sites pin keys; otherwise "".
        node: that answers for the site in this run; no part of what is approved.
        shard: its position among the shards of the node; no part of it either.
        fragment: what the query asks of the table.
    """

    table: f.Name
    site: f.Name
    site_key: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    node: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}\Z")]
    shard: f.Count
    fragment: f.Document


class ProposedJoin(Body, frozen=True, kw_only=True):
    """An equality of keys of two tables, by alias and position among its join keys."""

    left: f.Name
    left_key: f.Count
    right: f.Name
    right_key: f.Count


class Proposal(Body, frozen=True, kw_only=True):
    """A run as all owners of its tables are asked for it.

    Attributes:
        query: the SQL, for its readers.
        parts: by participant.
        joins: in the order of their groups, ``join-0`` and so on.
        outer: the LEFT JOINed tables.
        label_table: alias of the table that has the label, or whose rows are predicted.
        split_table: the one whose last key decides what is held out, or groups rows
            for metrics; "" for none.
        settings: the run config without what is the operator's own: where reports go,
            how long to wait.
    """

    query: Annotated[str, msgspec.Meta(max_length=1 << 20)]
    parts: dict[int, ProposedPart]
    joins: list[ProposedJoin]
    outer: list[f.Name]
    label_table: f.Name = ""
    split_table: f.Name = ""
    settings: f.Document

    @property
    def tables(self) -> tuple[str, ...]:
        """The aliases of the tables.

        Those of the parts come first, in their order, then those that no site hosts
        now.
        """
        hosted = [part.table for _, part in sorted(self.parts.items())]
        joined = [table for join in self.joins for table in (join.left, join.right)]
        return tuple(dict.fromkeys([*hosted, *joined]))

    def shards_of(self, table: str) -> dict[int, ProposedPart]:
        """Return the parts of a table by participant, in their order."""
        return {
            n: part for n, part in sorted(self.parts.items()) if part.table == table
        }

    @property
    def digest(self) -> str:
        """The SHA-256 of what owners approve.

        It is equal for runs that request the same from the same sites.
        """
        content = msgspec.to_builtins(self)
        mode = content["settings"].get(MODE)
        if mode in EXPLAIN_AS_TRAIN:
            content["settings"][MODE] = EXPLAIN_AS_TRAIN[mode]
        # participants, nodes and their shards are numbered anew in every run
        parts = [{**part, "node": "", "shard": 0} for part in content["parts"].values()]
        content["parts"] = sorted(parts, key=_text)
        return f"sha256:{sha256(_text(content).encode()).hexdigest()}"

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 of the whole proposal, numbers included.

        It is equal only at the sites of one run.
        """
        return sha256(_text(msgspec.to_builtins(self)).encode()).digest()


def _text(document: object) -> str:
    return json.dumps(document, sort_keys=True)
