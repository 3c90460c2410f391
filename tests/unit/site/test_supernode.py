"""The SuperNode with a list: Flower's options pass, another Flower is refused."""

import importlib
import sys
from importlib import metadata

import pytest
from flwr.supernode import cli
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from client_apps import supernode
from client_apps.supernode import FLOWER_MODULE, INSERT, LOOP, PULL, main
from tests.support.files import ROOT

LISTED = "5a" * 32
OPTIONS = [
    "--superlink",
    "link:8443",
    "--root-certificates",
    "/ca.crt",
    "--port",
    "9101",
    "--auth-supernode-private-key",
    "/node.key",
    "--isolation",
    "process",
    "--node-config",
    'tables="/a b.toml" state-dir="/state" cache-gb=3',
    "--max-retries",
    "0",
]


@pytest.fixture
def apps(tmp_path):
    path = tmp_path / "apps.txt"
    path.write_text(LISTED)
    return path


@pytest.fixture
def flower(monkeypatch):
    """Flower's module, which is put back as it was."""
    module = importlib.import_module(FLOWER_MODULE)
    for name in (PULL, INSERT, LOOP):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sys, "argv", ["supernode"])
    return module


@pytest.fixture
def started(flower, monkeypatch):
    arguments = []

    def start():
        # by now the check must be in its place
        assert getattr(flower, PULL).__qualname__ == "add_check.<locals>.pull_checked"
        arguments.append(sys.argv)

    monkeypatch.setattr(cli, "flower_supernode", start)
    return arguments


@pytest.mark.parametrize("place", [0, 4, len(OPTIONS)])
def test_flowers_options_pass(place, apps, started):
    main([*OPTIONS[:place], "--allowed-apps", str(apps), *OPTIONS[place:]])
    (arguments,) = started
    assert arguments == ["flower-supernode", *OPTIONS]
    read = _parse_args_run_supernode().parse_args(arguments[1:])
    assert read.superlink == "link:8443"
    assert read.port == 9101
    assert read.max_retries == 0


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(list(map(str, arguments)))
    assert exit_.value.code in (1, 2)
    return capsys.readouterr().err


def test_it_does_not_start_without_a_list(apps, started, capsys):
    assert "required: --allowed-apps" in refusal(capsys, *OPTIONS)
    # Flower's own parser takes shortened options
    assert "required: --allowed-apps" in refusal(capsys, "--allowed", apps)
    apps.write_text("# nothing yet")
    text = refusal(capsys, "--allowed-apps", apps, *OPTIONS)
    assert "error: allowed-apps lists no app bundle" in text
    assert not started


def of_another_version(version):
    def change(_, monkeypatch):
        monkeypatch.setattr(metadata, "version", lambda _: version)

    return change


def without(name):
    return lambda flower, monkeypatch: monkeypatch.delattr(flower, name)


def with_another(name, function):
    return lambda flower, monkeypatch: monkeypatch.setattr(flower, name, function)


def pull_with_one_more(
    state,
    object_store,
    node_config,
    receive,
    get_run,
    get_fab,
    get_other_fab,
    pull_object,
    confirm_message_received,
    trusted_entities,
):
    """A later Flower that fetches bundles in two ways."""


@pytest.mark.parametrize(
    "change",
    [
        *map(of_another_version, ("1.43.0", "1.40.3", "1.4", "1.410.0", "2.41.0")),
        *map(without, (PULL, INSERT)),
        with_another(PULL, pull_with_one_more),
        with_another(INSERT, lambda **_: None),
        with_another(LOOP, lambda **_: None),
    ],
)
def test_another_flower_is_refused(change, apps, flower, started, monkeypatch, capsys):
    change(flower, monkeypatch)
    text = refusal(capsys, "--allowed-apps", apps, *OPTIONS)
    assert (
        f"made for Flower {', '.join(supernode.FLOWER_VERSIONS)} and does not fit"
        in text
    )
    assert "nothing was started" in text
    assert not started


def test_releases_of_the_version_are_taken(apps, started, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "1.42.7")
    main(["--allowed-apps", str(apps)])
    assert started
    assert (
        f"flwr=={supernode.FLOWER_VERSIONS[0]}."
        in (ROOT / "constraints.txt").read_text()
    )
