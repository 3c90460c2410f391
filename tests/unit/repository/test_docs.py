"""The pages of the project: links lead somewhere, and code is read as its program reads
it.
"""

import re
import shlex
import subprocess
from itertools import groupby
from pathlib import Path

import duckdb
import msgspec
import pytest
from flwr.cli.app import typer_click_object
from flwr.common.config import parse_config_args
from typer.main import get_command

from scripts.data.make_store import make_store
from strategies import STRATEGIES
from strategies.app import choose_sql
from strategies.serving.deployed import ScorerFile
from strategies.setup.joined_rows import encoder_choices
from tests.support.advice import texts
from tests.support.files import ROOT, text_of
from tp_flower import __all__ as exported
from tp_flower.command_line import MODES, app, read_settings
from tp_flower.query import Query, Unlabelled
from tp_flower.reports.blocks import NOTES
from tp_flower.sources.flights import flights_tables
from tp_flower.sources.tables_file import read_tables_file

PATTERNS = ("*.md", "llms.txt", "docs/**/*.md", "examples/**/*.md")
PAGES = sorted(page for pattern in PATTERNS for page in ROOT.glob(pattern))
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#([^)]*))?\)")
BLOCK = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
by_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT))
)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@by_page
def test_links_lead_to_a_page_and_a_heading_of_it(page):
    for target, anchor in LINK.findall(text_of(page)):
        path = page.parent / target
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize(
    ("page", "most"), [("README.md", 14_000), ("PRIVACY.md", 15_000)]
)
def test_a_page_is_read_in_a_few_minutes(page, most):
    assert (ROOT / page).stat().st_size <= most


@pytest.fixture(scope="module")
def schemas():
    tables = {
        table: duckdb.from_df(shards[0])
        for table, shards in make_store(9, 9, 9).items()
    }
    for table, files in flights_tables().items():
        tables[table] = duckdb.read_parquet(str(min(files.values())))
    return {
        name: dict(zip(table.columns, map(str, table.types), strict=True))
        for name, table in tables.items()
    }


@by_page
def test_code_is_read_by_the_program_that_it_is_for(
    page, schemas, tmp_path, monkeypatch
):
    monkeypatch.setenv("PLANES_URI", "postgresql://reader@db.example.org/fleet")
    whole = text_of(page).replace("\\\n", "")
    entered = re.findall(r"\b(?:cd|cp -r) (\S+)", whole)
    folders = [ROOT, page.parent, *(ROOT / folder for folder in entered)]
    # policies
    for language, text in sorted(BLOCK.findall(whole), key=lambda b: b[0] != "toml"):
        if language == "toml":
            schemas = check_toml(text, tmp_path / "file.toml", schemas)
        elif language == "sql":
            Query.from_sql(text.replace(", ...", "")).bind(schemas)
        elif language == "bash":
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)
            for program, *arguments in commands(re.sub("(RUN|NODE)_ID", "7", text)):
                check_command(Path(program).name, arguments, folders, schemas)
        elif language == "python":
            compile(text, page, "exec")
            exec("\n".join(re.findall(r"^(?:from|import) .*", text, re.MULTILINE)))
        else:
            other = r"text$|\{(code-cell|toctree|eval-rst|literalinclude|raw)"
            assert re.match(other, language), text


def check_toml(text, file, schemas):
    file.write_text(text, encoding="utf-8")
    if "token-file" in text:
        msgspec.toml.decode(text, type=ScorerFile)
        return schemas
    if not re.search(r"^\[+tables\.", text, re.MULTILINE):
        mode = "predict" if "row-key" in text else "train"
        check_settings(read_settings(file, (), mode=mode), schemas)
        return schemas
    sources = read_tables_file(str(file))
    for source in sources:
        for kind in source.types.values():
            assert duckdb.sql(f"SELECT NULL::{kind}")
    return {s.table: dict.fromkeys(s.policy.named, "DOUBLE") for s in sources} | schemas


def check_settings(settings, schemas):
    method = STRATEGIES[settings.method_name]
    row_key = settings.row_key
    needs_label = method.method_type.has_label and not row_key
    query = Query.from_sql(choose_sql(settings), needs_label=needs_label)
    if row_key:
        query.bind(schemas, Unlabelled(row_key=tuple(row_key.split(", "))))
    else:
        bound = method(query, settings.with_fields(boost_from="")).bind(schemas)
        encoder_choices(bound, settings)


def commands(script):
    """Yield the words of each command, also of another user or in a container."""
    script = re.sub(r"(runuser|docker) .*? (--|superlink) ", "", script)
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        groups = groupby(lexer, set("();<>|&").issuperset)
        yield from (list(words) for is_end, words in groups if not is_end)


def check_command(program, arguments, folders, schemas):
    paths = {
        word: [f / word for f in folders if (f / word).exists()] for word in arguments
    }
    for word, found in paths.items():
        assert found or not re.match("(scripts|tests|examples)/", word), word
    if program == "tp-flower":
        name, options = parsed(get_command(app), arguments)
        if name in MODES:
            settings = read_settings(None, options["overrides"], mode=name)
            check_settings(settings, schemas)
    elif program == "flwr":
        _, options = parsed(typer_click_object, arguments)
        texts = options.get("run_config_overrides") or ()
        values = parse_config_args([text for text in texts if "=" in text])
        check_settings(read_settings(None, (), **values), schemas)
    elif program in ("python", "bash"):
        script = text_of(paths[arguments[0]][0])
        line = " ".join(arguments)
        for option in re.findall(r" (--[a-z-]+)", line):
            assert re.search(rf"{option}\b", script), line


def parsed(command, arguments):
    while hasattr(command, "commands"):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    return command.name, command.make_context(command.name, arguments).params


def test_outputs_that_pages_quote_have_no_epsilon_of_features_beside_scores():
    """Tables of epsilons are as the program prints them, with their notes."""
    tables = 0
    for page in PAGES:
        for _, text in BLOCK.findall(text_of(page)):
            _, is_there, after = text.partition("  table at site ")
            if not is_there:
                continue
            tables += 1
            head, *lines = after.split("\n")
            columns = re.split(r"  +", head.strip())
            whole = " ".join(text.split())
            if columns[0] == "as it is":
                # of runs without noise
                assert columns[1:] == ["masked, sealed or hashed"], page
                assert NOTES["nothing"] in whole, page
                continue
            assert columns[0] == "features", page
            assert "epsilon" not in head
            for name in {*columns} & {"models", "scores", "labels"}:
                assert NOTES[name] in whole, (page, name)
            for line in lines:
                cells = re.split(r"  +", line.strip())
                if " at " in cells[0] and re.search(r"\bscores\b", cells[-1]):
                    assert cells[1] == "none", (page, line)
    assert tables >= 3


def test_every_command_is_on_its_page():
    page = text_of(ROOT / "docs/reference/command-line.md")
    named = re.findall(r"^tp-flower ([a-z-]+)", page, re.MULTILINE)
    assert set(named) == set(get_command(app).commands)


def test_messages_that_are_explained_are_those_of_the_program():
    page, _, _ = text_of(ROOT / "docs/how-to/troubleshoot.md").partition("## Flower's")
    explained = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    said = list(texts())
    for message in explained:
        parts = [part.strip() for part in message.split("...")]
        assert any(all(part in text for part in parts) for text in said), message
    assert len(explained) > 20


def test_the_api_page_has_every_name_that_the_package_exports():
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = set(
        re.findall(r"auto(?:function|class):: tp_flower\.(\w+)$", page, re.MULTILINE)
    )
    assert {*exported} <= listed
