"""Refusals of settings: a bad value each, and settings that contradict each other."""

import re

import pytest

from tests.support.files import case_table
from tp_flower.errors import SettingsError
from tp_flower.settings import Settings, keys

CASES = case_table(__file__)


@CASES.each("refused", "config", "message")
def test_what_cannot_be_used_is_refused(config, message):
    with pytest.raises(
        SettingsError, match=re.escape(message).replace(r"\.\.\.", ".*")
    ):
        Settings.from_run_config(config)


@CASES.each("not-with-importance", "config")
def test_importance_makes_other_noise_void(config):
    drawn = {**config, "coreset-size": 10}
    message = f"'importance' does not go with {next(iter(config))}: .* use 'uniform'"
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(drawn)
    # a sample that reads no row goes with all of them, and so does none
    Settings.from_run_config({**drawn, "coreset-kind": "uniform"})
    Settings.from_run_config(config)


def test_all_problems_are_named_at_once_and_a_wrong_key_with_all_right_ones():
    wrong = {"num-epoch": 1, "l2": "x", "hidden-sizes": "a", "privacy.epsilon": -1}
    with pytest.raises(SettingsError, match=r"^4 settings are not usable") as caught:
        Settings.from_run_config(wrong)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line[4:].split(":")[0] for line in lines) == sorted(wrong)
    assert "Did you mean num-epochs" in str(caught.value)
    assert "Valid settings" not in str(caught.value)
    with pytest.raises(SettingsError) as caught:
        Settings.from_run_config({"zzz": 1})
    assert all(key in str(caught.value) for key in keys())


def test_python_callers_are_checked_too():
    with pytest.raises(SettingsError, match=r"^1 setting is not usable:\n  - seed"):
        Settings(seed=-1)
    with pytest.raises(SettingsError, match="is not a PrivacySettings"):
        Settings(privacy={"epsilon": 3.0})
