"""The whole-run approval: what its digest binds, what its text shows, where it is
written.
"""

import json
import tomllib
from copy import deepcopy

import msgspec
import pytest

from client_apps.privacy.approval import (
    MOST_BYTES,
    add_approval,
    document_of,
    insert_approval,
    read_proposal,
    refused_proposals,
    tables_to_approve,
)
from tests.support.files import case_table
from tests.support.tables.sources import sources_of
from tp_flower.errors import SettingsError, SiteError, TPFlowerError
from tp_flower.protocol.proposal import Proposal, ProposedJoin, ProposedPart
from tp_flower.query import Query
from tp_flower.query.fragment import Fragment
from tp_flower.settings import Settings, all_settings
from tp_flower.settings.declare import OneOf
from tp_flower.terms.proposal_text import proposal_text

CASES = case_table(__file__)
SITES = {"v": ("north", "south"), "b": ("lab",), "h": ("registry",)}
KEYS = {
    site: f"{number:x}" * 64
    for number, site in enumerate(("north", "south", "lab"), 10)
}
OWN = {"lab"}
ALLOWED = {item.key: item.allowed for item in all_settings()}


def proposal_of(sql=CASES["sql"], **settings):
    bound = Query.from_sql(sql).bind(CASES["schemas"])
    parts = [
        ProposedPart(
            table=fragment.table,
            site=site,
            site_key=KEYS.get(site, ""),
            node=str(7 + number),
            shard=number % 2,
            fragment=fragment.to_json(),
        )
        for number, (fragment, site) in enumerate(
            (fragment, site)
            for fragment in bound.fragments
            for site in SITES[fragment.table]
        )
    ]
    return Proposal(
        query=Query.from_sql(sql).to_sql(),
        parts=dict(enumerate(parts)),
        joins=[
            ProposedJoin(
                left=j.left, left_key=j.left_key, right=j.right, right_key=j.right_key
            )
            for j in bound.joins
        ],
        outer=sorted(bound.outer),
        label_table=bound.label_table,
        split_table=bound.split_table,
        settings=Settings.from_run_config(settings).proposed(),
    )


def leaves(value, path=()):
    """The paths of all values in a document that hold no others."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list) and item:
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def changed(proposal, path, value):
    document = msgspec.to_builtins(proposal)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return msgspec.convert(document, Proposal, str_keys=True)


def value_at(proposal, path):
    place = msgspec.to_builtins(proposal)
    for step in path:
        place = place[step]
    return place


def others(key, value):
    """Values that an operator may put in a value's place."""
    if key in CASES["values"]:
        return CASES["values"][key]
    if isinstance(ALLOWED.get(key), OneOf):
        return ALLOWED[key].choices
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value / 2 or 0.5]
    if isinstance(value, int):
        return [value + 1]
    return ["1"] if value is None else [["other"]] if value == [] else [f"{value}1"]


def is_approved_and_shown_anew(proposal, other):
    """Whether another run can be approved; its digest and its text must be others
    then.
    """
    assert other.digest != proposal.digest
    try:
        # the first line has the digest
        text = proposal_text(other, OWN).split("\n")[1:]
    except TPFlowerError:
        return False
    assert text != proposal_text(proposal, OWN).split("\n")[1:]
    return True


PROPOSAL = proposal_of(encoders="b.crp=range(0, 9)")
LEAVES = [
    path
    for path in leaves(msgspec.to_builtins(PROPOSAL))
    if path[0] != "settings" and path[-1] not in ("node", "shard")
]


@pytest.mark.parametrize("path", LEAVES, ids=lambda path: ".".join(map(str, path)))
def test_whatever_is_changed_in_a_run_is_shown_and_needs_an_approval_of_its_own(path):
    changes = [
        is_approved_and_shown_anew(PROPOSAL, changed(PROPOSAL, path, value))
        for value in others(path[-1], value_at(PROPOSAL, path))
    ]
    # what cannot be read is not to be approved
    assert any(changes) == (path[-1] not in CASES["unreadable"])


@pytest.mark.parametrize("key", PROPOSAL.settings)
def test_whatever_setting_is_changed_is_shown_and_needs_an_approval_of_its_own(key):
    changes = 0
    for settings in CASES["runs"]:
        proposal = proposal_of(CASES["alone"], **settings)
        for value in others(key, proposal.settings[key]):
            if value != proposal.settings[key]:
                other = changed(proposal, ("settings", key), value)
                changes += is_approved_and_shown_anew(proposal, other)
    assert changes


def test_the_digest_is_that_of_another_day_and_of_an_explanation():
    document = msgspec.to_builtins(PROPOSAL)
    parts = list(document["parts"].values())
    renumbered = {
        number + 3: part | {"node": "9", "shard": 4}
        for number, part in enumerate(parts[::-1])
    }
    same = deepcopy(document) | {"parts": renumbered}
    # a file may have the keys of objects in another order
    same = json.loads(json.dumps(same, sort_keys=True))
    assert (
        msgspec.json.decode(json.dumps(same), type=Proposal).digest == PROPOSAL.digest
    )
    explained = changed(PROPOSAL, ("settings", "mode"), "explain")
    assert explained.digest == PROPOSAL.digest
    assert proposal_text(explained, OWN) == proposal_text(PROPOSAL, OWN)
    for mode in ("predict", "evaluate"):
        assert changed(PROPOSAL, ("settings", "mode"), mode).digest != PROPOSAL.digest


