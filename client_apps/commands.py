"""Commands of a site's owner, on the files of a site.

``tp_flower.command_line`` calls them, as the user that runs the SuperNode, with the
values of its node config. Reservations of open runs count in full in the account. To
begin anew resets what was spent: stop the SuperNode first. The site key is created on
first use; its private part stays in the state folder. A model deleted here can no
longer be used for predictions: the server knows the digests of its parts, not their
parameters.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flwr.app import Context, RecordDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from client_apps.account_metrics import site_metrics
from client_apps.account_page import account_page
from client_apps.data.ledger import Ledger, open_ledger
from client_apps.data.saved_models import SavedModel, parts_of
from client_apps.privacy.accounts import earlier_accounts
from client_apps.privacy.approval import (
    add_approval,
    read_proposal,
    refused_proposals,
    tables_to_approve,
)
from client_apps.privacy.first_policy import first_policies
from client_apps.privacy.guard import budgets
from client_apps.rounds.site import Site
from tp_flower import model_names
from tp_flower.errors import ModelError, SiteError, SourceError, TPFlowerError
from tp_flower.files import PRIVATE, write_file
from tp_flower.node_config import STATE_DIR, TABLES
from tp_flower.privacy.epsilons import compose, epsilons
from tp_flower.reports import blocks
from tp_flower.reports.blocks import Record
from tp_flower.reports.console import format_bytes, format_count, text_table
from tp_flower.sources.derived.accounts import account_name, source_id
from tp_flower.sources.entries import quote_toml
from tp_flower.sources.policy import DEFAULT_DELTA
from tp_flower.sources.shards import load_tables
from tp_flower.terms.fragment_text import printable
from tp_flower.terms.proposal_text import proposal_text

SHARD = [blocks.text_column("table at site", "shard")]
BUDGET = [
    blocks.Column("spent", lambda shard: f"{shard.content['spent']:.4f}"),
    blocks.text_column("of", "of"),
    blocks.text_column("per", "per"),
    blocks.Column("delta", lambda shard: f"{shard.amount('delta'):g}"),
]


def show_account(root: str, tables: str, page: str) -> RenderableType:
    """Return the account for the console.

    If ``page`` names a file, also write all queries to it as a page.
    """
    table = account(root, tables)
    if page:
        write_page(root, tables, table, Path(page))
    return Group(
        text_table(table.head, table.rows, words=table.words), Text(table.note)
    )


def write_page(root: str, tables: str, table: blocks.Table, file: Path) -> None:
    """Write the page of a ledger, with the account, for its owner alone."""
    site = _site(root, tables)
    sites = list(dict.fromkeys(shard.site for shard in site.shards))
    page = account_page(ledger_lines(root), table, _queries_of_day(root, site), sites)
    try:
        write_file(file, [page.encode()], is_durable=False, mode=PRIVATE)
    except OSError as error:
        raise SiteError(f"--page {file}: {error.strerror}") from error


def _queries_of_day(root: str, site: Site) -> blocks.Table:
    """Return how many queries of each shard count for its quota now."""
    ledger = open_ledger(root)
    shards = []
    for source in site.shards:
        name = source_id(source)
        queries = ledger.queries(name).values()
        counts = {
            "shard": f"{source.table} at {source.site}",
            "counted": sum(of_day for _, of_day in queries),
            "allowed": site.quotas_by_rows.get(name),
        }
        shards.append(Record(counts))
    columns = [
        blocks.count_column("queries", "counted"),
        blocks.count_column("allowed", "allowed"),
    ]
    return blocks.tabulate("Queries within 24 hours", shards, [*SHARD, *columns])


def begin_anew(root: str, file: Path) -> None:
    """Write the lines of a ledger to a new file and start an empty ledger."""
    ledger = open_ledger(root)
    try:
        with file.open("x", encoding="utf-8") as exported:
            exported.writelines(f"{line}\n" for line in ledger.export())
            exported.flush()
            os.fsync(exported.fileno())
    except OSError as error:
        raise SiteError(f"--begin-anew {file}: {error.strerror}") from error
    ledger.begin_anew()


def ledger_lines(root: str) -> list[Record]:
    """Return the lines of a ledger, after checking its chain."""
    ledger = open_ledger(root)
    ledger.spent("")
    return [Record(json.loads(line)) for line in ledger.export()]


@dataclass(frozen=True)
class RunToApprove:
    """A run that the policies of some tables do not list, and its text.

    Without tables it cannot be approved.
    """

    text: str
    digest: str
    tables: tuple[str, ...]
    file: Path

    def approve(self) -> str:
        """Add the run to the policies in the tables file; return a confirmation."""
        add_approval(self.file, self.digest, self.tables)
        policies = ", ".join(
            f"[tables.{quote_toml(table)}.policy]" for table in self.tables
        )
        return f"Approved: approved-runs of {policies} in {self.file} has it now."


def runs_to_approve(
    root: str, tables: str, file: Path | None
) -> Iterator[RunToApprove]:
    """Yield the refused runs that the policies do not list.

    They are those in the ledger, or the one in ``file``.
    """
    shards = _site(root, tables).shards
    sites = {shard.site for shard in shards}
    if file is None:
        proposals = refused_proposals(item.content for item in ledger_lines(root))
    else:
        proposals = [read_proposal(file)]
    for proposal in proposals:
        policies = tables_to_approve(proposal, shards)
        if not policies:
            continue
        try:
            text = proposal_text(proposal, sites)
        except TPFlowerError as error:
            # one that cannot be explained is not to be approved, nor hide the others
            text = f"RUN {proposal.digest}\nrefused: {printable(str(error))}"
            policies = []
        yield RunToApprove(text, proposal.digest, tuple(policies), Path(tables))


def _site(root: str, tables: str) -> Site:
    return Site(Context(0, 0, {TABLES: tables, STATE_DIR: root}, RecordDict(), {}))


def account_metrics(root: str, tables: str) -> str:
    """Return the account of each shard of a tables file as metrics for Prometheus."""
    return site_metrics(root, _site(root, tables))


def account(root: str, tables: str) -> blocks.Table:
    """Return the epsilons and the budget of each shard of a tables file."""
    site = _site(root, tables)
    ledger = open_ledger(root)
    budget_of = budgets(site)
    shards: list[Record] = []
    earlier: dict[str, str] = {}
    for source in site.shards:
        name = source_id(source)
        place = f"{source.table} at {source.site}"
        budget = budget_of.get(name)
        delta = budget.delta if budget else DEFAULT_DELTA
        content = {
            "shard": place,
            "of": f"{budget.epsilon:g}" if budget else "no budget",
            "per": source.policy.per,
        }
        shards.append(_spent_record(ledger, name, delta, content))
        for before in earlier_accounts(ledger, source, site.shards):
            earlier[before] = f"{place}, before: {account_name(before)}"
    for name, place in earlier.items():
        content = {"shard": place, "of": "no table's now", "per": "-"}
        shards.append(_spent_record(ledger, name, DEFAULT_DELTA, content))
    table = blocks.epsilon_table("Epsilon spent, of the budget", shards, SHARD, BUDGET)
    if not any(shard.amount("spent") for shard in shards):
        return table
    return replace(table, note=f"{table.note} {blocks.NOTES['spent']}".strip())


def _spent_record(
    ledger: Ledger, name: str, delta: float, content: dict[str, str]
) -> Record:
    """Return a row of the account: what rows have spent by an identifier."""
    released = ledger.released(name)
    spent = {"spent": compose(released, delta), "delta": delta}
    return Record({**content, **vars(epsilons(released, delta)), **spent})


def policy(tables: str, table: str) -> str:
    """Return first policies of a tables file's tables, to be put at its end."""
    sources = load_tables(tables)
    if any(source.table == table and source.has_policy for source in sources):
        raise SourceError(
            f"table {table!r} has a policy in the tables file {tables}: change its "
            "lines there, or take them out, and a first one is written that allows "
            "nothing"
        )
    text = first_policies(sources, table)
    if not text:
        problem = "no table without a policy"
        if table:
            problem = f"no table {table!r}"
        raise SourceError(f"the tables file {tables} has {problem}")
    return text


