"""Resume a run that stopped: its settings, and its sites."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flwr.serverapp import Grid

from strategies.run.journal import FOLDER, read_head
from strategies.run.sites import Inventory, find_sites
from tp_flower.errors import MissingSiteError, SettingsError
from tp_flower.files import home_folder
from tp_flower.protocol.fields import Document
from tp_flower.protocol.setup_messages import DescribeRequest
from tp_flower.settings import Settings, all_settings

FREE: Final = frozenset(item.key for item in all_settings() if item.may_change)
"""Settings that may change when a run is resumed, because no result depends on them."""


def find_run(resume: str) -> Path:
    """Return the folder of the run that the setting ``resume`` names."""
    runs = home_folder() / "runs"
    for folder in (Path(resume).expanduser(), runs / resume):
        if folder.is_dir():
            read_head(folder / FOLDER)
            return folder.resolve()
    stopped = sorted(path.parent.parent.name for path in runs.glob(f"*/{FOLDER}/*"))
    run_names = ", ".join(dict.fromkeys(stopped)) or "none"
    raise SettingsError(
        f"resume: there is no run {resume!r} here or in {runs}; runs there "
        f"that stopped: {run_names}"
    )


def resume_settings(settings: Settings) -> Settings:
    """Return the settings with which the run that ``resume`` names continues.

    A setting that has its default value is taken from the run.
    """
    folder = find_run(settings.resume)
    began = read_head(folder / FOLDER)["settings"]
    if began["tables"] and not settings.tables:
        raise SettingsError(
            f"the run of {folder} began with tables={began['tables']!r}: set it "
            "again, because simulated sites read it from the run config"
        )
    defaults = Settings().to_dict()
    began["output-dir"] = str(folder)
    changed = {
        key: value
        for key, value in settings.to_dict().items()
        if value not in (defaults[key], began[key])
    }
    if fixed := [key for key in changed if key not in FREE]:
        differences = "; ".join(f"{k}: {began[k]!r}, not {changed[k]!r}" for k in fixed)
        raise SettingsError(
            f"the run of {folder} resumes with the settings it began with: "
            f"{differences}. Only these may change: {', '.join(sorted(FREE))}"
        )
    return Settings.from_run_config({**began, **changed, "resume": str(folder)})


def check_same(settings: Settings, began: Document) -> None:
    """Raise SettingsError if settings that affect a run's results differ."""
    differ = {
        key: value
        for key, value in settings.to_dict().items()
        if key not in FREE | {"output-dir"} and value != began.get(key)
    }
    if differ:
        differences = "; ".join(
            f"{k}: {began.get(k)!r}, not {v!r}" for k, v in differ.items()
        )
        raise SettingsError(
            f"the run resumes with the settings it began with: {differences}"
        )


def find_again(
    grid: Grid,
    settings: Settings,
    run: str,
    before: Inventory,
    request: DescribeRequest,
) -> tuple[dict[int, int], dict[int, int | None]]:
    """Find the sites of a stopped run, whatever node numbers they have now.

    Return each node's present number, and the last round that it has answered.
    """
    hosts = _hosts(before)
    sites = find_sites(
        *(grid, settings, request, run),
        is_complete=lambda sites: hosts.keys() <= _hosts(sites).keys(),
    )
    nodes_by_shards = _hosts(sites)
    if missing := [
        node for shards, node in hosts.items() if shards not in nodes_by_shards
    ]:
        names = ", ".join(repr(before.site_names[node]) for node in sorted(missing))
        raise MissingSiteError(
            f"the run cannot go on without all of its sites: {names} did not connect "
            f"within wait-seconds = {settings.wait_seconds:g} with the tables that the "
            "run began with"
        )
    addresses = {node: nodes_by_shards[shards] for shards, node in hosts.items()}
    return addresses, {
        node: sites.positions[address] for node, address in addresses.items()
    }


def _hosts(inventory: Inventory) -> dict[frozenset[tuple[str, str, int, int]], int]:
    """Return each node by its shards, which no other node hosts."""
    shards_of: dict[int, set[tuple[str, str, int, int]]] = {}
    for shard in inventory.shards:
        name = (shard.table.lower(), shard.site, shard.index, shard.position)
        shards_of.setdefault(shard.node, set()).add(name)
    return {frozenset(shards): node for node, shards in shards_of.items()}


def positions_text(positions: Mapping[int, int | None]) -> str:
    """Return the last rounds of nodes as text for a log.

    >>> positions_text({2: 7, 3: None})
    'node 2 at round 7, node 3 at none'
    """
    return ", ".join(
        f"node {node} at {'none' if last_round is None else f'round {last_round}'}"
        for node, last_round in sorted(positions.items())
    )
