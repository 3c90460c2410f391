"""Whether a saved model may have numbers of its rows' keys: effects, and factors.

The proposal says whether a run fits some, and of which tables. A key on whose value a
model depends is a feature, so a policy must let features read it. Factors leave again
in every prediction, which a policy must allow besides (``releases.factors``).
"""

from client_apps.rounds.site import Site
from tp_flower.query.fragment import Role
from tp_flower.query.reads import reads
from tp_flower.sources.policy import FACTORS


def takes_effects(site: Site, number: int) -> bool:
    """Whether the run may give a part's keys effects on the scores."""
    settings = site.terms.settings
    is_wanted = _is_among(site, number, settings.effect_tables)
    return settings.fits_effects and is_wanted and _may_read_keys(site, number)


def takes_factors(site: Site, number: int) -> bool:
    """Whether the run may give a part's keys factors, which predictions send.

    Raises:
        PolicyError: it asks for them by the table's name, and the policy lets none
            leave.
    """
    settings = site.terms.settings
    policy = site.source(number).policy
    if not (settings.fits_factors and _is_among(site, number, settings.factor_tables)):
        return False
    if settings.factor_tables:
        policy.check_release(FACTORS, is_private=False)
    return policy.lets_leave(FACTORS) and _may_read_keys(site, number)


def _is_among(site: Site, number: int, aliases: tuple[str, ...]) -> bool:
    """Whether a part's table is one of those that are named, or none is.

    Aliases are compared without case, as in DuckDB.
    """
    table = site.fragment(number).table
    return not aliases or table.lower() in {alias.lower() for alias in aliases}


def _may_read_keys(site: Site, number: int) -> bool:
    """Whether a model may depend on the keys of a part's rows.

    They are features then: a policy must let features read them, and scores of a table
    without features are of no account.
    """
    policy = site.source(number).policy
    fragment = site.fragment(number)
    columns = {read.column for read in reads(fragment) if read.role is Role.KEY}
    return policy.is_open or not (
        policy.unlisted(columns) or not fragment.features or fragment.subquery
    )
