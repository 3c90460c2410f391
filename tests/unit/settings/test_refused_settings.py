"""Refusals of settings: a bad value each, and settings that contradict each other."""

import pytest

from tp_flower.errors import SettingsError
from tp_flower.settings import KEYS, Settings


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sql", 3, r"sql: 3 is not a string"),
        ("num-epochs", "ten", r"num-epochs: 'ten' is not a whole number"),
        ("num-epochs", 2.0, r"num-epochs: 2.0 is not a whole number"),
        ("num-epochs", True, r"num-epochs: True is not a whole number"),
        ("num-epochs", -1, r"num-epochs: -1 is out of range: it must be at least 0"),
        ("l2", "x", r"l2: 'x' is not a finite number"),
        ("l2", False, r"l2: False is not a finite number"),
        ("l2", float("nan"), r"l2: nan is not a finite number"),
        ("rho", float("inf"), r"rho: inf is not a finite number"),
        ("progress", 1, r"progress: 1 is not true or false"),
        ("strategy", "adam", r"strategy: 'adam' is not one of admm, sgd"),
        ("task", "ranking", r"not one of auto, regression, classification"),
        ("over-relaxation", 2, r"must be at least 0 and below 2"),
        ("momentum", 1, r"must be at least 0 and below 1"),
        ("test-fraction", -0.1, r"test-fraction: -0.1 is out of range: .* at least 0"),
        ("site-timeout", 0, r"must be above 0"),
        ("inner-rounds", 0, r"must be at least 1"),
        ("max-categories", 1, r"must be at least 2"),
        ("max-joined-rows", 0, r"must be at least 1"),
        ("encoders", "f", r"encoders: 'f' is not <table>\.<column>=<encoder>"),
        ("encoders", "f.a=none; =", r"encoders: '=' is not <table>"),
        ("encoders", 'f."a=none', r"has a double quote without its partner"),
        ("encoders", "f.a=stand", r"encoders: f\.a: 'stand' is no encoder: .* one of"),
        ("encoders", "f.a=none; F.A=hash(4)", r"F\.A is given two encoders"),
        ("encoders", 3, r"encoders: 3 is not a list of \(table, column, encoder\)"),
        ("encode.f.a", "hash", r"encoders: f\.a: hash needs a whole number from 2"),
        ("encode.f.a", 4, r"encode\.f\.a: 4 is not a string such as 'cyclic"),
        ("encode.f", "none", r"encode\.f: the key must be encode\.<table>\.<column>"),
        ("model", "resnet", r"'resnet' is not a model: it must be \"linear\""),
        ("model", "my-pkg:f", r"'my-pkg:f' is not a model"),
        ("models", "f", r"models: 'f' is not a list such as"),
        ("models", "f=", r"models: 'f=' is not a list such as"),
        ("models", "f=resnet", r"models: 'resnet' is not a model"),
        ("models", "f=mlp, F=linear", r"models: names f more than once"),
        ("models", 3, r"models: 3 is not a list such as"),
        ("staleness", 2, r"staleness: 2 is out of range: .* at least 0 and below 2"),
        ("batch-size", "auto", r"batch-size: 'auto' is not a whole number"),
        ("batch-size", 1.5, r"batch-size: 1.5 is not a whole number"),
        ("batch-size", True, r"batch-size: True is not a whole number"),
        ("model-name", "Mine", r"model-name: 'Mine' is no name of a model"),
        ("model-name", "../x", r"model-name: '\.\./x' is no name of a model"),
        ("model-name", "m@1", r"model-name: '1' is no version of a model"),
        ("row-key", "f.a b", r"row-key: 'f\.a b' is no column"),
        ("track", "wandb", r"track: 'wandb' is not one of tensorboard, mlflow"),
        ("max-stale", 0, r"max-stale: 0 is out of range: it must be at least 1"),
        ("hidden-sizes", "a", r"hidden-sizes: 'a' is not a comma-separated list"),
        ("hidden-sizes", "", r"hidden-sizes: '' is not a comma-separated list of"),
        ("hidden-sizes", "0", r"list of widths of at least 1"),
        ("hidden-sizes", 1.5, r"1.5 is not a comma-separated list of widths"),
        ("coreset-size", -1, r"coreset-size: -1 is out of range: it must be at least"),
        ("coreset-size", 0.5, r"coreset-size: 0.5 is not a whole number"),
        ("clusters", 0, r"clusters: 0 is out of range: it must be at least 1"),
        ("l1", -1, r"l1: -1 is out of range"),
        ("l1", 0.1, r"l1: strategy 'admm' has no such penalty: leave it 0"),
        ("privacy.labelled", "x", r"labelled: unknown setting.*privacy.label"),
        ("privacy.labels", "none", r"privacy.labels: 'none' is not one of clear, lap"),
        ("privacy.labels", "laplace", r"one of privacy.label-epsilon .* none is"),
        ("privacy.epsilon", 0, r"privacy.epsilon: 0 is out of range.*above 0"),
        ("privacy.epsilon", 4, r"epsilon: it is set, but privacy.features is 'clear'"),
        ("privacy.delta", 1, r"privacy.delta: 1 is out of range.*below 1"),
        ("privacy.sample-rate", 1.5, r"privacy.sample-rate: 1.5 is out of range"),
        ("privacy.clip", 0, r"privacy.clip: 0 is out of range: .* at least 1e-12"),
        ("privacy.clip", "1", r"privacy.clip: '1' is not a finite number"),
        ("privacy.prediction-clip", 1e300, r"below 1e\+12"),
        ("privacy.prediction-clip", 2, r"it is set, but privacy.predictions is 0.0"),
        ("privacy.local-steps", 1.5, r"privacy.local-steps: 1.5 is not a whole"),
        ("privacy.label-range", "a, b", r"label-range: 'a, b' is not a range"),
        ("privacy.label-range", "1", r"label-range: '1' is not a range, low below"),
        ("privacy.label-range", "2, 1", r"label-range: '2, 1' is not a range"),
        ("privacy.label-range", "0, 5", r"range: it is set, but privacy.labels"),
        ("privacy.label-classes", "a, a", r"label-classes: .* different classes"),
        ("privacy.label-noise", 1.0, r"privacy.labels: 'clear' has no noise"),
        ("privacy.adversary", "outsider", r"adversary: it is set, but privacy.feat"),
        ("on-missing", "mean", r"on-missing: 'mean' does not go with mode 'train'"),
        (
            "model-name",
            "m@20261121-093000-1a2b",
            r"name: a version is of a model",
        ),
        ("predictions-at", "label-site", r"is of mode 'predict' alone, not 'train'"),
        ("coreset-solver", "saga", r"does not go with strategy 'admm': use auto"),
        ("row-key", "f.a", r"row-key: is of mode 'predict' alone, not 'train'"),
        ("num_epochs", 3, r"num_epochs: unknown .* num-epochs"),
    ],
)
def test_a_bad_value_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config({key: value})


