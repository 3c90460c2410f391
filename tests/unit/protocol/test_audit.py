"""Every field of every message says who could gain by a lie in it, and what is
checked.
"""

import tomllib

import pytest

from scripts import render_pages
from scripts.render_pages import AUDIT, AUDIT_KEYS, audited, audited_fields
from tests.support.files import text_of
from tp_flower.protocol.fields import SITES, Request
from tp_flower.protocol.messages import ACTIONS

ENTRIES = tomllib.loads(text_of(AUDIT))
STRUCTURES = {kind.__name__: kind for kinds in audited().values() for kind in kinds}


def test_every_field_has_an_entry_and_every_entry_a_field():
    declared = {
        (name, field)
        for name, kind in STRUCTURES.items()
        for field in audited_fields(kind)
    }
    written = {(name, field) for name, fields in ENTRIES.items() for field in fields}
    assert declared - written == set(), "these have no entry"
    assert written - declared == set(), "these are no fields"


def test_a_message_without_an_entry_is_named(tmp_path, monkeypatch):
    without = tmp_path / "audit.toml"
    without.write_text("")
    monkeypatch.setattr(render_pages, "AUDIT", without)
    with pytest.raises(LookupError, match=r"audit.toml has no entry of .*: write \["):
        audited()


def test_no_two_structures_have_one_name():
    kinds = [kind.__name__ for kinds in audited().values() for kind in kinds]
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_what_is_gained_and_what_is_checked(name):
    for field, entry in ENTRIES[name].items():
        assert {"lie", "check"} <= entry.keys() <= set(AUDIT_KEYS), field
        assert entry["lie"], field
        # a lie that gains something is checked, or said to be inherent
        gains = not entry["lie"].startswith(("nothing", "See "))
        assert not gains or entry["check"] or entry.get("inherent"), field


def test_whoever_reads_a_message_is_known():
    assert {action.request.reader for action in ACTIONS.values()} == {SITES}
    assert all(issubclass(action.request, Request) for action in ACTIONS.values())
