"""The command line, called in this process."""

from pathlib import Path

from typer.testing import CliRunner

from tp_flower.command_line import app


def invoke(*arguments: object, answer: str = ""):
    """The result of a command, and of an answer to its questions.

    An error that it does not answer for is raised.
    """
    result = CliRunner().invoke(app, list(map(str, arguments)), input=answer or None)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def printed_by(*arguments: object) -> str:
    """The output of a command, which must succeed."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused_by(*arguments: object, status: int = 1) -> str:
    """The reason of a command, which must end with the exit status, in one line."""
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (status, ""), result.output
    return " ".join(result.stderr.replace("│", " ").split())


def settings_of(*settings: object) -> list[str]:
    """The options that set settings, such as "l2=0.1"."""
    return [word for setting in settings for word in ("--set", str(setting))]


def site_options(folder: Path) -> list[str]:
    """The options that name the files of the site "shop"."""
    return [
        "--tables",
        f"{folder}/shop/tables.toml",
        "--state-dir",
        f"{folder}/shop/state",
    ]
