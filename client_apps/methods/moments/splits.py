"""Which rows take part in which pass, worked out from the run's seed at their site.

A server that chose them would weigh the rows of other tables as it likes: how many
training rows are behind a row are then digits of an exact sum, which tell it. So rows
that are held out at random follow from the proposal; groups from the site's own keyed
hashes; times in their order, of which the server chooses where to cut. Of a table in
several shards, no site knows how many rows there are: their random rows are taken as
they are told.
"""

from itertools import pairwise

import numpy as np

from client_apps.handlers.splits import told_split
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.errors import MessageError
from tp_flower.splits import GROUP, TEST, TIME, TRAIN, VALIDATION, SubsetArray
from tp_flower.terms.extraction import random_subset, sampled_rows

_CONTRADICTION = "'passes' has other rows than the run's split"


def check_split(
    site: Site, number: int, bits: AnyArray, takes_part: BoolArray, splitting: str
) -> None:
    """Refuse passes of a part's rows that are not those of the run's split.

    ``bits`` are a bit of each row, uint8 (n,), for every pass that it takes part in;
    ``takes_part`` are the rows in joined rows by the counts alone, (n,), and
    ``splitting`` is the table by whose rows joined rows are held out.

    Raises:
        MessageError: the server chose them.
    """
    is_sampled = _sampled(site, number, len(bits))
    if is_sampled is not None:
        is_left_out = is_sampled & takes_part & (bits == 0)
        if is_left_out.any() or bits[~is_sampled].any():
            raise MessageError(_CONTRADICTION)
    if site.terms.proposal.parts[number].table != splitting:
        return
    if site.terms.settings.split.kind == TIME:
        _check_times(bits, _told(site, number)["times"])
        return
    subset = _subset(site, number, is_sampled, takes_part)
    if subset is not None and np.any(bits & ~(np.uint8(1) << subset)):
        raise MessageError(_CONTRADICTION)


def _sampled(site: Site, number: int, rows: int) -> BoolArray | None:
    """Return which rows of a part can take part, (n,); None for one of many shards."""
    proposal = site.terms.proposal
    table = proposal.parts[number].table
    if len(proposal.shards_of(table)) > 1:
        return None
    if table != proposal.label_table:
        return np.ones(rows, np.bool_)
    return sampled_rows(rows, site.terms.settings)


def _subset(
    site: Site, number: int, is_sampled: BoolArray | None, takes_part: BoolArray
) -> SubsetArray | None:
    """Return the subset of each row of a part, (n,), as far as its site knows it."""
    settings = site.terms.settings
    if settings.split.kind == GROUP:
        subset: SubsetArray = _told(site, number)["subset"]
        return subset
    if is_sampled is None:
        return None
    return random_subset(takes_part if settings.split.table else is_sampled, settings)


def _told(site: Site, number: int) -> dict[str, AnyArray]:
    """Return what the site has told of the split of a part's rows."""
    terms = site.terms.extract_parts[number].split
    return told_split(site, terms, site.extracted(number).keys)


def _check_times(bits: AnyArray, times: AnyArray) -> None:
    """Refuse rows that train, validate and test but one after the other."""
    if np.any(bits[np.isnan(times)] & ~np.uint8(1 << TRAIN)):
        raise MessageError(_CONTRADICTION)
    spans = []
    for number in (TRAIN, VALIDATION, TEST):
        of_pass = times[(bits >> number & 1) > 0]
        of_pass = of_pass[~np.isnan(of_pass)]
        if len(of_pass):
            spans.append((of_pass.min(), of_pass.max()))
    if any(last >= first for (_, last), (first, _) in pairwise(spans)):
        raise MessageError(_CONTRADICTION)
