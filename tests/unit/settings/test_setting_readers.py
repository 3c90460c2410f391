"""Which strategies read a setting: as declared, and as runs do."""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest

import tp_flower.settings
from tests.support.federated import store, store_sql, train, whole
from tests.support.files import ROOT, text_of
from tp_flower.errors import SettingsError
from tp_flower.methods.method import METHODS
from tp_flower.settings import Settings, all_settings, groups, is_read
from tp_flower.terms import run_terms

PACKAGE = str(Path(tp_flower.settings.__file__).parent)
PACKAGES = ("tp_flower", "strategies", "client_apps")
COMPARING = (run_terms.__file__, str(ROOT / "client_apps"))
RULES = re.compile(r"tp_flower/methods/\w+(/\w+)?/settings\.py$")
"""Sites read settings to compare requests with what was proposed."""
DERIVED = {
    "epochs": ("num_epochs",),
    "memory_bytes": ("memory",),
    "model_of": ("model", "models"),
    "training_sample": ("coreset_size",),
    "is_sampled": ("coreset_size",),
    "is_by_importance": ("coreset_kind",),
    "start": ("boost_from",),
    "method_name": ("strategy",),
    "method": ("strategy",),
    "split": ("test_split",),
    "split_name": ("test_split", "sample"),
    "validation_share": ("validation_fraction",),
    "patience_epochs": ("patience",),
    "fits_effects": ("effects",),
    "effect_tables": ("effects",),
    "fits_factors": ("factors",),
    "factor_tables": ("factors",),
    "factor_width": ("factors",),
    "fits_key_numbers": ("effects", "factors"),
    "asks_bins": ("bins",),
    "most_bins": ("bins",),
    "bins_of": ("bins",),
    "inspects": ("importances", "metrics_by"),
    "asked_workers": ("server_workers",),
}
"""By member of the settings, the fields that it stands for."""
BY_KEYS = {"effects", "factors", "bins"}
SENT_ALONG = {
    "boost": {"l2"},
    "coreset-ridge": {"clusters", "validation_fraction", "server_workers", *BY_KEYS},
    "coreset-kmeans": {"test_split", "server_workers", *BY_KEYS},
    "personalised": {"test_split", "sample", "row_weight", "server_workers"},
    "moments": {"coreset_size", "row_weight", "server_workers", *BY_KEYS},
}
"""By strategy, what its requests hold or its set-up looks at, and nothing uses."""
NOT_IN_A_PLAIN_RUN = {
    "sql",
    "tables",
    "track",
    "candidates",
    "progress",
    "wait_seconds",
    "channel",
    "session_seconds",
}
"""Read by the app, or by the transport between processes."""
CORESETS = {"coreset_kind"}
DESCRIPTIONS = {"describe", "group_by", "curve_times", "min_cell"}
NO_MODEL = {"hidden_sizes", "loss", "test_fraction"}
OF_OTHER_RUNS = {
    "admm": CORESETS,
    "boost": CORESETS,
    "cg": {"standard_errors", "cluster", *CORESETS},
    "sgd": CORESETS,
    "gd": {"batch_size", *CORESETS},
    "coreset-kmeans": NO_MODEL,
    "moments": {"hidden_sizes", "device", "private_tables", "moments_to"}
    | DESCRIPTIONS,
    "personalised": {"max_joined_rows", "memory"},
}
"""By strategy, what is read with other settings only, or declared for all."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    fields: set[str] = set()
    names = {item.field for item in all_settings()}

    def record(self: object, name: str) -> object:
        if name in names or name in DERIVED:
            reader = sys._getframe(1).f_code.co_filename
            others = (PACKAGE, *COMPARING, dataclasses.__file__, "<")
            if not reader.startswith(others) and not RULES.search(reader):
                fields.update(DERIVED.get(name, (name,)))
        return object.__getattribute__(self, name)

    for group in (Settings, *groups()):
        monkeypatch.setattr(group, "__getattribute__", record, raising=False)
    return fields


def run_of(strategy: str) -> None:
    sql = store_sql("squared")
    sites = [whole(store())]
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
    nodes = (node for path in outside for node in ast.walk(ast.parse(text_of(path))))
    members = (node for node in nodes if isinstance(node, ast.Attribute))
    owner = re.compile(r"(settings|privacy|values|of\(\w+\))$")
    read = {node.attr for node in members if owner.search(ast.unparse(node.value))}
    read |= {field for member in DERIVED.keys() & read for field in DERIVED[member]}
    fields = {item.field for item in all_settings()}
    assert not fields - read, "no code reads `settings.<name>` of them"


@pytest.mark.parametrize("strategy", METHODS)
def test_a_strategy_reads_what_is_declared_as_read_by_it(strategy, read):
    run_of(strategy)
    declared = {
        item.field for item in all_settings() if is_read(item, strategy, "train")
    }
    assert {"l2", "seed"} <= read
    undeclared = read - SENT_ALONG.get(strategy, set()) - declared
    assert not undeclared, "the `readers` of their declarations lack the strategy"
    plain = {
        item.field for item in all_settings() if not item.key.startswith("privacy.")
    }
    others = NOT_IN_A_PLAIN_RUN | OF_OTHER_RUNS.get(strategy, set())
    assert plain & declared - read == others, "declared as read by it"


@pytest.mark.parametrize("strategy", METHODS)
def test_a_setting_that_a_strategy_does_not_read_is_refused_or_ignored(strategy):
    for item in all_settings():
        is_plain = item.type in (int, float) and not item.key.startswith("privacy.")
        if not is_plain or is_read(item, strategy, "train"):
            continue
        value = item.default + 1 + (item.key == "leaves")
        if item.key in ("tree-rate", "validation-fraction", "sample"):
            value = 0.5
        config = {"strategy": strategy, item.key: value}
        if item.readers.refusal:
            reader = "'train'" if item.readers.modes else strategy
            with pytest.raises(SettingsError, match=rf"{item.key}: .*{reader}"):
                Settings.from_run_config(config)
        elif not (item.key == "batch-size" and strategy == "gd"):
            Settings.from_run_config(config)
