"""Policies of tables, and fragments that they allow or refuse."""

from flwr.app import Context, RecordDict

from client_apps.rounds.site import Site
from tp_flower.query import Feature, Fragment
from tp_flower.query.fragment import reads
from tp_flower.sources.shards import load_tables

TABLE = "customer,amount,day,is_fraud,salary\n1,2.5,3,0,9\n2,1.5,4,1,8\n"


def shards(folder, policy, more=""):
    """The shards of a tables file with one policy."""
    (folder / "t.csv").write_text(TABLE)
    file = folder / "tables.toml"
    file.write_text(f"[tables.t]\npath='t.csv'\n[tables.t.policy]\n{policy}\n{more}")
    return load_tables(str(file))


def policy_of(folder, text):
    (source,) = shards(folder, text)
    return source.policy


def fragment(**pieces):
    return Fragment("p", "t", **pieces)


def features(**expressions):
    return tuple(Feature(name, sql) for name, sql in expressions.items())


def check(policy, wanted):
    for read in reads(wanted):
        policy.check_read(read)


def site_of(folder, text, more=""):
    sources = shards(folder, text, more)
    config = {"tables": str(folder / "tables.toml"), "state-dir": ":memory:"}
    return Site(Context(1, 2, config, RecordDict(), {})), sources
