"""A run config of a TOML file and of single settings."""

import re
from pathlib import Path

import pytest

from tests.support.files import case_table
from tp_flower.errors import SettingsError
from tp_flower.settings import Settings, keys
from tp_flower.settings.run_config import (
    config_of_keywords,
    read_override,
    read_run_config,
)

CASES = case_table(__file__)
FILE = """
l2 = 0.5
seed = 3
tables = "tables.toml"
[privacy]
labels = "clear"
[encode.f]
month = "cyclic(12)"
"""


@CASES.each("overrides", "text", "key", "value")
def test_a_value_is_toml_or_a_word(text, key, value):
    assert read_override(text) == (key, value)
    assert type(read_override(text)[1]) is type(value)


def test_single_settings_win_over_those_of_the_file(tmp_path):
    file = tmp_path / "my-run.toml"
    file.write_text(FILE)
    overrides = [
        "l2=1e-3",
        "task=regression",
        "privacy.labels=laplace",
        "privacy.label-epsilon=2.0",
        "privacy.label-range=0, 9",
    ]
    config = read_run_config(file, overrides)
    settings = Settings.from_run_config(config)
    assert settings.l2 == 0.001
    assert settings.seed == 3
    assert settings.task == "regression"
    assert settings.privacy.labels == "laplace"
    assert settings.privacy.label_epsilon == 2.0
    assert settings.encoders == (("f", "month", "cyclic(12)"),)


def test_relative_tables_start_where_they_are_written(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my-run.toml").write_text('tables = "tables.toml"')
    monkeypatch.chdir(tmp_path)
    file = Path("runs/my-run.toml")
    for overrides, tables in (
        ([], f"{tmp_path}/runs/tables.toml"),
        (["tables=t.toml"], f"{tmp_path}/t.toml"),
        (["tables=/a/t.toml"], "/a/t.toml"),
        (["tables="], ""),
    ):
        assert read_run_config(file, overrides)["tables"] == tables


@CASES.each("refused", "text", "overrides", "message")
def test_refused(text, overrides, message, tmp_path):
    file = tmp_path / "my-run.toml"
    if text != "none":
        file.write_text(text)
    with pytest.raises(SettingsError) as refusal:
        Settings.from_run_config(read_run_config(file, overrides))
    assert re.search(message, str(refusal.value))


def test_keywords_are_the_settings_of_a_file(tmp_path):
    keywords = {"hidden_sizes": [32, 8], "privacy_scores": "clear", "l2": 0.1}
    config = config_of_keywords({**keywords, "output_dir": tmp_path})
    settings = Settings.from_run_config(config)
    assert settings.hidden_sizes == (32, 8)
    assert settings.privacy.scores == "clear"
    assert settings.output_dir == str(tmp_path)
    # every setting has a keyword
    keywords = {key.replace(".", "_").replace("-", "_"): key for key in keys()}
    assert config_of_keywords(keywords) == {key: key for key in keys()}


def test_an_unknown_keyword_is_refused_with_the_closest_setting():
    for keywords, hint in (
        ({"num_epoch": 3}, "num-epochs"),
        ({"privacy_scorez": "clear"}, "privacy.scores"),
        ({"max_iter": 3}, "num-epochs"),
    ):
        with pytest.raises(SettingsError, match=f"unknown setting.*{hint}"):
            Settings.from_run_config(config_of_keywords(keywords))
