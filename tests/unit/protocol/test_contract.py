"""The pages and the kinds of ledger and policy follow the messages' declarations."""

import copy
import re
from pathlib import Path

import pytest

import tp_flower.privacy.plan as plan_module
from client_apps.methods.registry import join_method_of
from client_apps.privacy import ledger_entries
from scripts.render_pages import OUTLINES, outline, render_pages
from tests.support.files import ROOT, text_of
from tp_flower.methods.admm.messages import TRAIN_ADMM
from tp_flower.methods.coreset.messages import TRAIN_ROWS
from tp_flower.methods.sgd.messages import TRAIN_SGD
from tp_flower.protocol.fields import DP_SGD, NOISY_STATISTICS
from tp_flower.protocol.messages import ACTIONS, Action, declare_action
from tp_flower.sources.policy import LEVELS, REGIONS

DISCLOSURES = [
    (action, declared)
    for action in ACTIONS.values()
    for message in action.messages
    for declared in message.discloses
]
KINDS = {kind for _, declared in DISCLOSURES for kind in declared.kinds}
# the names that only a method's own messages use
OF_METHODS = (
    *(
        "bagged",
        "divides",
        "scores_own_trees",
        "sends_centres",
        "sends_rows",
        "summary",
    ),
    *("private", "reader", "server_reads"),
)
LEAVE_WITH = {
    Action.PREPARE: [("curvature", "admm"), ("gram", "admm")],
    TRAIN_ADMM: [(x, "admm") for x in ("moments", "parameters", "model", "scores")],
    TRAIN_SGD: [(x, "sgd") for x in ("gradients", "batch-scores", "scores")],
    TRAIN_ROWS: [("rows", "coreset"), ("centres", "coreset")],
    Action.CONSENSUS: [("scores", "coreset")],
}


def test_pages_are_rendered_from_the_declarations():
    pages = render_pages()
    for path, text in pages.items():
        assert text_of(ROOT / path) == text, "run scripts/render_pages.py"
    assert "| `train.admm` | *scored* | " in pages["docs/reference/messages.md"]
    assert "| `train.admm` | One epoch " in pages["ARCHITECTURE.md"]
    assert "class Poisson(Objective):" in pages["CONTRIBUTING.md"]
    for path, names in OUTLINES.items():
        assert 0 < len(outline(ROOT / path, names)) <= 15


def test_every_kind_of_planned_release_is_declared():
    constants = {
        value
        for name, value in vars(plan_module).items()
        if name.isupper() and type(value) is str
    }
    # the nearest centre leaves with the centres
    others = {DP_SGD, NOISY_STATISTICS, "nearest"}
    assert len(constants - others) == 16
    assert constants - others <= KINDS
    assert "nearest" not in KINDS


def test_every_note_of_the_ledger_is_declared():
    assert {*ledger_entries._UNCOVERED, "labels"} <= KINDS


def test_every_declared_kind_is_written_into_a_ledger():
    sources = [*(ROOT / "client_apps").rglob("*.py"), Path(plan_module.__file__)]
    code = "".join(text_of(path) for path in sources)
    assert not {kind for kind in KINDS if f'"{kind}"' not in code}, (
        "no site writes these down: give them a scope in ledger_entries.py and `note` "
        "them in the handler, or plan them (tp_flower/privacy/plan.py)"
    )


def test_policies_have_a_level_for_what_messages_tell():
    policies = {declared.policy for _, declared in DISCLOSURES if declared.policy}
    assert policies == {*LEVELS, REGIONS, "coefficients", "bins"}


@pytest.mark.parametrize("action", LEAVE_WITH)
def test_a_release_is_booked_under_the_message_it_leaves_with(action):
    for release, family in LEAVE_WITH[action]:
        carriers = join_method_of(family).carriers
        assert ledger_entries.action_of(release, carriers) == action


def test_the_names_in_disclosures_have_values_in_every_run():
    from strategies.disclosures import (
        NOTHING,
        DisclosureValues,
        Exposure,
        _protections,
        disclosure_values,
    )

    of_methods = dict.fromkeys(OF_METHODS, "")
    method = DisclosureValues(of_methods, {"summaries": NOTHING, "pads": NOTHING})
    exposure = Exposure("o", [TRAIN_ADMM], ["c"], [], True, False, method=method)
    values = disclosure_values(exposure)
    protections = _protections(exposure)
    for _, declared in DISCLOSURES:
        assert declared.covered_by in protections
        assert not declared.when or declared.when in values
        assert not re.search(r"[{}]", declared.carries.format_map(values))


def test_an_action_is_declared_once():
    request, reply = TRAIN_SGD.messages
    for name in ("train.sgd", "train.other"):
        with pytest.raises(ValueError, match="is registered: choose another"):
            declare_action(name, request, reply)


def test_an_action_is_itself_in_every_process():
    """Ray copies the ClientApp of a simulation, with the actions that it answers."""
    for action in ACTIONS.values():
        make, arguments = action.__reduce__()
        assert make(*arguments) is action
        assert copy.deepcopy(action) is action
