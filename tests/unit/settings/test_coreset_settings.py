"""Settings of coresets: what goes with what."""

import pytest

from tp_flower.errors import SettingsError
from tp_flower.settings import Settings


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"coreset-size": -1}, "coreset-size: -1 is out of range: it must be at least"),
        ({"coreset-size": 0.5}, "coreset-size: 0.5 is not a whole number"),
        ({"clusters": 0}, "clusters: 0 is out of range: it must be at least 1"),
        ({"l1": -1}, "l1: -1 is out of range"),
        ({"l1": 0.1}, "l1: strategy 'admm' has no such penalty: leave it 0"),
        (
            {"coreset-solver": "saga", "strategy": "sgd"},
            "coreset-solver: 'saga' does not go with strategy 'sgd': use auto",
        ),
    ],
)
def test_a_bad_value_is_refused(config: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(config)


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("features", {"privacy.features": "dp-sgd"}),
        ("predictions", {"privacy.predictions": 1.0}),
        (
            "labels",
            {"privacy.labels": "randomised-response", "privacy.label-epsilon": 1.0},
        ),
    ],
)
def test_importance_makes_other_noise_void(key: str, config: dict) -> None:
    drawn = {**config, "coreset-size": 10}
    message = f"'importance' does not go with privacy.{key}: .* use 'uniform'"
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(drawn)
    # a sample that reads no row goes with all of them, and so does none
    Settings.from_run_config({**drawn, "coreset-kind": "uniform"})
    Settings.from_run_config(config)


def test_the_size_is_that_of_the_run_or_of_its_method() -> None:
    assert Settings().coreset_rows == 0
    assert Settings(coreset_size=7).coreset_rows == 7
