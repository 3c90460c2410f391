"""The page of a run, written beside `report.json`; its blocks on a console as well."""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from strategies import registry
from strategies.disclosures import NOTHING
from strategies.report_page import curves, inspection, overview, search
from strategies.report_page.convergence import convergence
from strategies.report_page.costs import (
    costs,
    estimate,
    memory_line,
    privacy,
    privacy_totals,
)
from strategies.report_page.model import model
from tp_flower.errors import TPFlowerError
from tp_flower.protocol.fields import CLEAR, Document
from tp_flower.reports.blocks import (
    NOTES,
    Block,
    Blocks,
    Code,
    Prose,
    Record,
    Table,
    render_head,
    render_page,
)
from tp_flower.reports.coefficients import write_coefficients
from tp_flower.reports.console import text_table
from tp_flower.reports.records import REPORT_FILE, write_whole
from tp_flower.settings.run import EVALUATE, EXPLAIN, PREDICT, SERVE, TRAIN
from tp_flower.settings.run_config import changed_settings, run_config_text

PAGE_FILE = "report.html"
RUN_FILE = "run.toml"
RUN_ONLY_SETTINGS = (
    "output-dir",
    "resume",
)  # settings that the next run does not share
MOST_BYTES = 1 << 28


class ReportError(TPFlowerError):
    """A report cannot be read."""


def render(report: Mapping[str, object]) -> str:
    """Return the page of a `report.json` of any mode: one HTML file, no scripts."""
    record = Record(report)
    contents = {
        "Result": overview.result(record),
        "Thresholds": curves.thresholds(record),
        "Query and tables": overview.tables(record),
        "Search": search.sections(record),
        "Convergence": convergence(record),
        "Time and bytes": costs(record),
        "Importances and groups": inspection.sections(record),
        "Model": model(record),
        "Privacy": privacy(record),
        "Settings": (commands(record), *overview.settings(record)),
    }
    footer = "Made of report.json, which has every figure of this page."
    return render_page(overview.head_of(record), contents, footer)


def head(report: Mapping[str, object]) -> dict[str, object]:
    """Return the figures at the top of a report's page."""
    return overview.head_of(Record(report))


def head_html(report: Mapping[str, object]) -> str:
    """Return the top of a report's page, without its style."""
    return render_head(head(report))


def run_file(report: Record) -> str:
    """Return the settings file that repeats a run, for `tp-flower` and for Flower."""
    changed = changed_settings(report.at("settings").content).items()
    return run_config_text(
        {key: value for key, value in changed if key not in RUN_ONLY_SETTINGS}
    )


def commands(report: Record) -> Code:
    """Return the commands to repeat a run, and to go on from it."""
    mode = report.text("mode")
    model = report.text("model")
    file = shlex.quote(str(Path(report.at("settings").text("output-dir")) / RUN_FILE))
    verb = mode
    if mode == SERVE:
        verb = f"{mode} {shlex.quote(report.at('settings').text('model-name'))}"
    lines = [f"tp-flower {verb} {file}", f"flwr run . --stream -c {file}"]
    if mode == EXPLAIN:
        lines.append(f"tp-flower {TRAIN} {file}")
    # a failed run has no model
    elif model:
        of_model = f"--set {shlex.quote(f'model-name={model}')}"
        lines += [f"tp-flower {verb} {file} {of_model}" for verb in (PREDICT, EVALUATE)]
    return Code("To repeat this run, and to go on from it", lines)


def page_lines(folder: Path) -> str:
    """Write `report.html`, `run.toml` and coefficients beside a folder's `report.json`.

    Return commands that go on from there, and a line that says where the page is.
    """
    content = read_report(folder)
    report = Record(content)
    write_whole(folder / RUN_FILE, run_file(report))
    write_coefficients(content, folder)
    page = write_whole(folder / PAGE_FILE, render(content))
    block = commands(report)
    return "\n".join([f"{block.title}:", *block.lines, f"Page: {page}"])


def read_report(folder: Path) -> Document:
    """Return the report in a folder."""
    file = folder / REPORT_FILE
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ReportError(f"{file} is larger than {MOST_BYTES} bytes: not a report")
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ReportError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict) or "status" not in content:
        raise ReportError(f"{file} is not the report of a run")
    return content


