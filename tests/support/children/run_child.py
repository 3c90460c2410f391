"""A process that runs a federation and is killed; run by test_kills.py.

``python run_child.py FOLDER EPOCHS`` trains over the tables file in FOLDER, with the
sites' state there, and writes a line of JSON to its standard output for every reply
that has left the site: the run at the site, and the arrays by part, name and digest.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

from client_apps.app import app
from strategies.run.grid import InProcessGrid
from tests.support.federated import store_sql, train
from tp_flower.protocol.packet import unpack
from tp_flower.settings import PrivacySettings

PRIVACY = PrivacySettings(
    labels="randomised-response",
    label_epsilon=1.0,
    features="statistics",
    predictions=2.0,
)


def main(folder: Path, epochs: int) -> None:
    def left(message):
        if not message.metadata.reply_to_message_id:
            return
        arrays = [
            [part, name, hashlib.sha256(array.tobytes()).hexdigest()]
            for (part, name), array in unpack(message.content).arrays.items()
        ]
        # the grid's only site is its partition 0
        line = {"run": f"{grid.run_name}-0", "arrays": arrays}
        os.write(1, json.dumps(line).encode() + b"\n")

    grid = InProcessGrid(app, [str(folder / "tables.toml")], observe=left)
    for context in grid.contexts.values():
        context.node_config["state-dir"] = str(folder / "state")
    train(grid, store_sql("logistic"), num_epochs=epochs, device="cpu", privacy=PRIVACY)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
