"""What an epsilon is true of: a row's features only if nothing without noise tells of
them.
"""

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from tp_flower.privacy import epsilons as module
from tp_flower.privacy.epsilons import KINDS, Released, compose, epsilons
from tp_flower.privacy.mechanisms import (
    GIVEN_ENCODER,
    GIVEN_KEYS,
    GIVEN_MESSAGES,
    GIVEN_NOISELESS_MODEL,
    GIVEN_SAVED_MODEL,
    SCORE_SUMS,
    SCORES_TELL,
    Gaussian,
    PureDp,
)
from tp_flower.protocol.messages import ACTIONS


def uncovered(kind):
    """A release without noise."""
    return Released(kind, "", None)


DELTA = 1e-5
UNCOVERED = "none: no noise covers "
NOISE = Gaussian(5.0)
MODEL = Released("gram", "", NOISE)
GIVEN = Released("gram", f"given {GIVEN_MESSAGES}", NOISE)
SCORES = Released("scores", "", NOISE, 3)
KEYS = Released("keys", "hashes", None)
COUNTS = uncovered("counts")
LABELS = Released("labels", "randomised response", PureDp(2.0))
HARMLESS = [KEYS, COUNTS, LABELS, Released("labels", "in the clear", None)]
MASKED = Released("scores", SCORE_SUMS, None)
CLEAR = Released("scores", SCORES_TELL, None)
SUMS = "none: sums of scores tell of the features"
CASES = {
    "nothing": ([], "", "", ""),
    "masked": ([MASKED], SUMS, "", "none"),
    "clear": ([Released("batch-scores", SCORES_TELL, None)], SCORES_TELL, "", "none"),
    "noisy models, masked scores": ([GIVEN, MASKED], SUMS, "number", "none"),
    "one of two": ([GIVEN, MASKED, CLEAR], SCORES_TELL, "number", "none"),
    "curvature": ([uncovered("curvature")], UNCOVERED + "curvature", "none", ""),
    "one model without noise": (
        [MODEL, SCORES, uncovered("moments")],
        UNCOVERED + "moments",
        "none",
        "number",
    ),
    "noisy": ([MODEL, SCORES], "number", "number", "number"),
    "statistics": (
        [MODEL, SCORES, uncovered("statistics")],
        UNCOVERED + "statistics",
        "number",
        "number",
    ),
    "ranks": (
        [MODEL, SCORES, uncovered("times")],
        UNCOVERED + "times",
        "number",
        "number",
    ),
    "fitted encoder": (
        [MODEL._replace(scope=f"sealed; given {GIVEN_ENCODER}"), SCORES],
        "none: the encoder is fitted to the rows",
        "number",
        "number",
    ),
    "features that are keys": (
        [MODEL._replace(scope=f"given {GIVEN_KEYS}"), SCORES],
        "none: keys tell features that are joined on",
        "number",
        "number",
    ),
    "messages": ([GIVEN, SCORES], UNCOVERED + "scores", "number", "number"),
    "noisy scores of a model without": (
        [SCORES._replace(scope=f"given {GIVEN_NOISELESS_MODEL}")],
        "none: the model is trained without noise",
        "",
        "number",
    ),
    "predicted": (
        [SCORES._replace(scope=f"given {GIVEN_SAVED_MODEL}")],
        "none: the model comes from an earlier run",
        "",
        "number",
    ),
    "of another version": (
        [MODEL, SCORES, uncovered("new")],
        UNCOVERED + "new",
        "number",
        "number",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_features_have_an_epsilon_only_where_all_that_tells_of_them_has_noise(name):
    released, *expected = CASES[name]
    for more in ([], HARMLESS[:2], HARMLESS):
        result = epsilons([*released, *more], DELTA)
        for value, text in zip(
            (result.features, result.models, result.scores), expected, strict=True
        ):
            shown = "number" if isinstance(value, float) else value
            assert shown.startswith(text)
            assert bool(shown) == bool(text)


def test_numbers_are_those_of_dp_accounting_and_labels_are_apart():
    released = [MODEL, SCORES, KEYS, LABELS]
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(GaussianDpEvent(5.0), 1 + 3)
    result = epsilons(released, DELTA)
    assert result.features == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    assert result.features > result.scores > result.models
    assert result.labels == 2.0
    accountant.compose(LaplaceDpEvent(1 / 2.0))
    assert (
        accountant.get_epsilon(DELTA)
        <= compose(released, DELTA)
        <= result.features + 2.0
    )
    # what is not there costs nothing
    assert compose([KEYS], DELTA) == 0.0
    assert epsilons([KEYS, COUNTS], DELTA) == module.Epsilons("", "", "", "")


RELEASES = st.builds(
    Released,
    st.sampled_from(sorted({kind for kinds in KINDS.values() for kind in kinds})),
    st.sampled_from(["", SCORE_SUMS, SCORES_TELL, GIVEN_ENCODER, GIVEN_MESSAGES]),
    st.sampled_from([None, NOISE]),
    st.integers(1, 3),
)


@given(st.lists(RELEASES, max_size=6), RELEASES)
def test_no_release_gives_features_an_epsilon_that_they_did_not_have(released, more):
    before = epsilons(released, DELTA)
    after = epsilons([*released, more], DELTA)
    tells = more.subject in (module.FEATURES, module.MODELS, module.SCORES)
    if not tells:
        assert after.features == before.features
    elif more.mechanism is None:
        assert str(after.features).startswith("none: ")
    if str(before.features).startswith("none"):
        assert str(after.features).startswith("none")
    elif isinstance(before.features, float) and isinstance(after.features, float):
        assert after.features >= before.features


def test_every_kind_of_release_is_about_something():
    declared = {
        kind
        for action in ACTIONS.values()
        for message in action.messages
        for item in message.discloses
        for kind in item.kinds
    }
    listed = [kind for kinds in KINDS.values() for kind in kinds]
    assert sorted(listed) == sorted(declared)