def run_view(content: Mapping[str, object], is_full: bool = False) -> RenderableType:
    """Return the results of a run for the console, from the content of its report."""
    report = Record(content)
    if report.text("mode") != EXPLAIN:
        return result_view(content)
    # of the messages that explaining sends, only labels have a cost
    covers_labels = report.at("settings").text("privacy.labels") != CLEAR
    totals = report.at("privacy").items("totals") if covers_labels else []
    readings = report.at("privacy").items("readings")
    privacy = {"totals": totals, "readings": readings}
    return explanation_view({**content, "privacy": privacy}, is_full)


DETAIL = re.compile(r" ?[:;(].*")  # of what a message carries
INDENT = 2
MOST_COLUMNS = 12  # of a table on the console


def explanation_view(
    content: Mapping[str, object], is_full: bool = False
) -> RenderableType:
    """Return the output of `explain`, from the content of its report.

    It is a screen, or everything if ``is_full``.
    """
    report = Record(content)
    everything = (*overview.tables(report), *costs(report), *privacy(report))
    return _group(
        (*(everything if is_full else _screen(report)), *overview.warnings(report))
    )


def _screen(report: Record) -> Blocks:
    """Yield tables, lost label rows, costs, and all that the server learns.

    They fill some 45 lines.
    """
    head = overview.head_of(report)
    rows = report.at("joined-rows")
    split = (
        f"{rows.count('train')} joined rows to train on, {rows.count('test')} held out"
    )
    yield Prose(f"{head['label']} {head['subject']}: {split}. {NOTES['screen']}")
    readings = report.at("privacy").records("readings")
    yield overview.list_tables(report.records("tables"), fan_out=(), readings=readings)
    yield overview.label_rows(report)
    yield estimate(report.at("cost"))
    yield memory_line(report.at("memory"))
    releases = [
        item for item in report.records("releases") if item.text("to") == "server"
    ]
    for title, is_clear in (("in the clear", True), ("masked, hashed or noisy", False)):
        learned = (
            item
            for item in releases
            if (item.text("protection") == NOTHING) == is_clear
        )
        texts = dict.fromkeys(DETAIL.sub("", item.text("carries")) for item in learned)
        yield Prose(f"The server learns, {title}: {'; '.join(texts)}.")
    yield privacy_totals(report.at("privacy"))


def result_view(content: Mapping[str, object]) -> RenderableType:
    """Return the summary of a run of any other mode, from the content of its report."""
    report = Record(content)
    model_of = report.at("model")
    names = filter(None, (model_of.text("name"), model_of.text("version")))
    title = f"Result of {'@'.join(names) or report.at('settings').text('strategy')}"
    blocks = (
        Table(title, ("", "", ""), list(overview.facts(report)), frozenset({0, 2})),
        *overview.result(report),
        overview.list_tables(report.records("tables")),
        overview.label_rows(report),
        *inspection.sections(report),
        *(block for block in model(report) if not getattr(block, "is_folded", False)),
        privacy_totals(report.at("privacy")),
    )
    return _group(blocks)


def method_view(content: Mapping[str, object], method: str) -> RenderableType:
    """Return for the console all that a method adds to a report's page."""
    return _group(registry.page(method)(Record(content)))


def _group(blocks: Iterable[Block | None]) -> RenderableType:
    return Group(*(part for block in blocks if block for part in _view(block)))


def _view(block: Block) -> Iterable[RenderableType]:
    """Yield a block; figures are for the page alone."""
    if isinstance(block, Prose):
        yield Text(f"{block.text}\n")
    elif isinstance(block, Code):
        yield Text(f"\n{block.title}", style="italic")
        for line in block.lines:
            yield Padding(Text(line), (0, 0, 0, INDENT))
        yield Text()
    elif isinstance(block, Table) and len(block.head) > MOST_COLUMNS:
        yield Text(f"\n{block.title}: on the page", style="italic")
    elif isinstance(block, Table):
        yield Text(block.title, style="italic")
        yield text_table(block.head, block.rows, words=block.words)
        if block.note:
            yield Padding(Text(block.note), (0, 0, 1, INDENT))
