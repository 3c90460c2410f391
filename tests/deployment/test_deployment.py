"""A real deployment whose processes are killed ends in the model of one that ran on."""

import json
import re
from collections import Counter

import numpy as np
import pytest

from client_apps.data.ledger import Ledger
from client_apps.data.saved_models import SavedModel
from scripts.data.make_store import main as make_store
from scripts.deploy.deployment import STORE_FILES, store_entries
from tests.support.deployment import deployed, train_in_this_process
from tests.support.policies import OPEN

# no text: the order of categories follows from their hashes, and another run's differ
SQL = """
SELECT o.quantity > 12 AS label, o.discount, o.placed, i.price, i.weight, c.age
FROM orders AS o
JOIN items AS i ON o.item_id = i.item_id
JOIN customers AS c ON o.customer_id = c.customer_id
"""
RUN = {
    "sql": SQL,
    "num-epochs": 3,
    "privacy.labels": "randomised-response",
    "privacy.label-epsilon": 3.0,
}
TRAINS = re.compile(r"Receiving: train\.descent.*\n.*Received successfully")


def parameters(deployment, name):
    """The parameters that the sites have saved under a model name, by part."""
    return {
        (site, part.name): SavedModel.load(part).parameters
        for site in STORE_FILES
        for part in deployment.state(site).glob(f"models/{name}/*/part-*")
    }


def trained(deployment, site):
    """How many messages of training a site was given."""
    return len(TRAINS.findall(deployment.log(site)))


def ledger_lines(deployment, site):
    return list(map(json.loads, Ledger(str(deployment.state(site))).export()))


@pytest.mark.slow
def test_killed_processes_change_neither_model_nor_ledger(tmp_path):
    store = tmp_path / "store"
    assert make_store([str(store), "--orders", "500", "--customers", "60"]) == 0
    with deployed(tmp_path / "deployment") as deployment:
        for site in STORE_FILES:
            # the server is this process, as the sites are
            file = store_entries(store, site, OPEN)
            deployment.add_site(site, file, "--keys", "unchecked")
        # draws the noisy labels that the next run finds and does not pay for again
        here = {**RUN, "strategy": "cg", "model-name": "undisturbed"}
        train_in_this_process(deployment, here)
        settings = {**RUN, "min-sites": 2, "model-name": "killed"}
        deployment.submit("train", settings)
        # in the first epoch, while the site computes
        deployment.wait(lambda: trained(deployment, "office") > 0, "an epoch")
        deployment.kill("office")
        deployment.start_site("office")
        # in the second epoch
        deployment.wait(lambda: trained(deployment, "shop") > 1, "another epoch")
        deployment.kill("superlink")
        deployment.start_superlink()
        (folder,) = (deployment.folder / "superlink" / "runs").iterdir()
        resumed = deployment.submit("resume", {"resume": str(folder)})
        assert deployment.finish(resumed, 1200.0)[0] == "finished:completed"

        expected, saved = (
            parameters(deployment, name) for name in ("undisturbed", "killed")
        )
        assert len(saved) == 3
        assert saved.keys() == expected.keys()
        for part, theta in expected.items():
            np.testing.assert_allclose(saved[part], theta, rtol=1e-6)
        for site in STORE_FILES:
            # how often each release of each run is in its ledger
            counts = Counter(
                (line["run"], line["event"], json.dumps(line["release"]))
                for line in ledger_lines(deployment, site)
                if "release" in line
            )
            assert max(counts.values()) == 1, counts.most_common(1)
        # the noisy labels were drawn, and paid for, before the run that was disturbed
        events = [line["event"] for line in ledger_lines(deployment, "shop")]
        assert events.count("charge") == 1
