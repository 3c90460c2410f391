"""Approval of whole runs: what waits for an owner, and the digest in the policy.

A refused run's proposal stands in the ledger. The owner reads its text, and the digest
is added to ``approved-runs`` of the owner's policies, in the tables file, of which
nothing else changes: the change is made in the text, and taken only if the file then
says the same and the digest.
"""

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tp_flower.errors import SiteError
from tp_flower.files import write_file
from tp_flower.protocol.proposal import Proposal
from tp_flower.sources.entries import quote_toml
from tp_flower.sources.shards import ShardSource

KEY: Final = "approved-runs"
PROPOSAL = "proposal"
DOCUMENT = "document"
"""In the ledger's lines of queries: the digest of a run's proposal; of a refused one,
all of it."""
MOST_BYTES: Final = 1 << 17  # of a proposal that the ledger keeps
_LIST: Final = re.compile(rf"{KEY}[\"']?\s*=\s*\[")

Entry = dict[str, Any]


def document_of(proposal: Proposal) -> Entry | None:
    """Return a proposal as the ledger keeps it; None for one that is too long."""
    text = msgspec.json.encode(proposal)
    document: Entry = msgspec.json.decode(text)
    if len(text) <= MOST_BYTES:
        return document
    return None


def read_proposal(file: Path) -> Proposal:
    """Return the proposal that an operator's run has written."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Proposal)
    except OSError as error:
        raise SiteError(
            f"the proposal {file} cannot be read: {error.strerror}"
        ) from error
    except msgspec.MsgspecError as error:
        raise SiteError(f"{file} is no proposal of a run: {error}") from error


def refused_proposals(lines: Iterable[Mapping[str, Any]]) -> list[Proposal]:
    """Return the proposals that a ledger has refused, each once, the latest last."""
    proposals: dict[str, Proposal] = {}
    for line in lines:
        if line.get(DOCUMENT):
            proposal = msgspec.convert(line[DOCUMENT], Proposal, str_keys=True)
            proposals.pop(proposal.digest, None)
            proposals[proposal.digest] = proposal
    return list(proposals.values())


def tables_to_approve(proposal: Proposal, shards: Iterable[ShardSource]) -> list[str]:
    """Return the tables of an owner in a run whose policies do not list it yet."""
    names = {
        (str(part.fragment.get("name", "")).lower(), part.site)
        for part in proposal.parts.values()
    }
    tables = [
        shard.table
        for shard in shards
        if (shard.table.lower(), shard.site) in names
        and shard.policy.approved_runs is not None
        and proposal.digest not in shard.policy.approved_runs
    ]
    return list(dict.fromkeys(tables))


def add_approval(file: Path, digest: str, tables: Collection[str]) -> None:
    """Add a digest to the policies of some tables, in the tables file."""
    # a link stays one
    file = file.expanduser().resolve()
    try:
        text = file.read_bytes().decode()
        mode = file.stat().st_mode & 0o777
        write_file(
            file,
            [insert_approval(text, digest, tables).encode()],
            is_durable=True,
            mode=mode,
        )
    except OSError as error:
        raise SiteError(
            f"the tables file {file} cannot be changed: {error.strerror}"
        ) from error


def insert_approval(text: str, digest: str, tables: Collection[str]) -> str:
    """Return a tables file with a digest at the beginning of lists of approved runs.

    SiteError if a list cannot be found in the text.

    >>> text = 'tables.t.policy.approved-runs = ["sha256:00"]  # kept'
    >>> print(insert_approval(text, "sha256:11", ["t"]))
    tables.t.policy.approved-runs = ["sha256:11", "sha256:00"]  # kept
    """
    count = len(list(_policies(tomllib.loads(text), tables)))
    for number in range(count):
        approved = tomllib.loads(text)
        policy = list(_policies(approved, tables))[number]
        if digest not in policy[KEY]:
            comma = ", " if policy[KEY] else ""
            policy[KEY].insert(0, digest)
            text = _insert(text, f"{quote_toml(digest)}{comma}", approved)
    return text


def _insert(text: str, addition: str, approved: Entry) -> str:
    """Return the text with ``addition`` in the list where it parses as ``wanted``.

    It is inserted at the beginning of the list.

    A comment or a string may look like a list.
    """
    for match in _LIST.finditer(text):
        candidate = f"{text[: match.end()]}{addition}{text[match.end() :]}"
        try:
            content = tomllib.loads(candidate)
        except tomllib.TOMLDecodeError:
            continue
        if content == approved:
            return candidate
    raise SiteError(
        f"the list {KEY} was not found in the text of the tables file: add "
        f"{addition.rstrip(', ')} to it by hand"
    )


def _policies(document: Entry, tables: Collection[str]) -> Iterator[Entry]:
    """Yield the policies of some tables and their shards that list approved runs."""
    for name in tables:
        entry = document["tables"][name]
        for holder in (entry, *entry.get("shards", ())):
            policy = holder.get("policy")
            if isinstance(policy, dict) and KEY in policy:
                yield policy