def models(task: str, root: Path, model: str) -> RenderableType:
    """List, show or delete the site's parts of models."""
    if task == "delete":
        return Text(f"deleted {model_names.delete_version(root, model)}")
    if task == "list":
        return _list(root)
    version = model_names.find_version(root, model)
    parts = sorted(parts_of(root, version).items())
    return Group(*(_part_view(version, number, folder) for number, folder in parts))


def _list(root: Path) -> RenderableType:
    """Return a table of the saved models in a state folder."""
    models = model_names.versions_in(root)
    if not models:
        return Text("no models")
    rows = []
    for model in models:
        folders = parts_of(root, model).values()
        size = sum(f.stat().st_size for part in folders for f in part.iterdir())
        names = ", ".join(dict.fromkeys(map(_table_of, folders)))
        rows.append((str(model), names, format_count(len(folders)), format_bytes(size)))
    return text_table(("model", "tables", "parts", "size"), rows, words=(0, 1))


def _table_of(folder: Path) -> str:
    """Return a participant's table; an unreadable one must not hide the others."""
    try:
        return SavedModel.load(folder).fragment.name
    except ModelError:
        return "(damaged)"


def _part_view(model: model_names.ModelVersion, number: int, folder: Path) -> Table:
    """Return a table of the properties of a saved part."""
    saved = SavedModel.load(folder)
    fragment = saved.fragment
    encoder = saved.encoder.encoder
    title = f"{model}, part {number}: table {fragment.name} as {saved.table}"
    properties = {
        "model": saved.spec.kind,
        "parameters": format_count(len(saved.parameters)),
        "features": ", ".join(
            f"{feature.name} = {feature.sql}" for feature in fragment.features
        ),
        "encoded features": ", ".join(encoder.feature_names),
        "label": fragment.label or "another table's",
        "filters": " AND ".join(fragment.filters) or "none",
        "software": ", ".join(
            f"{name} {text}" for name, text in saved.versions.items()
        ),
        "folder": str(folder),
    }
    return text_table(("", ""), properties.items(), words=(0, 1), title=title)
