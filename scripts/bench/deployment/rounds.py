"""Seconds per round in a real deployment, beside those of an app that does nothing.

    python scripts/bench/deployment/rounds.py [--epochs N]

One SuperLink and one SuperNode on this machine, over TLS; linear models by ADMM over
the flights. The echo app returns each message as it came, to a loop that waits as ours
does: what it takes is Flower's own time. Both run in the same deployment.

The split is of one message of ADMM, answered by a fresh process as in deployment.
Flower's SuperNode sleeps 3 s between messages; the server computes meanwhile.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from scripts.bench.deployment.message import message_seconds
from scripts.bench.deployment.one_site import ROOT, OneSite, one_site

ALLOWED_SECONDS: Final = 1.0
ECHO_ROUNDS: Final = 8
MARK: Final = "ECHO "
ECHO_PROJECT: Final = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "echo"
version = "1.0.0"
description = "Returns its messages"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "tp-flower"

[tool.flwr.app.components]
serverapp = "echo.server:app"
clientapp = "echo.client:app"

[tool.flwr.app.config]
rounds = 1
numbers = 0
"""
ECHO_CLIENT: Final = """
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    return Message(message.content, reply_to=message)
"""
# the pauses of strategies/run/exchange.py; every message is another one, as an object
# that Flower has seen already does not travel again
ECHO_SERVER: Final = """
import json
import time

import numpy as np
from flwr.app import Message
from flwr.serverapp import ServerApp

from tp_flower.protocol import Packet, pack

app = ServerApp()


@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    rng, seconds = np.random.default_rng(0), []
    numbers = int(context.run_config["numbers"])
    for number in range(int(context.run_config["rounds"])):
        started = time.perf_counter()
        array = rng.normal(size=numbers).astype(np.float32)
        content = pack(Packet({"round": number}, {(0, "x"): array} if numbers else {}))
        waiting = set(grid.push_messages([Message(content, nodes[0], "train")]))
        pause = 0.001
        while not list(grid.pull_messages(waiting)):
            pause = min(1.5 * pause, 0.1)
            time.sleep(pause)
        seconds.append(time.perf_counter() - started)
    print("ECHO " + json.dumps(seconds), flush=True)
"""


def main() -> int:
    """Measure, print the figures; return 1 if a round takes too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, help="of ADMM (default: 4)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tp-flower-") as folder:
        found = measure(Path(folder), given.epochs)
        split = message_seconds(Path(folder) / "message")
    for name, seconds in found.items():
        print(f"{seconds:8.2f} s  {name}")
    over = found["a round of training"] - found["a round of the echo app"]
    print(f"{over:8.2f} s  more than the echo app; allowed {ALLOWED_SECONDS} s")
    print("\none message of ADMM at the site, in a process of its own:")
    for name, seconds in split.items():
        print(f"{seconds:8.3f} s  {name}")
    return int(over > ALLOWED_SECONDS)


def measure(folder: Path, epochs: int) -> dict[str, float]:
    """Return seconds by what they are."""
    with one_site(folder) as deployment:
        rounds = train(deployment, epochs)
        numbers = max(int(sum(each["bytes-down"].values())) for each in rounds) // 4
        echo = Echo(deployment)
        small, large = echo.seconds(0), echo.seconds(numbers)
    own = [total_seconds(each) for each in rounds]
    return {
        "a round of the echo app": median(small),
        f"the same with {4 * numbers / 1e6:.1f} MB each way": median(large),
        "a round of training": median(own),
        "of it: computing at the server": median(r["server-seconds"] for r in rounds),
        "of it: the site, from message to reply": median(
            r["client-seconds"] for r in rounds
        ),
    }


def train(deployment: OneSite, epochs: int) -> list[dict[str, Any]]:
    """Train; return the report's rounds of training."""
    output = deployment.folder / "report"
    deployment.run(ROOT, f'num-epochs={epochs} output-dir="{output}" progress=false')
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    return [
        each for each in report["history"] if each["phase"] in ("admm", "consensus")
    ]


def total_seconds(each: Mapping[str, Any]) -> float:
    """Return what a round takes, from one message to the next."""
    parts = ("server-seconds", "client-seconds", "wait-seconds")
    return float(sum(each[part] for part in parts))


class Echo:
    """An app whose ClientApp returns what it gets, written into a folder."""

    def __init__(self, deployment: OneSite) -> None:
        self._deployment = deployment
        self._app = deployment.folder / "echo"
        package = self._app / "echo"
        package.mkdir(parents=True)
        (self._app / "pyproject.toml").write_text(ECHO_PROJECT, encoding="utf-8")
        for name, text in {"server": ECHO_SERVER, "client": ECHO_CLIENT}.items():
            (package / f"{name}.py").write_text(text, encoding="utf-8")
        (package / "__init__.py").touch()

    def seconds(self, numbers: int) -> list[float]:
        """Return what each round takes that carries as many numbers both ways."""
        log = self._deployment.run(
            self._app, f"rounds={ECHO_ROUNDS + 1} numbers={numbers}"
        )
        (line,) = (x for x in log.splitlines() if MARK in x)
        found: list[float] = json.loads(line.split(MARK)[1])
        # the first one finds no process of the app yet, and its bytecode is not written
        return found[1:]


if __name__ == "__main__":
    sys.exit(main())
