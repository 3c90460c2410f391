"""The settings of a proposal: all but the operator's own."""

from hypothesis import given
from hypothesis import strategies as st

from tp_flower.settings import Settings, all_settings, keys

OPERATIONAL = {
    "sql",
    "tables",
    "cutoff-grid",
    "sealed-cutoffs",
    "resume",
    "device",
    "server-workers",
    "output-dir",
    "progress",
    "track",
    "max-joined-rows",
    "memory",
    "site-timeout",
    "on-missing",
    "survival-times",
    "min-sites",
    "wait-seconds",
    "channel",
    "session-seconds",
}
"""Settings by which no site is asked for anything else; a proposal has the query
itself."""


def test_every_setting_is_proposed_unless_it_is_declared_operational():
    assert {item.key for item in all_settings() if item.is_operational} == OPERATIONAL
    assert Settings().proposed().keys() == set(keys()) - OPERATIONAL


def test_what_may_change_in_a_resumed_run_is_operational():
    may_change = {item.key for item in all_settings() if item.may_change}
    assert may_change <= OPERATIONAL


@given(st.builds(Settings, num_epochs=st.integers(0, 9), l2=st.floats(0, 1)))
def test_a_site_reads_what_the_server_has_proposed(settings):
    proposed = Settings.from_run_config(settings.proposed())
    assert proposed == settings.with_fields(strategy=settings.method_name)
