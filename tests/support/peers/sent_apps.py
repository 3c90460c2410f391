"""A SuperNode's intake of messages, as Flower has it, and a SuperLink that feeds it."""

import hashlib
import importlib
import warnings
from dataclasses import replace
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_files
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory

from client_apps.supernode import FLOWER_MODULE, INSERT, PULL, add_check

NODE = 7
SUPERLINK = 1
PROJECT = """
[project]
name = "app"
version = "1.0.0"
[tool.flwr.app]
publisher = "somebody"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""


def bundle(code: str) -> bytes:
    files = {"pyproject.toml": PROJECT.encode(), "app.py": code.encode()}
    with warnings.catch_warnings():
        # Flower names patterns as pathspec no longer wants them to be
        warnings.simplefilter("ignore", DeprecationWarning)
        return build_fab_from_files(files)[0]


def sha256(content: bytes) -> str:
    """Return the hash that an owner lists."""
    return hashlib.sha256(content).hexdigest()


class Intake:
    """A SuperNode that takes one message after the other, with the owner's list."""

    def __init__(self, allowed_apps: Path) -> None:
        flower = importlib.import_module(FLOWER_MODULE)
        functions = getattr(flower, PULL), getattr(flower, INSERT)
        self._pull = add_check(*functions, allowed_apps)
        self._stores = ObjectStoreFactory()
        self.state = NodeStateFactory(self._stores).state()
        self.state.set_node_id(NODE)
        self.node_config = {"tables": "tables.toml"}

    def take(self, run: int, content: bytes, **claims: object) -> int | None:
        """Take a message of a run; ``claims`` are what the SuperLink says of its app.

        They are fields of Flower's ``Fab`` and ``Run``.
        """
        metadata = Metadata(
            *(run, "", SUPERLINK, NODE, "", "", 0.0, 1e12), "query.describe"
        )
        message = Message(RecordDict(), metadata=metadata)
        metadata.__dict__["_message_id"] = message.object_id
        objects = get_all_nested_objects(message)
        fab = Fab(sha256(content), content, {})
        of_fab = {name: value for name, value in claims.items() if hasattr(fab, name)}
        of_run = {"fab_hash": fab.hash_str, "series_id": run} | claims
        of_run = {name: of_run[name] for name in of_run.keys() - of_fab.keys()}
        return self._pull(
            state=self.state,
            object_store=self._stores.store(),
            node_config=self.node_config,
            receive=lambda: (message, get_object_tree(message)),
            get_run=lambda _: replace(Run.create_empty(run), **of_run),
            get_fab=lambda *_: replace(fab, **of_fab),
            pull_object=lambda _, identifier: objects[identifier].deflate(),
            confirm_message_received=lambda *_: None,
            trusted_entities=None,
        )

    def errors(self) -> list[str]:
        """Return the errors that are on their way to the SuperLink."""
        replies = self.state.get_messages_legacy(is_reply=True)
        assert all(reply.error.code == 7 for reply in replies)
        return [reply.error.reason for reply in replies]

    def is_empty(self) -> bool:
        """Whether no bundle is stored, and nothing waits to be run."""
        return not self.state.fab_store and not self.state.get_tasks()
