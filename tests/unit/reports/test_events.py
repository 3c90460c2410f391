"""Lines of the log can be read by programs, and cannot be forged by names."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.log_lines import read
from tp_flower import events
from tp_flower.events import MOST_CHARACTERS, SHOWN_DIGITS


def line(event, **values):
    return str(events.line(event, **values))


@settings(max_examples=60)
@given(st.text(min_size=1, max_size=40))
@example('x" event="forged')
@example("one\nERROR: two")
@example("\x1b[31mred\x7f\x9b\u2028")
@example("back\\slash\\")
@example("a=b c")
@example("%s %(name)s")
def test_a_text_is_read_as_it_was(name):
    written = line("late", site=name, round=3)
    assert read(written) == {"event": "late", "site": name, "round": "3"}
    assert written.isascii()
    assert written.isprintable()


def test_facts_are_in_order_and_what_is_unknown_is_left_out():
    assert line(
        "z",
        a=7,
        b=-1,
        c=0.25,
        d=True,
        e="train.admm",
        f="",
        g=["us", "uk"],
        h=[],
        i=None,
        bytes_up=1,
    ) == ('event=z a=7 b=-1 c=0.250 d=true e=train.admm f="" g="us,uk" h="" bytes-up=1')


def test_a_run_is_named_by_its_first_digits_and_a_long_text_is_cut():
    run = "0123456789abcdef" * 2
    assert read(line("e", run=run))["run"] == run[:SHOWN_DIGITS]
    assert read(line("e", error="x" * 10_000))["error"] == "x" * MOST_CHARACTERS + "..."
