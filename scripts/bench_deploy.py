"""Measure rounds of a real deployment: over sessions, and over Flower's messages.

Usage: python scripts/bench_deploy.py [--sites 1,2,5] [--output FILE]

For every number of sites and every network, a SuperLink behind nginx and as many
SuperNodes are started on this machine, with TLS and node authentication, the sites
behind a TCP proxy that adds the round-trip time. Each then exchanges messages that are
answered with themselves, small and of 1 MB each way, and trains. All figures are
milliseconds a round; "computing" is the server's and the slowest site's.
"""

import argparse
import json
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pandas as pd

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.data.make_store import main as make_store  # noqa: E402
from scripts.deploy.deployment import Deployment, DeploymentError, copy_app, deployed  # noqa: E402
from scripts.deploy.slow_link import SlowLink  # noqa: E402
from tp_flower.files import write_file  # noqa: E402
from tp_flower.settings.run import FLOWER, SESSION  # noqa: E402

NETWORKS: Final = {
    "no delay": (0.0, 0.0),
    "40 ms": (0.04, 0.0),
    "40 ms, 1 % resets": (0.04, 0.01),
}
"""Round-trip seconds, and the probability of a reset; the last of two sites alone."""

SITES: Final = {
    1: {"all": {"orders": 0, "items": 0, "customers": 0}},
    2: {"shop": {"orders": 0}, "office": {"items": 0, "customers": 0}},
    5: {
        "shop": {"orders": 0},
        "maker": {"items": 0},
        **{f"branch-{n}": {"customers": n} for n in range(3)},
    },
}
"""By number of sites, the tables at each, and which shard of them."""

SQL: Final = """
SELECT o.quantity AS label, o.discount, i.price, i.weight, c.age
FROM orders AS o JOIN items AS i ON o.item_id = i.item_id
JOIN customers AS c ON o.customer_id = c.customer_id
"""
TRAINING: Final = {"sql": SQL, "strategy": "sgd", "num-epochs": 1}
MEGABYTE: Final = 1 << 20
ROUNDS: Final = {SESSION: {0: 300, MEGABYTE: 60}, FLOWER: {0: 6, MEGABYTE: 3}}
"""Of messages that are answered with themselves, by channel and their bytes."""

ORDERS: Final = 800
BATCH_ROWS: Final = {SESSION: 4, FLOWER: 160}  # a report merges rounds above a thousand
SECONDS: Final = 900.0
ANSWERED: Final = re.compile(r"action=train\.sgd seconds=([0-9.]+)")
TIMES: Final = ("server-seconds", "client-seconds", "wait-seconds")

