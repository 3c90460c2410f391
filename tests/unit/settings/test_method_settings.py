"""The settings of a method from elsewhere: its group is registered with the method."""

from dataclasses import dataclass, replace

import pytest

from tp_flower.errors import SettingsError
from tp_flower.methods.cg import CG
from tp_flower.methods.method import METHODS, register
from tp_flower.settings import Settings, all_settings, is_read, keys
from tp_flower.settings.declare import BY_METHOD, Range, setting
from tp_flower.settings.rules import Rules, names_of
from tp_flower.settings.training import FITTED


@dataclass(frozen=True)
class ToySettings:
    """A toy."""

    readers = BY_METHOD

    toy_steps: int = setting(3, "Steps of the toy.", Range(1))


def _conflicts(settings):
    if settings.of(ToySettings).toy_steps > settings.epochs:
        yield "toy-steps: more than num-epochs"


RULES = Rules(
    groups=(ToySettings,),
    reads=names_of(ToySettings) | FITTED,
    conflicts=_conflicts,
    preference=lambda settings: 9 * (settings.of(ToySettings).toy_steps > 3),
    synonyms={"toy-moves": "toy-steps", "lr": "nothing of a toy"},
)
TOY = replace(CG, name="toy", rules=f"{__name__}:RULES")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(METHODS, "toy", TOY)


def test_they_are_read_and_written_as_all_others():
    settings = Settings.from_run_config({"strategy": "toy", "toy-steps": 5})
    assert settings == Settings(strategy="toy", toy_steps=5)
    assert settings != Settings(strategy="toy")
    for same in (
        settings,
        replace(settings, seed=1),
        settings.with_fields(seed=2),
        Settings.from_run_config(settings.to_dict()),
    ):
        assert same.of(ToySettings) == ToySettings(5)
    assert Settings().of(ToySettings) == ToySettings()
    assert settings.proposed()["toy-steps"] == 5
    assert keys().index("toy-steps") < keys().index("privacy.labels")
    (item,) = (item for item in all_settings() if item.key == "toy-steps")
    assert [name for name in METHODS if is_read(item, name, "train")] == ["toy"]


def test_the_rules_of_the_method_hold():
    assert Settings().method_name == "cg"
    assert Settings(toy_steps=4).method_name == "toy"
    for wrong, message in (
        ({"toy-steps": 0}, "toy-steps: 0 is out of range"),
        ({"toy-steps": 5, "num-epochs": 2}, "toy-steps: more than num-epochs"),
        ({"toy-moves": 1}, "toy-moves: unknown setting. It is toy-steps here"),
        ({"lr": 1}, "It is learning-rate, or tree-rate of boost, or nothing of a toy"),
        ({"strategy": "toy", "l2": 1.0}, "no such penalty: it would have no effect"),
        ({"strategy": "toys"}, "'toys' is not one of auto, admm, .*, toy"),
    ):
        with pytest.raises(SettingsError, match=message):
            Settings.from_run_config(wrong)
    with pytest.raises(TypeError, match="has no argument 'toy_stepps'"):
        Settings(toy_stepps=1)
    with pytest.raises(ValueError, match="'toy' is registered: choose another name"):
        register(replace(TOY))
