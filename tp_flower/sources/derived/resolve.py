"""Which shards the SELECT of a derived table reads: the site's entries of its names."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tp_flower.errors import SourceError, closest
from tp_flower.sources.derived.accounts import check_shared_rows
from tp_flower.sources.derived.select import parse_select
from tp_flower.sources.entries import TABLES_THERE
from tp_flower.sources.tables_file import DerivedShard, ShardSource

Shards = Mapping[str, Sequence[ShardSource]]
"""By table, in lower case, shards of it."""


def resolve_derived(sources: Sequence[ShardSource]) -> tuple[ShardSource, ...]:
    """Return the shards of a tables file, with those that derived ones read.

    Raises:
        SourceError: a SELECT names a table that its site does not have, or that is
            derived from its own; or the policies of tables that share rows do not fit.
    """
    if all(source.derived is None for source in sources):
        return tuple(sources)
    resolver = _Resolver(sources)
    resolved = tuple(resolver.resolve(k, ()) for k in range(len(sources)))
    check_shared_rows(resolved)
    return resolved


class _Resolver:
    """Resolves the names in the SELECTs of a site's shards, each once."""

    def __init__(self, sources: Sequence[ShardSource]) -> None:
        self._sources = sources
        self._resolved: dict[int, ShardSource] = {}

    def resolve(self, position: int, readers: tuple[str, ...]) -> ShardSource:
        """Return a shard with those that it reads; ``readers`` are read for them."""
        source = self._sources[position]
        derived = source.derived
        if derived is None:
            return source
        if position not in self._resolved:
            if source.table.lower() in readers:
                chain = " reads ".join((*readers, source.table.lower()))
                raise SourceError(
                    f"'sql' of table {source.table!r} reads the table itself ({chain})"
                    ": give its rows by 'path', or an entry of another name"
                )
            self._resolved[position] = self._derive(source, derived, readers)
        return self._resolved[position]

    def _derive(
        self, source: ShardSource, derived: DerivedShard, readers: tuple[str, ...]
    ) -> ShardSource:
        """Return a derived shard with the shards of all tables in its SELECT."""
        where = f"'sql' of table {source.table!r}"
        names = parse_select(derived.sql, where)
        own_name = source.table.lower()
        others = [name for name in names if not (derived.file and name == own_name)]
        readers = (*readers, own_name)
        shards = {name: self._shards(name, source.site, readers) for name in others}
        site = self._site_of(source, shards, where)
        if derived.file is not None:
            derived = replace(derived, file=replace(derived.file, site=site))
        of_file = () if derived.file is None else (derived.file,)
        tables = {
            name: tuple(
                shard for shard in shards.get(name, of_file) if shard.site == site
            )
            for name in names
        }
        return replace(source, site=site, derived=replace(derived, tables=tables))

    def _shards(
        self, name: str, site: str, readers: tuple[str, ...]
    ) -> list[ShardSource]:
        """Return the shards of a table at a site, or at any if it is not named."""
        return [
            self.resolve(position, readers)
            for position, source in enumerate(self._sources)
            if source.table.lower() == name and (source.site in ("", site) or not site)
        ]

    def _site_of(self, source: ShardSource, shards: Shards, where: str) -> str:
        """Return the site of all tables that a SELECT reads; refuse unknown tables."""
        if not shards:
            return source.site or f"{source.table}-{source.index}"
        sites = {
            name: {each.site for each in listed} for name, listed in shards.items()
        }
        common = set.intersection(*sites.values())
        if source.site:
            common &= {source.site}
        if len(common) == 1:
            return common.pop()
        for name, of_table in sites.items():
            if not of_table or (source.site and source.site not in of_table):
                raise self._unknown(name, source.site, where)
        listed = ", ".join(f"{n} at {sorted(of_n)}" for n, of_n in sites.items())
        raise SourceError(
            f"{where} reads tables of one site, and these are several ({listed}): give "
            "all of them, and the table itself, one 'site'"
        )

    def _unknown(self, name: str, site: str, where: str) -> SourceError:
        """Return the refusal of a table that is not at the SELECT's site."""
        there = sorted(
            {each.table for each in self._sources if not site or each.site == site}
        )
        at_site = f" of site {site!r}" if site else ""
        return SourceError(
            f"{where} reads {name!r}, which is no table{at_site} in the tables file"
            f"{TABLES_THERE}{', '.join(there)}{closest(name, there)}"
        )