Figures = dict[str, object]
Settings = Mapping[str, object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sites", default="1,2,5", help="numbers of sites")
    parser.add_argument("--output", type=Path, help="a file for the figures")
    chosen = parser.parse_args(arguments)
    if shutil.which("nginx") is None:
        parser.error("nginx is not installed")
    figures: list[Figures] = []
    for sites in map(int, chosen.sites.split(",")):
        for network, (seconds, resets) in NETWORKS.items():
            if resets and sites != 2:
                continue
            link = f"{sites} sites, {network}"
            for found in _measure(sites, seconds, resets):
                figures.append({"sites": sites, "network": network, **found})
                print(link, *(f"{k} {v}" for k, v in found.items()), flush=True)
            if chosen.output:
                text = json.dumps(figures, indent=1)
                write_file(chosen.output, [text.encode()], is_durable=False)
    print(pd.DataFrame(figures).to_string(index=False))
    return 0


def _measure(sites: int, seconds: float, resets: float) -> Iterator[Figures]:
    """Yield the figures of one deployment."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tp-")))
        echo = _echo_app(folder / "echo")
        deployment = stack.enter_context(deployed(folder / "deployment"))
        hashes = (deployment.app_hash(path) for path in (ROOT, echo))
        deployment.allowed_apps.write_text("\n".join(hashes) + "\n")
        deployment.start_front()
        link = SlowLink(deployment.front, seconds, resets)
        stack.callback(link.close)
        deployment.front = link.port
        for site, entries in _entries(folder / "store", sites).items():
            deployment.add_site(site, entries, "--keys", "unchecked")
        for channel, by_size in ROUNDS.items():
            common = {"min-sites": sites, "channel": channel}
            for size, rounds in by_size.items():
                what = "1 MB" if size else "echo"
                settings = {**common, "num-epochs": rounds, "batch-size": size}
                with _failures(channel, what) as found:
                    found.update(_spread(_echoed(deployment, settings, echo)))
                yield found
            settings = {**TRAINING, **common, "batch-size": BATCH_ROWS[channel]}
            with _failures(channel, "training") as found:
                found.update(_trained(deployment, settings))
            yield found


@contextmanager
def _failures(channel: str, what: str) -> Iterator[Figures]:
    """Yield figures to enter into; say there what has failed."""
    found: Figures = {"channel": channel, "what": what}
    try:
        yield found
    except DeploymentError as error:
        found["failed"] = str(error).partition("\n")[0]


def _entries(folder: Path, sites: int) -> dict[str, str]:
    """Make the tables; return the tables file of each site."""
    make_store([str(folder), "--orders", str(ORDERS), "--customers", "60"])
    countries = [pd.read_csv(path) for path in sorted(folder.glob("customers_*.csv"))]
    tables = {
        "orders": pd.read_csv(folder / "orders.csv"),
        "items": pd.read_parquet(folder / "items.parquet"),
        "customers": pd.concat(countries),
    }
    entries = dict.fromkeys(SITES[sites], "")
    for site, held in SITES[sites].items():
        for table, shard in held.items():
            shards = sum(table in others for others in SITES[sites].values())
            path = folder / f"{site}-{table}.parquet"
            tables[table].iloc[shard::shards].to_parquet(path, index=False)
            entry = f'path = "{path}"\nsite = "{site}"\npolicy = "open"\n'
            entries[site] += f"[tables.{table}]\n{entry}"
    return entries


def _echo_app(folder: Path) -> Path:
    """Return a folder with the app that answers messages with themselves."""
    file = copy_app(folder) / "pyproject.toml"
    shutil.copy(ROOT / "scripts" / "deploy" / "tp_echo.py", folder)
    text = file.read_text(encoding="utf-8")
    for old, new in (
        ("strategies.app:app", "tp_echo:server"),
        ("client_apps.app:app", "tp_echo:client"),
        ('fab-include = ["', 'fab-include = ["tp_echo.py", "'),
    ):
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return folder


def _run(deployment: Deployment, settings: Settings, checkout: Path = ROOT) -> None:
    """Carry out a run; DeploymentError if it fails."""
    status = deployment.finish(deployment.submit("run", settings, checkout), SECONDS)
    if status[0] != "finished:completed":
        raise DeploymentError(": ".join(status))


def _echoed(deployment: Deployment, settings: Settings, app: Path) -> list[float]:
    """Return the seconds of rounds of messages that are answered with themselves."""
    file = deployment.folder / "seconds.json"
    _run(deployment, {**settings, "output-dir": str(file)}, app)
    return list(json.loads(file.read_text(encoding="utf-8")))


def _trained(deployment: Deployment, settings: Settings) -> Figures:
    """Train; return the figures of the rounds, with the computing in them."""
    sites = [
        name for name in deployment.processes if name not in ("superlink", "front")
    ]
    before = {site: len(deployment.log(site)) for site in sites}
    folder = Path(tempfile.mkdtemp(dir=deployment.folder))
    _run(deployment, {**settings, "output-dir": str(folder)})
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    rounds = [item for item in report["history"] if item["phase"] == "sgd"]
    logged = (ANSWERED.findall(deployment.log(site)[before[site] :]) for site in sites)
    slowest = max(statistics.median(map(float, found)) for found in logged if found)
    server = statistics.median(item["server-seconds"] for item in rounds)
    spread = _spread([sum(item[name] for name in TIMES) for item in rounds])
    return {**spread, "computing": round(1000.0 * (slowest + server), 1)}


def _spread(seconds: Sequence[float]) -> Figures:
    """Return quantiles in milliseconds; the first round opens the sessions."""
    later = pd.Series(seconds[1:]) * 1000.0
    return {
        "rounds": len(seconds),
        "first": round(1000.0 * seconds[0], 1),
        "median": round(later.median(), 1),
        "p95": round(later.quantile(0.95), 1),
        "most": round(later.max(), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