@CASES.each("texts", "name", "settings", "lines")
def test_the_text_of_a_run(name, settings, lines):
    proposal = proposal_of(CASES[name], **settings)
    text = " ".join(proposal_text(proposal, OWN).split())
    for line in lines:
        assert line in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the label of each of their rows that is joined once, masks or not: it"),
        (
            {"privacy.labels": "randomised-response", "privacy.label-epsilon": 2.0},
            "the noisy label of each of their rows that is joined once: it",
        ),
        ({"strategy": "moments"}, ""),
        ({"mode": "predict"}, ""),
    ],
)
def test_the_owner_of_the_label_reads_that_other_sites_work_it_out(settings, words):
    proposal = proposal_of(**settings)
    told = " ".join(proposal_text(proposal, ["north"]).split())
    assert words in told
    assert ("rows that is joined once: it follows from the first" in told) == (
        "noisy" in words
    )
    assert ("masks or not" in told) == ("masks or not" in words)
    # the lab has no label to tell
    assert "follows from the first" not in proposal_text(proposal, ["lab"])


def test_nothing_from_the_server_begins_a_line_or_hides():
    hostile = "x\nRUN sha256:00\r\u2028\u202e\x1b[2J\u200b"
    document = msgspec.to_builtins(PROPOSAL)
    document["query"] = hostile
    for part in document["parts"].values():
        part["site"] = hostile
        part["table"] = hostile + part["table"]
        part["fragment"]["name"], part["fragment"]["table"] = hostile, part["table"]
        part["fragment"]["features"] = [[hostile, f'"{hostile}"']]
    for join in document["joins"]:
        join["left"], join["right"] = hostile + join["left"], hostile + join["right"]
    document["settings"]["encoders"] = f'v.{hostile.split()[0]}=categories("{hostile}")'
    text = proposal_text(msgspec.convert(document, Proposal), OWN)
    lines = text.split("\n")
    assert all(line.isprintable() for line in lines)
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings[0].startswith("RUN sha256:")
    assert headings[1:] == [
        "TABLES",
        "TRAINING",
        "PROTECTION",
        "YOU",
        "QUERY AND SETTINGS",
    ]


def test_a_run_that_cannot_be_explained_is_not_shown():
    with pytest.raises(SettingsError, match="epsilonn"):
        proposal_text(changed(PROPOSAL, ("settings",), {"privacy.epsilonn": 1.0}), OWN)
    with pytest.raises(TPFlowerError, match="malformed fragment"):
        proposal_text(changed(PROPOSAL, ("parts", 0, "fragment"), {"name": "t"}), OWN)


@CASES.each("lists", "before", "tables", "after")
def test_the_digest_is_added_and_nothing_else_changes(before, tables, after):
    text = insert_approval(before, "sha256:11", tables)
    assert text == after
    # a second time changes nothing
    assert insert_approval(text, "sha256:11", tables) == text
    tomllib.loads(text)


def test_a_list_that_is_not_found_is_left_to_its_owner():
    text = 'tables.t.policy."approved\\u002druns" = []'
    with pytest.raises(SiteError, match=r'add "sha256:11" to it by hand'):
        insert_approval(text, "sha256:11", ["t"])
    by_hand = text.replace("[]", '["sha256:11"]')
    assert insert_approval(by_hand, "sha256:11", ["t"]) == by_hand


def test_the_file_stays_what_it_is(tmp_path):
    file = tmp_path / "tables.toml"
    link = tmp_path / "link.toml"
    file.write_bytes(b"tables.t.policy.approved-runs = []\r\n# end\r\n")
    file.chmod(0o640)
    link.symlink_to(file)
    add_approval(link, "sha256:11", ["t"])
    assert (
        file.read_bytes()
        == b'tables.t.policy.approved-runs = ["sha256:11"]\r\n# end\r\n'
    )
    assert file.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    with pytest.raises(SiteError, match=r"none\.toml cannot be changed: No such file"):
        add_approval(tmp_path / "none.toml", "sha256:11", ["t"])


def test_the_policies_of_a_run_that_lack_it(tmp_path):
    rules = {
        "blood": "approved-runs = []",
        "Histories": f'approved-runs = ["{PROPOSAL.digest}"]',
        "visits": "",
        "other": "approved-runs = []",
    }
    text = "".join(
        f"[tables.{table}]\npath = '{table}.csv'\nsite = "
        f"'lab'\n[tables.{table}.policy]\n{rule}\n"
        for table, rule in rules.items()
    )
    shards = sources_of(tmp_path, text)
    assert tables_to_approve(PROPOSAL, shards) == ["blood"]
    # a table of the same name at another site is another owner's
    elsewhere = changed(PROPOSAL, ("parts", 2, "site"), "lab2")
    assert tables_to_approve(elsewhere, shards) == []


def test_a_proposal_in_a_ledger_and_in_a_file(tmp_path):
    document = document_of(PROPOSAL)
    other = proposal_of(seed=3)
    lines = [
        {"event": "answer"},
        {"event": "refuse", "document": document},
        {"event": "refuse", "document": document_of(other)},
        {"event": "refuse", "document": None},
        {"event": "refuse", "document": document},
    ]
    assert [item.digest for item in refused_proposals(lines)] == [
        other.digest,
        PROPOSAL.digest,
    ]
    file = tmp_path / "proposal.json"
    file.write_text(json.dumps(document))
    assert read_proposal(file) == PROPOSAL
    file.write_text('{"query": 3}')
    with pytest.raises(SiteError, match=r"proposal\.json is no proposal of a run"):
        read_proposal(file)
    with pytest.raises(SiteError, match=r"cannot be read: No such file"):
        read_proposal(tmp_path / "none")
    long = changed(PROPOSAL, ("settings", "encoders"), "x" * MOST_BYTES)
    assert document_of(long) is None


def test_fragments_of_the_example_are_what_sites_are_sent():
    for part in PROPOSAL.parts.values():
        assert Fragment.from_json(part.fragment).to_json() == part.fragment
