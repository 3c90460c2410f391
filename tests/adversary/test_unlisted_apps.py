"""A SuperLink sends other code than what the owner has listed: none of it is taken."""

import dataclasses

import pytest

from tests.support.peers.sent_apps import Intake, bundle, sha256
from tp_flower.node_config import APP_SHA256, app_sha256

GOOD = bundle("client = 1")
EVIL = bundle("client = 2")


@pytest.fixture
def apps(tmp_path):
    path = tmp_path / "apps.txt"
    path.write_text(f"# release 1\n{sha256(GOOD).upper()}  # reviewed\n")
    return path


@pytest.fixture
def intake(apps):
    return Intake(apps)


CLAIMS = {
    "nothing": {},
    "the hash of a listed bundle": {"hash_str": sha256(GOOD)},
    "that hash of the run": {"fab_hash": sha256(GOOD)},
    "that hash of both": {"hash_str": sha256(GOOD), "fab_hash": sha256(GOOD)},
    "no hash": {"hash_str": "", "fab_hash": ""},
    "a licence of Flower's hub": {"verifications": {"valid_license": "true"}},
    "another kind of run": {"primary_task_type": "flwr-agentapp"},
}


@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
def test_an_unlisted_bundle_is_refused_whatever_is_claimed(claims, intake, caplog):
    assert intake.take(5, EVIL, **claims) == 5
    (error,) = intake.errors()
    assert "the site's owner has not allowed the app bundle with SHA-256" in error
    assert sha256(EVIL) in error
    assert intake.is_empty()
    assert intake.state.get_run(5) is None
    assert intake.state.get_run_series_context(5) is None
    assert f"sha256={sha256(EVIL)}" in caplog.text
    assert "event=refused-app flower-run=5" in caplog.text


def test_every_message_of_the_run_is_refused_and_other_runs_go_on(intake):
    intake.take(5, GOOD)
    for _ in range(2):
        intake.take(6, EVIL)
        assert len(intake.errors()) == 1
    intake.take(5, EVIL)
    assert not intake.errors()
    # the run that was let in keeps the bundle that it came with
    assert {fab.content for fab in intake.state.fab_store.values()} == {GOOD}
    assert {task.run_id for task in intake.state.get_tasks()} == {5}


def test_a_listed_bundle_does_not_let_in_one_with_its_name(intake):
    """The bundles differ in the code alone, and are installed in folders alike."""
    intake.take(5, GOOD)
    intake.take(6, EVIL, series_id=5, fab_hash=sha256(GOOD))
    assert len(intake.errors()) == 1
    assert intake.state.get_run(6) is None


def test_the_app_is_told_its_hash_and_the_owners_settings(intake):
    assert intake.take(5, GOOD) == 5
    context = intake.state.get_run_series_context(5)
    assert app_sha256(context.node_config) == sha256(GOOD)
    assert context.node_config["tables"] == "tables.toml"
    assert APP_SHA256 not in intake.node_config
    assert not app_sha256(intake.node_config)


def test_the_list_counts_as_it_is_when_a_run_begins(intake, apps):
    listed = apps.read_text()
    apps.write_text(listed + sha256(EVIL))
    intake.take(5, EVIL)
    assert not intake.errors()
    apps.write_text(listed)
    intake.take(6, EVIL)
    assert len(intake.errors()) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.unlink(), "allowed-apps cannot be read"),
        (lambda path: path.write_text(""), "allowed-apps lists no app bundle"),
        (lambda path: path.write_text("*"), "line 1: it must be the SHA-256"),
        (lambda path: path.chmod(0o666), "allowed-apps may be changed by others"),
    ],
)
def test_without_a_list_nothing_runs(change, why, apps, intake, caplog):
    change(apps)
    intake.take(5, GOOD)
    (error,) = intake.errors()
    assert why in caplog.text
    assert "not allowed" in error
    assert str(apps) not in error
    assert intake.is_empty()


def test_flowers_own_check_still_follows(apps):
    """An owner may trust the signatures of Flower's hub on top."""
    intake = Intake(apps)
    pull = intake._pull
    intake._pull = lambda **given: pull(**given | {"trusted_entities": {"fpk": "key"}})
    intake.take(5, GOOD)
    assert intake.errors() == ["The FAB could not be verified."]
    assert intake.is_empty()
    intake.take(6, EVIL)
    assert sha256(EVIL) in intake.errors()[0]


def test_the_claims_are_fields_of_flowers_structures():
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run

    names = {f.name for kind in (Fab, Run) for f in dataclasses.fields(kind)}
    assert {name for claims in CLAIMS.values() for name in claims} <= names