STATISTICS = {"privacy.features": "statistics"}
RESPONSE = {"privacy.labels": "randomised-response"}
LAPLACE = {"privacy.labels": "laplace", "privacy.label-noise": 1.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"on-missing": "stale", "mode": "predict"}, r"'predict': use stop, mean"),
        (
            {"on-missing": "stale", "strategy": "sgd"},
            r"on-missing: 'stale' needs the last scores .* 'sgd' .* use admm, or stop",
        ),
        ({"resume": "r", "mode": "predict"}, r"resume: only training is resumed"),
        (
            {"encoders": "f.a=none", "encode.f.a": "hash(4)"},
            r"encoders: f\.a is given two encoders",
        ),
        (
            {"task": "regression", "loss": "logistic"},
            r"loss: 'logistic' does not fit task 'regression': use auto, squared",
        ),
        (
            {"task": "classification", "loss": "squared"},
            r"'squared' does not fit task 'classification': use auto, logistic",
        ),
        ({"lou": "gram", "model": "mlp"}, r"'gram' needs linear models, but 'mlp'"),
        ({"lou": "gram", "models": "f=mlp"}, r"'gram' needs linear models, but 'mlp'"),
        (RESPONSE, r"response' needs privacy.label-epsilon, which is not set"),
        ({**LAPLACE, "privacy.label-epsilon": 1.0}, r"both are set"),
        ({**LAPLACE, **RESPONSE}, r"privacy.label-noise: it is of 'laplace'"),
        (
            {"privacy.features": "dp-sgd", "privacy.adversary": "outsider"},
            r"privacy.adversary: 'outsider' needs privacy.predictions: scores",
        ),
        ({**STATISTICS, "strategy": "sgd"}, r"'statistics' needs strategy 'admm'"),
        ({**STATISTICS, "models": "f=mlp"}, r"'statistics' needs linear models"),
    ],
)
def test_settings_that_contradict_are_refused(config: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(config)


@pytest.mark.parametrize(
    "config",
    [
        {"privacy.features": "dp-sgd"},
        {"privacy.predictions": 1.0},
        {**RESPONSE, "privacy.label-epsilon": 1.0},
    ],
)
def test_importance_makes_other_noise_void(config: dict) -> None:
    drawn = {**config, "coreset-size": 10}
    key = next(iter(config))
    message = f"'importance' does not go with {key}: .* use 'uniform'"
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(drawn)
    # a sample that reads no row goes with all of them, and so does none
    Settings.from_run_config({**drawn, "coreset-kind": "uniform"})
    Settings.from_run_config(config)


def test_an_unknown_key_is_refused_with_close_matches_and_all_keys() -> None:
    match = r"num-epoch: .* Did you mean num-epochs"
    with pytest.raises(SettingsError, match=match) as caught:
        Settings.from_run_config({"num-epoch": 3})
    assert all(key in str(caught.value) for key in KEYS)


def test_all_problems_are_named_at_once() -> None:
    config = {"sead": 1, "l2": "x", "hidden-sizes": "a", "privacy.epsilon": -1}
    with pytest.raises(SettingsError, match=r"^4 settings are not usable") as caught:
        Settings.from_run_config(config)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line[4:].split(":")[0] for line in lines) == sorted(config)


def test_python_callers_are_checked_too() -> None:
    with pytest.raises(SettingsError, match=r"^1 setting is not usable:\n  - seed"):
        Settings(seed=-1)
    with pytest.raises(SettingsError, match="is not a PrivacySettings"):
        Settings(privacy={"epsilon": 3.0})
