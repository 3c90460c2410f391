"""The settings: one declaration each, and a refusal for each bad value."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files import ROOT, text_of
from tp_flower.errors import SettingsError
from tp_flower.methods.method import METHODS
from tp_flower.settings import PrivacySettings, Settings, all_settings, groups, keys
from tp_flower.settings.declare import OneOf, declared

CHOICES = {
    item.key: item.allowed.choices
    for group in groups()
    for item in declared(group)
    if isinstance(item.allowed, OneOf)
}


def shipped_config() -> dict[str, object]:
    content = tomllib.loads(text_of(ROOT / "pyproject.toml"))
    config: dict[str, object] = content["tool"]["flwr"]["app"]["config"]
    groups = {key: v for key, v in config.items() if isinstance(v, dict)}
    # as Flower flattens it
    nested = {
        f"{name}.{key}": v for name, group in groups.items() for key, v in group.items()
    }
    return {key: v for key, v in config.items() if key not in groups} | nested


def test_pyproject_and_settings_have_the_same_keys_and_defaults():
    assert shipped_config() == Settings().to_dict(), "run scripts/render_pages.py"
    assert list(shipped_config()) == list(keys())
    # `1` for a float default would make Flower show users an int
    types = {key: type(value) for key, value in shipped_config().items()}
    assert types == {key: type(value) for key, value in Settings().to_dict().items()}


def test_a_resumed_run_waits_and_logs_otherwise_and_computes_the_same():
    assert {item.key for item in all_settings() if item.may_change} == {
        "resume",
        "tables",
        "site-timeout",
        "on-missing",
        "min-sites",
        "wait-seconds",
        "progress",
        "track",
        "channel",
        "session-seconds",
    }


def test_every_setting_is_described():
    for item in all_settings():
        assert len(item.doc) > 20, item
        assert item.doc.endswith("."), item


def test_int_is_stored_as_float_where_a_float_is_meant():
    assert Settings.from_run_config({}) == Settings()
    settings = Settings.from_run_config({"l2": 1})
    assert settings.l2 == 1.0
    assert type(settings.l2) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3  # type: ignore[misc]


def test_epochs_and_rows_of_a_coreset_follow_the_strategy():
    for strategy, epochs, few in (("admm", 100, 12), ("sgd", 30, 10)):
        assert Settings(strategy=strategy).epochs == epochs
        assert Settings(strategy=strategy, coreset_size=50).epochs == few
        assert Settings(strategy=strategy, num_epochs=3).epochs == 3
    assert Settings().training_sample == 0
    assert Settings(coreset_size=7).training_sample == 7


def test_texts_are_read_as_lists_by_table_and_column():
    for text, sizes in (("32,8", (32, 8)), ("32, 8", (32, 8)), (32, (32,))):
        assert Settings.from_run_config({"hidden-sizes": text}).hidden_sizes == sizes
    settings = Settings.from_run_config(
        {
            "models": "f = mlp, P=my.models:wide",
            "encoders": "f.month = cyclic(12); p.model=one-hot(20) indicator",
            "encode.f.b.c": "none",
            "encode.F.Month": "cyclic(12)",  # says the same again
        }
    )
    models = [settings.model_of(table) for table in ("f", "F", "p", "w")]
    assert models == ["mlp", "mlp", "my.models:wide", "linear"]
    assert settings.encoders == (
        ("f", "month", "cyclic(12)"),
        ("p", "model", "one-hot(20) indicator"),
        ("f", "b.c", "none"),
    )


@given(
    # those that train an MLP
    strategy=st.sampled_from(["admm", "sgd", "gd", "personalised"]),
    hidden_sizes=st.lists(st.integers(1, 99), min_size=1, max_size=3).map(tuple),
    alias=st.from_regex(r"[a-z]{1,5}", fullmatch=True),
    column=st.text(min_size=1),
    l2=st.floats(0, 10),
    seed=st.integers(0, 2**63 - 1),
)
def test_to_dict_is_read_back(strategy, hidden_sizes, alias, column, l2, seed):
    encoders = ((alias, column, "cyclic(12) missing=zero"),)
    settings = Settings(
        models=((alias, "mlp"),),
        encoders=encoders,
        strategy=strategy,
        hidden_sizes=hidden_sizes,
        l2=l2,
        seed=seed,
    )
    assert Settings.from_run_config(settings.to_dict()) == settings


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_every_choice_is_accepted_and_others_are_not(key):
    needs = {"mean": {"mode": "predict"}}
    needs |= {s: {"strategy": n} for n, m in METHODS.items() for s in m.solvers}
    needs |= {choice: {"strategy": "boost"} for choice in ("local", "bagged", "pooled")}
    describes = {"strategy": "moments", "test-fraction": 0.0}
    needs |= {"table-one": describes, "clustered": {"cluster": "c"}}
    needs["kaplan-meier"] = {**describes, "curve-times": "30"}
    needs["label-site"] = {"strategy": "moments"}
    for value in CHOICES[key]:
        if key == "coreset-solver" and value not in ("auto", *needs):
            continue  # of a strategy that is not there
        Settings.from_run_config({key: value, **needs.get(value, {})})
    with pytest.raises(SettingsError, match=f"{key}: 'other' is not one of"):
        Settings.from_run_config({key: "other"})


def test_settings_of_privacy_are_one_object():
    settings = Settings.from_run_config(
        {
            "privacy.labels": "laplace",
            "privacy.label-noise": 0.5,
            "privacy.label-range": "-1, 5.5",
            "privacy.label-classes": "a, b",
            "privacy.features": "dp-sgd",
            "privacy.epsilon": 2,
            "strategy": "sgd",
        }
    )
    assert settings.privacy == PrivacySettings(
        labels="laplace",
        label_noise=0.5,
        label_range=(-1.0, 5.5),
        label_classes=("a", "b"),
        features="dp-sgd",
        epsilon=2.0,
    )
    assert type(settings.privacy.epsilon) is float
    assert Settings.from_run_config(settings.to_dict()) == settings
