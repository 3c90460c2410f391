"""The settings: one declaration each, and a refusal for each bad value."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from scripts import render_settings
from tests.support.paths import ROOT
from tp_flower.errors import SettingsError
from tp_flower.methods import METHODS
from tp_flower.settings import GROUPS, KEYS, SETTINGS, Settings
from tp_flower.settings.declare import OneOf, declared

CHOICES = {
    item.key: item.allowed.words
    for group in GROUPS
    for item in declared(group)
    if isinstance(item.allowed, OneOf)
}
PYPROJECT = ROOT / "pyproject.toml"


def shipped_config() -> dict[str, object]:
    content = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    config: dict[str, object] = content["tool"]["flwr"]["app"]["config"]
    groups = {key: own for key, own in config.items() if isinstance(own, dict)}
    # as Flower flattens it
    nested = {
        f"{name}.{key}": v for name, own in groups.items() for key, v in own.items()
    }
    return {key: v for key, v in config.items() if key not in groups} | nested


def test_pyproject_and_settings_have_the_same_keys_and_defaults() -> None:
    assert shipped_config() == Settings().to_dict()
    assert list(shipped_config()) == list(KEYS)


def test_pyproject_and_the_reference_page_are_rendered_from_the_declarations() -> None:
    text = PYPROJECT.read_text(encoding="utf-8")
    assert render_settings.replace_config(text) == text
    page = render_settings.REFERENCE.read_text(encoding="utf-8")
    assert render_settings.render_reference() == page, "scripts/render_settings.py"


def test_pyproject_types_are_the_field_types() -> None:
    # `1` for a float default would make Flower show users an int
    got = {key: type(value) for key, value in shipped_config().items()}
    assert got == {key: type(value) for key, value in Settings().to_dict().items()}


def test_a_resumed_run_waits_and_logs_otherwise_and_computes_the_same() -> None:
    free = {item.key for item in SETTINGS if item.may_change}
    assert free == {
        *("resume", "tables", "site-timeout", "on-missing", "max-stale", "min-sites"),
        *("wait-seconds", "progress", "track"),
    }


def test_every_setting_is_described() -> None:
    for item in SETTINGS:
        assert len(item.doc) > 20, item
        assert item.doc.endswith("."), item


def test_an_empty_run_config_gives_the_defaults() -> None:
    assert Settings.from_run_config({}) == Settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().seed = 3  # type: ignore[misc]


def test_int_is_stored_as_float_where_a_float_is_meant() -> None:
    settings = Settings.from_run_config({"l2": 1})
    assert settings.l2 == 1.0
    assert type(settings.l2) is float


@pytest.mark.parametrize(
    ("strategy", "num_epochs", "epochs"),
    [("admm", 0, 12), ("sgd", 0, 10), ("admm", 3, 3), ("sgd", 3, 3)],
)
def test_epochs(strategy: str, num_epochs: int, epochs: int) -> None:
    assert Settings(strategy=strategy, num_epochs=num_epochs).epochs == epochs


def test_model_of_each_table() -> None:
    settings = Settings.from_run_config(
        {"model": "linear", "models": "f = mlp, P=my.models:wide"}
    )
    models = [settings.model_of(table) for table in ("f", "F", "p", "w")]
    assert models == ["mlp", "mlp", "my.models:wide", "linear"]


@pytest.mark.parametrize("value", ["32,8", "32, 8"])
def test_hidden_sizes(value: str) -> None:
    assert Settings.from_run_config({"hidden-sizes": value}).hidden_sizes == (32, 8)


def test_encoders_come_as_a_string_and_as_keys() -> None:
    settings = Settings.from_run_config(
        {
            "encoders": "f.month = cyclic(12); p.model=one-hot(20) indicator",
            "encode.f.b.c": "none",
            "encode.F.Month": "cyclic(12)",  # says the same again
        }
    )
    assert settings.encoders == (
        ("f", "month", "cyclic(12)"),
        ("p", "model", "one-hot(20) indicator"),
        ("f", "b.c", "none"),
    )


def test_encoders_of_string_and_keys_that_differ_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"encoders: f\.a is given two encoders"):
        Settings.from_run_config({"encoders": "f.a=none", "encode.f.a": "hash(4)"})


def test_one_hidden_size_may_be_an_int() -> None:
    assert Settings.from_run_config({"hidden-sizes": 32}).hidden_sizes == (32,)


@hypothesis_settings(deadline=None)
@given(
    # those that the server solves have a model of their own
    strategy=st.sampled_from([n for n, own in METHODS.items() if not own.solvers]),
    hidden_sizes=st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple),
    alias=st.from_regex(r"[a-z]{1,5}", fullmatch=True),
    column=st.text(min_size=1),
    l2=st.floats(0, 10),
    seed=st.integers(0, 2**63 - 1),
)
def test_to_dict_is_read_back(
    strategy: str,
    hidden_sizes: tuple[int, ...],
    alias: str,
    column: str,
    l2: float,
    seed: int,
) -> None:
    settings = Settings(
        strategy=strategy,
        hidden_sizes=hidden_sizes,
        models=((alias, "mlp"),),
        encoders=((alias, column, "cyclic(12) missing=zero"),),
        l2=l2,
        seed=seed,
    )
    assert Settings.from_run_config(settings.to_dict()) == settings


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
    ],
)
def test_a_bad_value_is_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config({key: value})


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_every_choice_is_accepted_and_others_are_not(key: str) -> None:
    needs = {key_0: {"mode": "predict"} for key_0 in ("mean", "label-site")}
    needs |= {s: {"strategy": n} for n, own in METHODS.items() for s in own.solvers}
    if key in ("graph-norm", "graph-weights"):
        needs |= {value: {"strategy": "personalised"} for value in CHOICES[key]}
    for value in CHOICES[key]:
        if key == "coreset-solver" and value not in ("auto", *needs):
            continue  # of a strategy that is not there
        Settings.from_run_config({key: value, **needs.get(value, {})})
    with pytest.raises(SettingsError, match=f"{key}: 'other' is not one of"):
        Settings.from_run_config({key: "other"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"on-missing": "mean"}, r"on-missing: 'mean' does not go with mode 'train'"),
        ({"on-missing": "stale", "mode": "predict"}, r"'predict': use stop, mean"),
        (
            {"on-missing": "stale", "strategy": "sgd"},
            r"on-missing: 'stale' needs the last scores .* 'sgd' .* use admm, or stop",
        ),
        ({"resume": "r", "mode": "predict"}, r"resume: only training is resumed"),
        (
            {"model-name": "m@20261121-093000-1a2b"},
            r"model-name: a version is of a model that was trained",
        ),
        ({"row-key": "f.a"}, r"row-key: is of mode 'predict' alone, not 'train'"),
        (
            {"predictions-at": "label-site", "mode": "evaluate"},
            r"predictions-at: is of mode 'predict' alone, not 'evaluate'",
        ),
    ],
)
def test_what_does_not_go_with_the_mode_is_refused(config: dict, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(config)


def test_an_unknown_key_is_refused_with_close_matches_and_all_keys() -> None:
    with pytest.raises(
        SettingsError, match=r"num-epoch: .* Did you mean num-epochs"
    ) as e:
        Settings.from_run_config({"num-epoch": 3})
    assert all(key in str(e.value) for key in KEYS)


def test_underscores_are_not_dashes() -> None:
    with pytest.raises(SettingsError, match=r"num_epochs: unknown .* num-epochs"):
        Settings.from_run_config({"num_epochs": 3})


@pytest.mark.parametrize(
    ("config", "message"),
    [
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
    ],
)
def test_settings_that_contradict(config: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings.from_run_config(config)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(SettingsError, match=r"^4 settings are not usable") as e:
        Settings.from_run_config(
            {"sead": 1, "l2": "x", "hidden-sizes": "a", "strategy": "adam"}
        )
    lines = str(e.value).splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [
        "  - sead",
        "  - strategy",
        "  - hidden-sizes",
        "  - l2",
    ]


def test_python_callers_are_checked_too() -> None:
    with pytest.raises(SettingsError, match=r"^1 setting is not usable:\n  - seed"):
        Settings(seed=-1)
