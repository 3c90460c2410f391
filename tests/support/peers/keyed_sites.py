"""Sites with tables files and state folders of their own, as real organisations have.

In such a federation the key of the hashes is a secret, as it is in deployment; that of
a simulation is known to all.
"""

import pandas as pd
from msgspec import convert

from client_apps.data.key_files import site_key
from tests.support.federated import WatchedGrid, write_site
from tp_flower.privacy.key_agreement import PublicKeys
from tp_flower.protocol.proposal import Proposal
from tp_flower.query import Fragment

FIRST_NODE = 2


class KeyedGrid(WatchedGrid):
    """Real sites of one table each, named like it.

    ``secrets`` are the sites' keys of the hashes by node.
    """

    def __init__(self, folder, tables, change=None):
        self.folders = {name: folder / name for name in tables}
        sites = {
            name: write_site(folder / name, {name: frame}, site=f"{name}-0")
            for name, frame in tables.items()
        }
        super().__init__(sites, change)
        self.nodes = {name: node for node, name in enumerate(tables, FIRST_NODE)}
        for name, node in self.nodes.items():
            self.keep_state(node, self.folders[name] / "state")
        self.secrets: dict[int, bytes] = {}

    def configure(self, name, **files):
        """Give a site files of keys: what they hold, by setting."""
        for setting, text in files.items():
            path = self.folders[name] / setting
            path.write_text(text)
            path.chmod(0o600)
            config = self.contexts[self.nodes[name]].node_config
            config[setting.replace("_", "-")] = str(path)

    def with_key_from(self, source):
        """Set the sites up for one of the sources: pinned or agreed."""
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
        reply = super()._deliver(message)
        seen = self.seen[-1]
        if seen.action == "query.extract" and seen.arrays:
            self.secrets[seen.node] = self.site(seen.node).hasher().secret
        return reply


def stored_keys(grid, node):
    """The keys of the run that a site has, by group."""
    store = grid.site(node).store
    return {name: key.tobytes() for name, key in store.load("secret").arrays.items()}


def proposal_of(header):
    """The proposal of a request for rows."""
    return convert(header["proposal"], Proposal, str_keys=True)


def propose_a_stranger(header, node):
    """Propose a table of another site, which nothing is joined to and no site hosts."""
    fragment = Fragment("z", "z").to_json()
    part = {"table": "z", "site": "z", "node": node, "shard": 0, "fragment": fragment}
    header["proposal"]["parts"]["99"] = part


def public_keys(header, nodes):
    """The public keys of nodes as a request names them."""
    names = ("public-keys", "site-keys")
    keys = [[bytes.fromhex(header[name][node]) for name in names] for node in nodes]
    return [PublicKeys(*pair) for pair in keys]


SQL = "SELECT a.y AS label, b.x FROM a JOIN b ON a.k = b.k"
A = pd.DataFrame({"k": [1, 2, 3, 4], "y": [0.0, 1.0, 2.0, 4.0]})
B = pd.DataFrame({"k": [1, 2, 3, 4], "x": [0.5, 1.5, 3.0, 4.0]})
AB = {"a": A, "b": B}
