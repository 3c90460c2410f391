"""Sites with tables files and state folders of their own, as real organisations have.

In such a federation the key of the hashes is a secret, as it is in deployment; that of
a simulation is known to all.
"""

import pandas as pd

from client_apps.app import app
from client_apps.data.key_files import site_key
from client_apps.rounds.site import Site
from strategies import TablePuppetADMM
from strategies.run.grid import InProcessGrid
from tests.support.federated import Seen, read, write_site
from tp_flower.protocol.packet import Packet, pack
from tp_flower.query import Query

FIRST_NODE = 2
SECRET_TEXT = bytes(range(7, 60)).hex()


class KeyedGrid(InProcessGrid):
    """Real sites of one table each, named like it.

    ``change`` is called with what is about to arrive, which it may change; ``seen`` are
    all messages as they arrived, and ``secrets`` the sites' keys of the hashes by node.
    """

    def __init__(self, folder, tables, change=None):
        self.folders = {name: folder / name for name in tables}
        super().__init__(
            app,
            {
                name: write_site(folder / name, {name: frame}, site=f"{name}-0")
                for name, frame in tables.items()
            },
        )
        self.nodes = {name: node for node, name in enumerate(tables, FIRST_NODE)}
        for name, node in self.nodes.items():
            state = str(self.folders[name] / "state")
            self.contexts[node].node_config["state-dir"] = state
        self.change = change
        self.seen: list[Seen] = []
        self.secrets: dict[int, bytes] = {}

    def configure(self, name, **files):
        """Give a site files of keys: what they hold, by setting."""
        for setting, text in files.items():
            path = self.folders[name] / setting
            path.write_text(text)
            path.chmod(0o600)
            config = self.contexts[self.nodes[name]].node_config
            config[setting.replace("_", "-")] = str(path)

    def share_secret(self, text=SECRET_TEXT):
        """Give every site the same secret file."""
        for name in self.nodes:
            self.configure(name, secret_file=text)
        return self

    def with_key_from(self, source):
        """Set the sites up for one of the sources: file, pinned or agreed."""
        if source == "file":
            self.share_secret()
        if source == "pinned":
            self.pin()
        return self

    def public_key(self, name):
        """A site's long-term public key."""
        return site_key(self.folders[name] / "state").public.hex()

    def pin(self, *left_out):
        """Let every site trust the keys of the others, but for (site, trusted)."""
        for name in self.nodes:
            lines = [
                f"{other} {self.public_key(other)}"
                for other in self.nodes
                if other != name and (name, other) not in left_out
            ]
            # a list of nobody is no list
            lines.append(f"nobody {site_key(self.folders[name] / 'x').public.hex()}")
            self.configure(name, allowed_keys="\n".join(lines))
        return self

    def leaked(self):
        """The actions whose replies brought arrays to the server."""
        return {seen.action for seen in self.seen if seen.is_reply and seen.arrays}

    def headers(self, action, *, is_reply):
        kind = action, is_reply
        return [s.header for s in self.seen if (s.action, s.is_reply) == kind]

    def hashes(self):
        """By (node, part, name), the hashed keys that the server has."""
        return {
            (seen.node, part, name): array
            for seen in self.seen
            if seen.is_reply and seen.action == "query.extract"
            for (part, name), array in seen.arrays.items()
            if name.startswith("hashes/")
        }

    def _deliver(self, message):
        self._note(message)
        reply = super()._deliver(message)
        seen = self._note(reply)
        if seen.action == "query.extract" and seen.arrays:
            site = Site(self.contexts[seen.node], self.run_name)
            self.secrets[seen.node] = site.hasher().secret
        return reply

    def _note(self, message):
        """Note a message, and change its content."""
        seen = read(message)
        if self.change is not None:
            self.change(seen)
        self.seen.append(seen)
        message.content = pack(Packet(seen.header, seen.arrays))
        return seen


def train(grid, sql, **settings):
    """Train, one epoch."""
    strategy = TablePuppetADMM(Query.from_sql(sql), num_epochs=1, **settings)
    strategy.start(grid)
    return strategy


SQL = "SELECT a.y AS label, b.x FROM a JOIN b ON a.k = b.k"
A = pd.DataFrame({"k": [1, 2, 3, 4], "y": [0.0, 1.0, 2.0, 4.0]})
B = pd.DataFrame({"k": [1, 2, 3, 4], "x": [0.5, 1.5, 3.0, 4.0]})
AB = {"a": A, "b": B}
