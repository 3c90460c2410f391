"""Failed runs: the reason ends the console output and is in the run folder's report."""

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tp_flower.errors import TPFlowerError, failure_text
from tp_flower.reports.records import REPORT_FILE, RunRecord, write_json
from tp_flower.settings import Settings

LOG_FILE: Final = "run.log"
# of any exception in an app
EXIT_CODES: Final = ("Exit Code: 201\n", "Exit Code: 700\n")
FLOWER_LOGGER: Final = logging.getLogger("flwr")


def reason_instead_of_trace(record: logging.LogRecord) -> bool:
    """Make Flower's log state why a run failed, without trace or page of exit codes.

    An error that was not raised on purpose keeps its trace.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, TPFlowerError):
        record.msg = failure_text(error)
        record.args = ()
        record.exc_info = None
    return not record.getMessage().startswith(EXIT_CODES)


def status_of(error: BaseException) -> str:
    """Return the status of a run that an error ended, for its report."""
    return f"failed: {failure_text(error).partition(': ')[2]}"


def resume_commands(settings: Settings, folder: Path) -> str:
    """Return the commands that go on with the run of a folder."""
    values = {
        "resume": str(folder),
        **({"tables": settings.tables} if settings.tables else {}),
    }
    changes = " ".join(
        f"--set {shlex.quote(f'{key}={value}')}" for key, value in values.items()
    )
    config = shlex.quote(" ".join(f'{key}="{value}"' for key, value in values.items()))
    with_flower = f"flwr run . --stream -c {config}"
    return (
        f"A checkpoint is kept. To go on: tp-flower train {changes}\nor: {with_flower}"
    )


@contextmanager
def record_log(settings: Settings, folder: Path) -> Iterator[None]:
    """Write Flower's log into a run's folder.

    If the run fails, also write its trace and a report.
    """
    handler = logging.FileHandler(folder / LOG_FILE, encoding="utf8", delay=True)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    FLOWER_LOGGER.addHandler(handler)
    started = datetime.now(UTC)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        failure = {
            "levelno": logging.ERROR,
            "levelname": "ERROR",
            "msg": "the run failed",
        }
        handler.handle(logging.makeLogRecord({**failure, "exc_info": sys.exc_info()}))
        record = RunRecord(
            started=started.isoformat(timespec="seconds"),
            seconds=(datetime.now(UTC) - started).total_seconds(),
            output_dir=str(folder),
            query=settings.sql,
            settings=settings.to_dict(),
            join_steps=(),
            history=(),
        )
        # the reason matters more than a full disk; a report of the run itself says more
        with suppress(OSError):
            if not (folder / REPORT_FILE).exists():
                write_json(record.content(settings.mode, status_of(error)), folder)
        error.add_note(f"The full trace is in {folder / LOG_FILE}")
        raise
    finally:
        FLOWER_LOGGER.removeHandler(handler)
        handler.close()
