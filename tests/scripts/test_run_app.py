"""The script around `flwr run`: it says what Flower does not."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from scripts import run_app
from tests.support.files import case_table
from tp_flower.errors import SettingsError

CASES = case_table(__file__)


def test_good_run_configs(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('strategy = "sgd"\n')
    for texts in (*CASES["good"], [str(file)]):
        run_app.check_run_config(texts)
    file.write_text('strategy = "adam"\n')
    with pytest.raises(SettingsError, match="'adam' is not one of auto, admm, cg, sgd"):
        run_app.check_run_config([str(file)])


@pytest.mark.parametrize(("texts", "message"), CASES["bad"])
def test_bad_run_configs_start_nothing_and_exit_2(texts, message, capfd):
    assert run_app.main([part for text in texts for part in ("-c", text)]) == 2
    assert re.search(message, capfd.readouterr().err)


def test_arguments_are_passed_on() -> None:
    _, passed_on = run_app._parse(["-c", "a=1", "--run-config=b=2", "--stream", "x"])
    federation = ["--federation-config", run_app.DEFAULT_FEDERATION]
    assert passed_on == ["-c", "a=1", "-c", "b=2", *federation, "--stream", "x"]
    _, passed_on = run_app._parse(["--federation-config=num-supernodes=2"])
    assert passed_on == ["--federation-config", "num-supernodes=2"]


def test_noise() -> None:
    lines = [
        "\x1b[92mINFO \x1b[0m:      \n",
        "WARNING : Since flwr 1.32, default simulated SuperNodes changed\n",
        "INFO :      epoch 1/12\n",
        "\n",
    ]
    is_noise = [bool(run_app.NOISE.search(line)) for line in lines]
    assert is_noise == [True, True, False, False]


def test_descendants_are_found_through_generations() -> None:
    # a shell with a child of its own; both are told by their ids
    command = "sleep 60 & echo $!; wait"
    parent = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert {parent.pid, child} <= set(run_app.descendants(os.getpid()))
        assert run_app.descendants(parent.pid) == [child]
    finally:
        os.kill(child, signal.SIGTERM)
        parent.communicate(timeout=10)


@pytest.mark.slow
def test_the_private_superlink_answers_and_is_gone_afterwards() -> None:
    with run_app.private_superlink() as environment:
        assert run_app.list_runs(environment) == []
        home = Path(environment["FLWR_HOME"])
        assert home.is_dir()
    assert not home.exists()
