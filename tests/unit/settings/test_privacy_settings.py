"""The settings of privacy: read from a run config, and a refusal for each bad value."""

import pytest

from tp_flower.errors import SettingsError
from tp_flower.settings import PrivacySettings, Settings

CONFIG = {
    "privacy.labels": "laplace",
    "privacy.label-noise": 0.5,
    "privacy.label-range": "-1, 5.5",
    "privacy.label-classes": "a, b",
    "privacy.features": "dp-sgd",
    "privacy.epsilon": 2,
    "privacy.local-steps": 7,
}


def test_run_config_keys_are_the_fields():
    found = Settings.from_run_config(CONFIG).privacy
    assert found == PrivacySettings(
        labels="laplace",
        label_noise=0.5,
        label_range=(-1.0, 5.5),
        label_classes=("a", "b"),
        features="dp-sgd",
        epsilon=2.0,
        local_steps=7,
    )
    assert type(found.epsilon) is float


def test_settings_survive_the_run_config():
    settings = Settings.from_run_config({**CONFIG, "strategy": "sgd"})
    assert Settings.from_run_config(settings.to_dict()) == settings


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"privacy.labelled": "clear"},
            "privacy.labelled: unknown setting.*privacy.label",
        ),
        ({"privacy.labels": "none"}, "privacy.labels: 'none' is not one of clear, lap"),
        ({"privacy.epsilon": 0}, "privacy.epsilon: 0 is out of range.*above 0"),
        ({"privacy.delta": 1}, "privacy.delta: 1 is out of range.*below 1"),
        ({"privacy.sample-rate": 1.5}, "privacy.sample-rate: 1.5 is out of range"),
        ({"privacy.clip": 0}, "privacy.clip: 0 is out of range: .* at least 1e-12"),
        ({"privacy.prediction-clip": 1e300}, "below 1e\\+12"),
        ({"privacy.clip": "1"}, "privacy.clip: '1' is not a finite number"),
        ({"privacy.local-steps": 1.5}, "privacy.local-steps: 1.5 is not a whole"),
        ({"privacy.label-range": "a, b"}, "privacy.label-range: 'a, b' is not a range"),
        ({"privacy.label-range": "1"}, "label-range: '1' is not a range, low below"),
        ({"privacy.label-range": "2, 1"}, "label-range: '2, 1' is not a range"),
        ({"privacy.label-classes": "a, a"}, "label-classes: .* different classes"),
        ({"privacy.labels": "laplace"}, "one of privacy.label-epsilon .* none is"),
        (
            {"privacy.labels": "randomised-response"},
            "'randomised-response' needs privacy.label-epsilon, which is not set",
        ),
        ({"privacy.epsilon": 4}, "epsilon: it is set, but privacy.features is 'clear'"),
        (
            {"privacy.features": "dp-sgd", "privacy.adversary": "outsider"},
            "privacy.adversary: 'outsider' needs privacy.predictions: scores",
        ),
        ({"privacy.adversary": "outsider"}, "adversary: it is set, but privacy.feat"),
        ({"privacy.label-range": "0, 5"}, "label-range: it is set, but privacy.labels"),
        ({"privacy.prediction-clip": 2}, "it is set, but privacy.predictions is 0.0"),
        ({"privacy.label-noise": 1.0}, "privacy.labels: 'clear' has no noise"),
        (
            {
                "privacy.labels": "laplace",
                "privacy.label-noise": 1.0,
                "privacy.label-epsilon": 1.0,
            },
            "both are set",
        ),
        (
            {"privacy.labels": "randomised-response", "privacy.label-noise": 1.0},
            "privacy.label-noise: it is of 'laplace'",
        ),
        (
            {"privacy.features": "statistics", "strategy": "sgd"},
            "privacy.features: 'statistics' needs strategy 'admm'",
        ),
        (
            {"privacy.features": "statistics", "models": "f=mlp"},
            "privacy.features: 'statistics' needs linear models",
        ),
    ],
)
def test_bad_settings_are_refused(config, match):
    with pytest.raises(SettingsError, match=match):
        Settings.from_run_config(config)


def test_several_problems_are_told_at_once():
    config = {"privacy.epsilon": -1, "privacy.features": "x", "rho": -1}
    with pytest.raises(SettingsError, match="3 settings are not usable"):
        Settings.from_run_config(config)


def test_settings_take_privacy_as_one_object():
    privacy = PrivacySettings(features="dp-sgd", epsilon=3.0)
    assert Settings(privacy=privacy).privacy.epsilon == 3.0
    with pytest.raises(SettingsError, match="is not a PrivacySettings"):
        Settings(privacy={"epsilon": 3.0})
