"""Start a site's SuperNode, which runs the app bundles that its owner has listed.

    python -m client_apps.supernode --allowed-apps FILE [options of flower-supernode]

The SuperLink sends a run's code, the app bundle (FAB); Flower can only check signatures
of its own hub (``_verify_fab``). Here the SHA-256 of a bundle is looked up in the file
where Flower fetches it: before it is stored, opened or installed. Every message of a
run with another bundle is answered by an error. The file is read again for each run.
This replaces a function of Flower, so other versions of Flower are refused.
"""

import argparse
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from logging import ERROR, INFO
from pathlib import Path
from typing import Any, Final

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from client_apps.data.key_files import ALLOWED_APPS, read_allowed_apps
from tp_flower.errors import SettingsError, SiteError, TPFlowerError
from tp_flower.events import log_event
from tp_flower.node_config import APP_SHA256

FLOWER_VERSIONS: Final = ("1.41", "1.42")
FLOWER_MODULE: Final = "flwr.supernode.start_client_internal"
LOOP: Final = "start_client_internal"
PULL: Final = "_pull_and_store_message"
INSERT: Final = "_insert_message"
PARAMETERS: Final[Mapping[str, Sequence[str]]] = {
    PULL: (
        *("state", "object_store", "node_config", "receive", "get_run", "get_fab"),
        *("pull_object", "confirm_message_received", "trusted_entities"),
    ),
    INSERT: ("msg", "state", "store"),
}
"""The functions of Flower that this builds on, and their parameters."""


class UnlistedAppError(SiteError):
    """The app bundle of a run is not one that the site's owner has listed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run Flower's own command with the check in place; exit with 1 if it cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m client_apps.supernode",
        description="Start a SuperNode; all other options are flower-supernode's.",
        allow_abbrev=False,
    )
    text = "lines with the SHA-256 of the app bundles that may run"
    parser.add_argument(f"--{ALLOWED_APPS}", required=True, metavar="FILE", help=text)
    options, flower_options = parser.parse_known_args(arguments)
    path = Path(options.allowed_apps).absolute()
    try:
        bundles = read_allowed_apps(path)
        check_flower()
    except TPFlowerError as error:
        parser.exit(1, f"error: {error}\n")
    flower = importlib.import_module(FLOWER_MODULE)
    setattr(
        flower, PULL, add_check(getattr(flower, PULL), getattr(flower, INSERT), path)
    )
    log_event(INFO, ALLOWED_APPS, bundles=len(bundles))
    sys.argv = ["flower-supernode", *flower_options]
    importlib.import_module("flwr.supernode.cli").flower_supernode()


def check_flower() -> None:
    """Raise SiteError unless Flower takes messages by the functions named above."""
    version = metadata.version("flwr")
    flower = None
    if f"{version}.".startswith(tuple(f"{tested}." for tested in FLOWER_VERSIONS)):
        flower = importlib.import_module(FLOWER_MODULE)
    parameters = {
        name: tuple(inspect.signature(getattr(flower, name)).parameters)
        for name in PARAMETERS
        if hasattr(flower, name)
    }
    if parameters != PARAMETERS or PULL not in getattr(flower, LOOP).__code__.co_names:
        raise SiteError(
            "the check of app bundles was made for Flower "
            f"{', '.join(FLOWER_VERSIONS)} and does not fit {version}: nothing was "
            "started; install what constraints.txt has"
        )


def add_check(
    pull: Callable[..., int | None], insert: Callable[..., None], path: Path
) -> Callable[..., int | None]:
    """Return Flower's function with the check; the app's node config has the hash."""

    def pull_checked(*, receive: Any, get_fab: Any, **others: Any) -> int | None:
        others["node_config"] = config = dict(others["node_config"])
        arrived: list[Any] = []

        def receive_message() -> Any:
            arrived.append(receive())
            return arrived[-1]

        def get_listed(fab_hash: str, run_id: int) -> Any:
            fab = get_fab(fab_hash, run_id)
            config[APP_SHA256] = check_bundle(fab.content, path, run_id)
            return fab

        try:
            return pull(receive=receive_message, get_fab=get_listed, **others)
        except UnlistedAppError as error:
            ((message, _),) = arrived
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=message)
            insert(reply, others["state"], others["object_store"])
            return int(message.metadata.run_id)

    return pull_checked


def check_bundle(content: bytes, path: Path, run_id: int) -> str:
    """Return the SHA-256 of a bundle; UnlistedAppError if the file does not list it."""
    sha256 = hashlib.sha256(content).hexdigest()
    try:
        problem = "it is not listed"
        if sha256 in read_allowed_apps(path):
            problem = ""
    except SettingsError as error:
        problem = str(error)
    values = {"flower_run": str(run_id), "sha256": sha256}
    if problem:
        todo = f"review the app, compare its hash (app_hash.sh), add it to {path}"
        log_event(ERROR, "refused-app", **values, reason=problem, todo=todo)
        raise UnlistedAppError(
            f"the site's owner has not allowed the app bundle with SHA-256 {sha256}"
        )
    log_event(INFO, "allowed-app", **values)
    return sha256


if __name__ == "__main__":
    main()
