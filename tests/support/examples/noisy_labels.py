"""Labels that a site draws noise for."""

import numpy as np
from flwr.app import Context, RecordDict

from client_apps.privacy.noisy_labels import released_label
from client_apps.rounds.site import Site
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.learning.label_noise import LabelPlan
from tp_flower.query import Fragment

RESPONSE = LabelPlan("randomised-response", 1.0)


FRAGMENT = Fragment("o", "orders", label="qty > 3")


def make_site(folder, run=7, policy="", state="state"):
    """A site with a tables file of its own: not a simulation."""
    (folder / "orders.csv").write_text("qty\n" + "1\n5\n" * 2000)
    file = folder / "tables.toml"
    file.write_text(
        "[tables.orders]\npath='orders.csv'\n[tables.orders.policy]\n" + policy
    )
    state_dir = state if state == ":memory:" else str(folder / state)
    node = {"tables": str(file), "state-dir": state_dir}
    return Site(Context(run, 1, node, RecordDict(), {}), f"{run:032x}")


def bind(site, fragment=FRAGMENT):
    """Make the site's table part 0 of the run."""
    assert len(site.shards) == 1
    site.bind(0, 0, fragment)


def together(site):
    """The changes of one message."""
    return site.store.together(site.features.make_room)


def release(site, label, plan=RESPONSE, fragment=FRAGMENT):
    with together(site):
        bind(site, fragment)
        return released_label(site, 0, plan, label)


def booleans(rows=4000):
    return LabelColumn("boolean", (np.arange(rows) % 2).astype(float))
