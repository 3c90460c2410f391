"""The proposal of a run: what an operator asks of all tables' owners, in one document.

Every site of a run gets the same proposal, once, with ``query.extract``. From it a site derives
what it would otherwise have to take from each request: the sides and signs of its joins, whose
keys hide its scores, the model, the epochs and the mechanisms. What a later request says is
compared with it. Its digest is part of every key that sites share in the run, so that sites that
were told different proposals share no key: their masks do not cancel, and nothing is read.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Final

import msgspec

from tp_flower.protocol import fields as f
from tp_flower.protocol.fields import Body

EXPLAIN_AS_TRAIN: Final = {"explain": "train"}
"""Who approves training approves that it is explained, which is its beginning."""


class ProposedPart(Body, frozen=True, kw_only=True):
    """A shard in one role.

    Attributes:
        table: alias in the query.
        site: name of the organisation's site.
        site_key: its long-term public key, where sites pin keys; otherwise "".
        node: that answers for the site in this run; no part of what is approved.
        fragment: what the query asks of the table.
    """

    table: f.Name
    site: f.Name
    site_key: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    node: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,20}\Z")]
    fragment: f.Document


class ProposedJoin(Body, frozen=True, kw_only=True):
    """An equality between a key of two tables, by alias and position among its join keys."""

    left: f.Name
    left_key: f.Count
    right: f.Name
    right_key: f.Count


class Proposal(Body, frozen=True, kw_only=True):
    """What a run asks of all its tables.

    Attributes:
        query: the SQL, for its readers.
        parts: by participant.
        joins: in the order of their groups, ``join-0`` and so on.
        outer: the LEFT JOINed tables.
        label_table: alias; "" without labels.
        settings: the run config without what is the operator's own: where reports go, how long
            to wait.
    """

    query: f.Name
    parts: dict[int, ProposedPart]
    joins: list[ProposedJoin]
    outer: list[f.Name]
    label_table: f.Name = ""
    settings: f.Document

    @property
    def digest(self) -> str:
        """The SHA-256 of what owners approve: equal for runs that ask the same of the same."""
        return f"sha256:{sha256(json.dumps(self._approved(), sort_keys=True).encode()).hexdigest()}"

    def _approved(self) -> Mapping[str, object]:
        content = msgspec.to_builtins(self)
        mode = content["settings"].get("mode")
        content["settings"]["mode"] = EXPLAIN_AS_TRAIN.get(mode, mode)
        # participants and nodes are numbered anew in every run
        parts = [{**part, "node": ""} for part in content["parts"].values()]
        return {**content, "parts": sorted(map(json.dumps, parts))}
