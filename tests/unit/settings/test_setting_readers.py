"""Which strategies read a setting: as declared, and as runs do."""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest

import tp_flower.settings
from tests.support.federated import store, store_sql, train, whole
from tests.support.files import ROOT
from tp_flower.errors import SettingsError
from tp_flower.methods import METHODS
from tp_flower.settings import SETTINGS, Settings

PACKAGE = str(Path(tp_flower.settings.__file__).parent)
PACKAGES = ("tp_flower", "strategies", "client_apps")
DERIVED = {"epochs": ("num_epochs",), "model_of": ("model", "models")}
RESOLVED = {"num_epochs": "epochs", "model": "model_of", "coreset_size": "coreset_rows"}
"""By field, the member of the settings that is read in its place."""
SENT_ALONG = {"coreset-ridge": {"clusters"}}
"""By strategy, what its requests hold and nothing uses."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The fields of settings that code outside their package has read."""
    fields: set[str] = set()
    names = {entry.name for entry in dataclasses.fields(Settings)} - {"privacy"}

    def record(self: Settings, name: str) -> object:
        if name in names or name in DERIVED:
            reader = sys._getframe(1).f_code.co_filename
            if not reader.startswith((PACKAGE, dataclasses.__file__, "<")):
                fields.update(DERIVED.get(name, (name,)))
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Settings, "__getattribute__", record, raising=False)
    return fields


def run_of(strategy: str) -> None:
    sql, sites = store_sql("squared"), [whole(store())]
    fields: dict[str, object] = {"num_epochs": 1, "device": "cpu"}
    if strategy == "coreset-kmeans":
        sql = sql.replace("o.qty AS label, ", "")
        fields |= {"coreset_size": 30, "clusters": 3}
    if strategy == "personalised":
        orders = store()["orders"]
        sql = "SELECT qty AS label, day FROM orders"
        sites = [{"orders": [part]} for part in (orders[:25], orders[25:])]
    train(sites, sql, strategy, **fields)


def test_every_setting_is_read_somewhere():
    modules = (path for top in PACKAGES for path in (ROOT / top).rglob("*.py"))
    outside = [path for path in modules if not str(path).startswith(PACKAGE)]
    nodes = (node for path in outside for node in ast.walk(ast.parse(path.read_text())))
    members = (node for node in nodes if isinstance(node, ast.Attribute))
    owner = re.compile(r"(settings|privacy)$")
    read = {node.attr for node in members if owner.search(ast.unparse(node.value))}
    fields = {RESOLVED.get(item.field, item.field) for item in SETTINGS}
    assert not fields - read, "no code reads `settings.<name>` of them"


@pytest.mark.parametrize("strategy", METHODS)
def test_a_strategy_reads_what_is_declared_as_read_by_it(strategy, read):
    run_of(strategy)
    declared = {
        item.field for item in SETTINGS if item.readers.include(strategy, "train")
    }
    assert {"l2", "seed"} <= read
    undeclared = read - SENT_ALONG.get(strategy, set()) - declared
    assert not undeclared, "the `readers` of their declarations lack the strategy"


@pytest.mark.parametrize("strategy", METHODS)
def test_a_setting_that_a_strategy_does_not_read_is_refused_or_ignored(strategy):
    for item in SETTINGS:
        is_plain = item.type in (int, float) and not item.key.startswith("privacy.")
        if not is_plain or item.readers.include(strategy, "train"):
            continue
        config = {"strategy": strategy, item.key: item.default + 1}
        if item.key == "momentum":
            config[item.key] = 0.5
        if item.readers.refusal:
            with pytest.raises(SettingsError, match=rf"{item.key}: .*{strategy}"):
                Settings.from_run_config(config)
        elif not (item.key == "batch-size" and strategy == "gd"):
            Settings.from_run_config(config)
