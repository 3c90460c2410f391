"""Attacks on real sites whose owners have written no policy, or a short one."""

import numpy as np
import pandas as pd
import pytest

from client_apps.data.ledger import open_ledger
from client_apps.privacy.guard import source_id
from strategies import Explain
from tests.support.federated import LocalGrid, read, train
from tests.support.files import case_table
from tp_flower.errors import QueryError, SettingsError, SiteError
from tp_flower.settings import PrivacySettings
from tp_flower.sources.shards import load_tables

CASES = case_table(__file__)
NUMBER = np.arange(100)
PATIENTS = pd.DataFrame(
    {
        "id": NUMBER,
        "name": [f"name-{k}" for k in NUMBER],
        "age": NUMBER % 50 + 20,
        "weight": NUMBER % 37 + 50.5,
        "height": NUMBER % 29 + 150.5,
        "pulse": NUMBER % 23 + 60,
        "hiv": NUMBER % 7 == 0,
        "ill": NUMBER % 3 == 0,
    }
)
PERIODS = {"days": 9, "beds": 11, "staff": 13, "ward": 17}
STAYS = pd.DataFrame(
    {"patient": NUMBER} | {name: NUMBER % period for name, period in PERIODS.items()}
)
ALL = ", ".join(f"p.{name}" for name in PATIENTS)
FOUR = "p.age, p.weight, p.height, p.pulse"
STRICT = CASES["strict"]
JOINED = "FROM patients AS p JOIN stays AS s ON p.id = s.patient"
DUMP = f"SELECT CONCAT_WS('|', {ALL}) AS label, {FOUR}, s.days {JOINED}"
PACKED = f"SELECT p.age * 1000000 + p.weight AS label, {FOUR}, s.days {JOINED}"
ILL = f"SELECT p.ill AS label, {FOUR}, s.days, s.beds, s.staff, s.ward {JOINED}"
NEVER = "releases = { rows = 'never' }"


def sites(folder, policy):
    """A hospital with or without a policy, and a clinic."""
    PATIENTS.to_csv(folder / "patients.csv", index=False)
    rules = "" if policy is None else f"[tables.patients.policy]\n{policy}"
    file = folder / "tables.toml"
    file.write_text(f"[tables.patients]\npath = 'patients.csv'\n{rules}")
    return {"hospital": file, "clinic": {"stays": STAYS}}


def attack(folder, sql, policy, method="admm", **settings):
    """Let a server query a hospital; return what has left it, in words."""
    left = []
    grid = LocalGrid(sites(folder, policy), observe=left.append)
    grid.keep_state(next(iter(grid.contexts)), folder / "state")
    try:
        with grid:
            if method is not Explain:
                settings["test_fraction"] = 0.0
            train(grid, sql, method, **settings)
    finally:
        replies = filter(lambda message: message.has_content(), left)
        texts = [f"{(s := read(m)).header} {s.arrays}" for m in replies]
        assert not [text for text in texts if "name-7" in text]


@pytest.mark.parametrize("method", ["admm", Explain])
@pytest.mark.parametrize(
    ("sql", "policy", "match"),
    [
        (DUMP, None, "table 'patients' at site 'patients-0' has no policy"),
        (f"SELECT p.ill AS label, {FOUR} FROM patients AS p", None, "has no policy"),
        (DUMP, NEVER, "table 'p' has no column 'id'; columns: none .policy.$"),
        (DUMP, STRICT + NEVER, "table 'p' has no column 'name'; columns: id, age, we"),
        (PACKED, STRICT, r"\(expressions\) refuses: the label reads column"),
        (PACKED.replace("* 1000000", ""), STRICT, r"\(expressions\) refuses"),
    ],
)
def test_rows_do_not_leave_as_labels(tmp_path, method, sql, policy, match):
    with pytest.raises((SiteError, QueryError), match=match):
        attack(tmp_path, sql, policy, method)


@pytest.mark.parametrize(
    "action", ["query.extract", "query.statistics", "train.prepare"]
)
def test_no_message_is_answered_without_a_policy(tmp_path, action):
    """As if the server had not asked for a description, or the owner changed mind."""

    def withdraw(message):
        if message.metadata.message_type == action:
            sites(tmp_path, None)

    match = f"{action} failed: table 'patients' at site .* has no policy, and takes"
    grid = LocalGrid(sites(tmp_path, STRICT), observe=withdraw)
    with grid, pytest.raises(SiteError, match=match):
        train(grid, ILL, test_fraction=0.0)


@pytest.mark.parametrize(("key", "match"), CASES["keys"])
def test_a_budget_lets_no_sensitive_column_be_a_key(tmp_path, key, match):
    sql = f"SELECT s.days AS label, {FOUR} FROM patients AS p JOIN stays AS s "
    with pytest.raises(Exception, match=match):
        attack(tmp_path, f"{sql}ON {key} = s.days", STRICT + "epsilon = 0.05")


@pytest.mark.parametrize(
    "features",
    ["p.age", "p.age, p.age AS a, p.age AS b, p.age AS c", "p.age, p.weight, p.pulse"],
)
def test_few_features_are_no_lattice(tmp_path, features):
    with pytest.raises(
        SettingsError, match=r"'p' .*scores-per-rank.* lets 0 more score vectors"
    ):
        attack(tmp_path, f"SELECT s.days AS label, {features} {JOINED}", STRICT)


def test_a_table_of_keys_alone_needs_no_features(tmp_path):
    attack(tmp_path, f"SELECT p.ill AS label, s.days {JOINED}", STRICT, num_epochs=1)
    attack(tmp_path, ILL, STRICT, num_epochs=1)


@pytest.mark.parametrize("model", ["os:system", "torch.hub:load", "builtins:eval"])
def test_no_function_runs_at_a_strict_site_as_a_model(tmp_path, monkeypatch, model):
    def called(*_):
        raise AssertionError("the function is called")

    monkeypatch.setattr("os.system", called)
    match = rf"\(models\) refuses: the run asks for a model '{model}'; allowed: linear"
    with pytest.raises(SiteError, match=match):
        attack(tmp_path, ILL, STRICT, model=model, device="cpu", num_epochs=1)


@pytest.mark.parametrize("method", ["admm", Explain])
def test_one_run_does_not_drain_a_budget(tmp_path, method):
    policy = STRICT + "epsilon = 4\nreleases = { statistics = 'moments' }"

    def spend(epsilon):
        private = PrivacySettings(labels="randomised-response", label_epsilon=epsilon)
        attack(tmp_path, ILL, policy, method, privacy=private)

    match = (
        r"spent epsilon 0 of 1 in this run \(delta 1e-05\) in covered releases; "
        r"requested: 3.9"
    )
    with pytest.raises(SiteError, match=match):
        spend(3.9)
    (source,) = load_tables(str(tmp_path / "tables.toml"))
    ledger = open_ledger(str(tmp_path / "state"))
    assert ledger.total(source_id(source), 1e-5) == 0.0
    if method is Explain:
        spend(0.9)
        assert ledger.total(source_id(source), 1e-5) == pytest.approx(0.9)
