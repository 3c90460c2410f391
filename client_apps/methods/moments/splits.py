"""Which rows take part in which pass, worked out from the run's seed at their site.

A server that chose them would weigh the rows of other tables as it likes: how many
training rows are behind a row are then digits of an exact sum, which tell it. So rows
that are held out at random follow from the proposal; groups from the site's own keyed
hashes; times in their order, of which the server chooses where to cut.

The rows of the label's table are drawn from all of its shards together. Every site is
told how many each has; a shard knows its own number, and pads are off where two sites
were told others. Of another table in several shards, no site knows which rows are in
joined rows: its random rows are taken as they are told.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from client_apps.handlers.training_rows import told_split
from client_apps.privacy.proposal_checks import agree
from client_apps.rounds.site import Site
from tp_flower.arrays import AnyArray, BoolArray
from tp_flower.errors import MessageError
from tp_flower.splits import GROUP, TEST, TIME, TRAIN, VALIDATION, SubsetArray
from tp_flower.terms.extraction import random_subset, sampled_rows

_CONTRADICTION = "'passes' has other rows than the run's split"


@dataclass(frozen=True, eq=False)
class TableSplit:
    """The split of a part's rows, as far as its site knows it.

    Attributes:
        label_rows: of each shard of the label's table.
    """

    site: Site
    number: int
    label_rows: Sequence[int]

    def check(self, bits: AnyArray, takes_part: BoolArray, splitting: str) -> None:
        """Refuse passes that are not those of the run's split.

        ``bits`` are a bit of each row, uint8 (n,), for every pass that it takes part
        in; ``takes_part`` are the rows in joined rows by the counts alone, (n,), and
        ``splitting`` is the table by whose rows joined rows are held out.

        Raises:
            MessageError: the server chose them.
        """
        is_sampled = self._sampled
        if is_sampled is not None:
            is_left_out = is_sampled & takes_part & (bits == 0)
            if is_left_out.any() or bits[~is_sampled].any():
                raise MessageError(_CONTRADICTION)
        if self._table != splitting:
            return
        if self.site.terms.settings.split.kind == TIME:
            _check_times(bits, self._told["times"])
            return
        subset = self._subset(takes_part)
        if subset is not None and np.any(bits & ~(np.uint8(1) << subset)):
            raise MessageError(_CONTRADICTION)

    @property
    def _table(self) -> str:
        return self.site.terms.proposal.parts[self.number].table

    @property
    def _has_label(self) -> bool:
        return self._table == self.site.terms.proposal.label_table

    @cached_property
    def _span(self) -> slice:
        """The rows of a shard of the label's table among those of all shards."""
        shards = sorted(self.site.terms.proposal.shards_of(self._table))
        agree("label_rows", len(shards), len(self.label_rows))
        place = shards.index(self.number)
        rows = self.site.extracted(self.number).rows
        agree("label_rows", rows, self.label_rows[place])
        start = sum(self.label_rows[:place])
        return slice(start, start + rows)

    @cached_property
    def _sampled(self) -> BoolArray | None:
        """Which rows can take part, (n,); None where that is not known."""
        if self._has_label:
            return self._sampled_of_all[self._span]
        if len(self.site.terms.proposal.shards_of(self._table)) > 1:
            return None
        return np.ones(self.site.extracted(self.number).rows, np.bool_)

    @cached_property
    def _sampled_of_all(self) -> BoolArray:
        """Which rows of all shards of the label's table can take part."""
        return sampled_rows(sum(self.label_rows), self.site.terms.settings)

    def _subset(self, takes_part: BoolArray) -> SubsetArray | None:
        """Return the subset of each row, (n,); None where that is not known."""
        settings = self.site.terms.settings
        if settings.split.kind == GROUP:
            subset: SubsetArray = self._told["subset"]
            return subset
        if not settings.split.table:
            return random_subset(self._sampled_of_all, settings)[self._span]
        if len(self.site.terms.proposal.shards_of(self._table)) > 1:
            return None
        return random_subset(takes_part, settings)

    @property
    def _told(self) -> dict[str, AnyArray]:
        """What the site has told of the split of its rows."""
        terms = self.site.terms.extract_parts[self.number].split
        return told_split(self.site, terms, self.site.extracted(self.number).keys)


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
