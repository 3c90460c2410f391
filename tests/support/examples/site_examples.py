"""Sites on their own: policies of tables, noisy labels, and requests as decoded."""

import itertools

import msgspec
import numpy as np
import pytest
from flwr.app import Context, RecordDict

from client_apps.privacy import noisy_labels
from client_apps.rounds.site import Site
from tests.support.policies import lenient
from tp_flower.extraction.extracted import LabelColumn
from tp_flower.privacy.label_mechanisms import LabelPlan
from tp_flower.protocol.codec import decode
from tp_flower.protocol.packet import Packet
from tp_flower.protocol.training_messages import PrepareRequest, PrivacyTerms
from tp_flower.query import Fragment
from tp_flower.query.reads import reads
from tp_flower.randomness import NoiseSource
from tp_flower.settings import PrivacySettings
from tp_flower.sources.shards import load_tables

COLUMNS = ["customer", "amount", "day", "is_fraud", "salary"]
TABLE = ",".join(COLUMNS) + "\n1,2.5,3,0,9\n2,1.5,4,1,8\n"
RESPONSE = LabelPlan("randomised-response", 1.0)
FRAGMENT = Fragment("o", "orders", label="qty > 3")


def shards(folder, policy, more=""):
    """The shards of a tables file with one policy, ``lenient`` but for its rules."""
    (folder / "t.csv").write_text(TABLE)
    file, policy = folder / "tables.toml", lenient(COLUMNS, policy)
    file.write_text(f"[tables.t]\npath='t.csv'\n[tables.t.policy]\n{policy}\n{more}")
    return load_tables(str(file))


def policy_of(folder, text):
    (source,) = shards(folder, text)
    return source.policy


def fragment(**pieces):
    return Fragment("p", "t", **pieces)


def check(policy, wanted):
    for read in reads(wanted):
        policy.check_read(read)


def site_of(folder, text, more=""):
    sources = shards(folder, text, more)
    config = {"tables": str(folder / "tables.toml"), "state-dir": ":memory:"}
    return Site(Context(1, 2, config, RecordDict(), {})), sources


def make_site(folder, run=7, policy="", state="state"):
    """A site with a tables file of its own: not a simulation."""
    (folder / "orders.csv").write_text("qty\n" + "1\n5\n" * 2000)
    file = folder / "tables.toml"
    file.write_text(
        "[tables.orders]\npath='orders.csv'\n[tables.orders.policy]\n"
        + lenient(["qty"], policy)
    )
    state_dir = state if state == ":memory:" else str(folder / state)
    node = {"tables": str(file), "state-dir": state_dir}
    site = Site(Context(run, 1, node, RecordDict(), {}), f"{run:032x}")
    # as before every message
    site.confirm()
    return site


def bind(site, fragment=FRAGMENT):
    """Make the site's table part 0 of the run."""
    assert len(site.shards) == 1
    site.bind(0, 0, fragment)


def together(site):
    """The changes of one message."""
    return site.store.together(site.features.make_room)


def release(site, label=None, plan=RESPONSE, fragment=FRAGMENT):
    """Release labels, by default alternating truth values, as a message does."""
    with together(site):
        bind(site, fragment)
        label = booleans() if label is None else label
        return noisy_labels.released_label(site, 0, plan, label)


def booleans(rows=4000):
    return LabelColumn("boolean", (np.arange(rows) % 2).astype(float))


@pytest.fixture(autouse=True)
def noise_of_known_keys(monkeypatch):
    """Every draw of labels has a key of its own, the same in each run of the tests."""
    keys = itertools.count()
    monkeypatch.setattr(
        noisy_labels, "NoiseSource", lambda: NoiseSource(next(keys).to_bytes(32))
    )


CLEAR = msgspec.to_builtins(PrivacyTerms.of(PrivacySettings()))
OUTLINE = {"strategy": "sgd", "epochs": 1}
PART = {
    "id": 0,
    "model": {},
    "update": "local",
    "l2": 0.0,
    "device": "cpu",
    "label-scale": 1.0,
    "mean-multiplicity": 1.0,
}


def body(joined_rows, arrays, **facts):
    """A part of a request with these arrays, as a site decodes it."""
    part = {**PART, "joined-rows": joined_rows, **facts}
    header = {"privacy": CLEAR, "outline": OUTLINE, "parts": [part]}
    named = {(0, name): np.asarray(values) for name, values in arrays.items()}
    return decode(PrepareRequest, Packet(header, named)).parts[0]
