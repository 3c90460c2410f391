"""Owners list code, pin keys, name partners and approve runs; the model is the
simulation's.
"""

import json
import re

import numpy as np
import pandas as pd
import pytest

from client_apps.data.key_files import site_key
from scripts.data.make_store import main as make_store
from scripts.deploy.deployment import STORE_FILES, copy_app, store_entries
from strategies import TablePuppetCG
from tests.support.command_line import printed_by
from tests.support.deployment import deployed
from tests.support.federated import LocalGrid
from tests.support.files import ROOT, case_table
from tp_flower.query import Query
from tp_flower.settings import Settings

CASES = case_table(__file__)
SQL = CASES["sql"]
RUN = {"sql": SQL, "task": "regression", "num-epochs": 2}
ALLOWED = CASES["allowed"]
RESTRICTED = CASES["restricted"]


def allow(policy, allowed):
    """Take the # from lines of the policy that the command has written."""
    for name, columns in allowed.items():
        before, start, rest = policy.partition(f"\n{name} = [\n")
        lines, end, after = rest.partition("\n]\n")
        for column in columns:
            assert f'# "{column}",' in lines
            lines = lines.replace(f'# "{column}",', f'"{column}",')
        policy = "".join((before, start, lines, end, after))
    return policy


def tables_file(store, site):
    """The tables file of a strict owner, who allows what the query needs."""
    file = store / f"{site}.toml"
    file.write_text(store_entries(store, site))
    _, *policies = printed_by("policy", "--tables", file).split(
        "\n## The policy of table "
    )
    for table, policy in zip(STORE_FILES[site], policies, strict=True):
        with file.open("a") as tables:
            tables.write(f"\n## The policy of table {allow(policy, ALLOWED[table])}")
    text = file.read_text()
    for rule, value in RESTRICTED.items():
        text, count = re.subn(
            rf"^# {rule} = .*", f"{rule} = {value}", text, flags=re.MULTILINE
        )
        assert count == len(STORE_FILES[site])
    return text


def approve(deployment):
    """Approve the only run that was proposed, as the owner of each site."""
    (proposal,) = deployment.folder.glob("superlink/runs/*/proposal.json")
    for site in STORE_FILES:
        files = ["--tables", deployment.folder / site / "tables.toml"]
        files += ["--state-dir", deployment.state(site)]
        assert "Approved: " in printed_by("approve", proposal, "--yes", *files)


def altered(folder):
    """An app with one line more, which leaves a file where it runs."""
    marker = folder / "was-run"
    copy = copy_app(folder / "altered")
    with (copy / "client_apps" / "app.py").open("a") as file:
        file.write(f"\nPath({str(marker)!r}).touch()\n")
    return copy, marker


def simulated(store):
    """The report of the run on the same tables in this process."""
    orders = pd.read_csv(store / "orders.csv", parse_dates=["placed"])
    items = pd.read_parquet(store / "items.parquet")
    customers = pd.read_csv(store / "customers_us.csv")
    sites = {
        "shop": {"orders": orders},
        "office": {"items": items, "customers": customers},
    }
    strategy = TablePuppetCG(Query.from_sql(SQL), Settings.from_run_config(RUN))
    strategy.start(LocalGrid(sites))
    return strategy.report


def pin_keys(deployment):
    """Make the sites' keys, and the list of all that each of them trusts."""
    keys = deployment.folder / "keys.txt"
    keys.touch(0o600)
    for site in STORE_FILES:
        deployment.state(site).mkdir(mode=0o700, parents=True)
    lines = (f"{s} {site_key(deployment.state(s)).public.hex()}\n" for s in STORE_FILES)
    keys.write_text("".join(lines))
    return keys


def plant_app(deployment, site, code):
    """Leave an app where Flower looks for the installed one of the listed hash."""
    digits = deployment.app_hash(ROOT)[:8]
    name = f"tp-flower.tp-flower.0.1.0.{digits}"
    copy = copy_app(deployment.state(site) / "flower" / "apps" / name)
    (copy / "client_apps" / "app.py").write_text(code)


@pytest.mark.slow
def test_owners_run_what_they_have_listed_and_nothing_else(tmp_path):
    store = tmp_path / "store"
    assert make_store([str(store), "--orders", "500", "--customers", "200"]) == 0
    other_app, marker = altered(tmp_path)
    with deployed(tmp_path / "deployment") as deployment:
        keys = pin_keys(deployment)
        plant_app(deployment, "shop", "raise SystemExit('not what was listed')")
        for site in STORE_FILES:
            file = tables_file(store, site)
            deployment.add_site(site, file, "--allowed-keys", keys)

        run = deployment.submit("altered", {**RUN, "min-sites": 2}, other_app)
        status, details = deployment.finish(run, 1200.0)
        assert status == "finished:failed"
        sha256 = deployment.app_hash(other_app)
        assert f"not allowed the app bundle with SHA-256 {sha256}" in details
        assert not marker.exists()
        for site in STORE_FILES:
            assert not list(deployment.state(site).glob("flower/apps/*"))
            assert f"event=refused-app flower-run={run} sha256={sha256}" in (
                deployment.log(site)
            )

        run = deployment.submit("unapproved", {**RUN, "min-sites": 2})
        status, details = deployment.finish(run, 1200.0)
        assert status == "finished:failed"
        assert "(approved-runs) refuses: the run sha256:" in details
        approve(deployment)
        run = deployment.submit("approved", {**RUN, "min-sites": 2})
        status, details = deployment.finish(run, 1200.0)
        assert status == "finished:completed", details
        reports = list(deployment.folder.glob("superlink/runs/*/report.json"))
        # the refused runs left one, too
        (report,) = (
            file for file in reports if '"status": "completed"' in file.read_text()
        )

    final, expected = json.loads(report.read_text())["final"], simulated(store)
    assert final["train"].keys() == expected.final_train.keys()
    for part, metrics in (
        ("train", expected.final_train),
        ("test", expected.final_test),
    ):
        values = [final[part][name] for name in metrics]
        np.testing.assert_allclose(values, list(metrics.values()), rtol=1e-6)
