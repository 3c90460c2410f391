"""The commands that list, show and delete models, for operator and owner."""

import numpy as np
import pytest

from client_apps.data.saved_models import SavedModel, part_folder, parts_of
from strategies.inference.manifest import manifest_path, write_manifest
from tests.support.command_line import printed_by, refused_by
from tests.support.examples.reports import small_manifest
from tp_flower.features.encoder import TableEncoder
from tp_flower.features.encodings import NumberEncoding
from tp_flower.keyed_hash import KeyedHasher
from tp_flower.learning.models.local_model import ModelSpec
from tp_flower.model_names import ModelVersion, versions_in
from tp_flower.query.fragment import Feature, Fragment
from tp_flower.settings import Settings

FIRST = "20261122-001500-3f9a"
SECOND = "20261123-001500-00aa"


def operator(home, *arguments, command=printed_by, **how):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TP_FLOWER_HOME", str(home))
        return command("models", *arguments, **how)


def owner(root, *arguments, command=printed_by, **how):
    return command("models", *arguments, "--state-dir", root, **how)


def row_of(text, start):
    """The cells of the line that begins so."""
    (line,) = [each for each in text.splitlines() if each.strip().startswith(start)]
    return line.strip().removeprefix(start).split()


@pytest.fixture
def home(tmp_path):
    for version, l2 in ((FIRST, 0.01), (SECOND, 0.5)):
        settings = Settings(strategy="admm", l2=l2, output_dir=f"/runs/{version}")
        metrics = {"auc": 0.5 + l2, "log_loss": 1.0}
        write_manifest(
            tmp_path,
            small_manifest(test=metrics, version=version, settings=settings.to_dict()),
        )
    return tmp_path


def save_part(root, model, number=0):
    encoder = TableEncoder("f", (NumberEncoding("hour", 12.0, 5.0, 12.0),))
    hour = (Feature("hour", '"hour"'),)
    saved = SavedModel(
        table="f",
        encoder=encoder.for_site(KeyedHasher(b"k" * 32)),
        spec=ModelSpec(),
        parameters=np.array([2.0]),
        fragment=Fragment("f", "flights", hour, filters=('"hour" > 3',)),
        versions={"numpy": "2.1"},
    )
    return saved.keep(part_folder(root, model, number))


def test_listing_shows_every_version_also_beside_a_damaged_one(home):
    manifest_path(home, ModelVersion("delays", FIRST)).write_text("{")
    text = operator(home, "list")
    assert "it is not JSON" in " ".join(text.split())
    (line,) = [each for each in text.splitlines() if f"delays@{SECOND}" in each]
    assert all(words in line for words in ("admm", "flights, p", "auc 1.0000"))
    for command in (operator, owner):
        assert command(home / "none", "list") == "no models\n"


def test_showing_a_model_says_what_it_is_and_who_keeps_it(home):
    assert f"delays@{SECOND}" in operator(home, "show", "delays")
    text = operator(home, "show", f"delays@{FIRST}")
    assert row_of(text, "label") == ['"late"', "of", "f"]
    assert row_of(text, "base score") == ["-1.2500"]
    assert row_of(text, "f (flights)")[:4] == ["linear", "1", "0.7500", "0.8500"]
    assert "EWR (abababab), JFK (kept nothing)" in " ".join(text.split())
    # names are text, not markup
    write_manifest(home, small_manifest("age", query="SELECT '[red]x' AS label FROM t"))
    assert "[red]x" in operator(home, "show", "age")


@pytest.mark.parametrize("command", [operator, owner], ids=["operator", "owner"])
def test_deleting_needs_an_exact_version(home, tmp_path, command):
    for version in (FIRST, SECOND):
        save_part(tmp_path, ModelVersion("delays", version))
    for wrong, match in (
        ("delays", "'delays' has no version"),
        ("delays@20261122-001500-0000", "there is no model"),
        ("../delays@" + FIRST, "is not allowed"),
    ):
        assert match in command(home, "delete", wrong, command=refused_by)
    assert len(versions_in(home)) == 2
    assert command(home, "delete", f"delays@{FIRST}") == (f"deleted delays@{FIRST}\n")
    assert list(map(str, versions_in(home))) == [f"delays@{SECOND}"]


def test_an_owner_sees_what_the_site_keeps(tmp_path):
    model = ModelVersion("delays", FIRST)
    save_part(tmp_path, model)
    save_part(tmp_path, model, number=7)
    (parts_of(tmp_path, model)[7] / "model.json").write_text("{")
    listed = row_of(owner(tmp_path, "list"), f"delays@{FIRST}")
    assert listed[:3] == ["flights,", "(damaged)", "2"]
    assert "part-7 is damaged" in owner(tmp_path, "show", "delays", command=refused_by)
    save_part(tmp_path, ModelVersion("delays", SECOND))
    text = owner(tmp_path, "show", "delays")
    assert "part 0: table flights as f" in text
    assert row_of(text, "features") == ["hour", "=", '"hour"']
    assert row_of(text, "filters") == ['"hour"', ">", "3"]
