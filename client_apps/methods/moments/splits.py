"""Which rows take part in which pass, worked out from the run's seed at their site.

A server that chose them would weigh the rows of other tables as it likes: how many
training rows are behind a row are then digits of an exact sum, which tell it. So rows
that are held out at random follow from the proposal; groups from the site's own keyed
hashes; times in their order, of which the server chooses where to cut.

Rows of a table in several shards are drawn from all of these together: of the label's
table from all rows, of another from those in joined rows. Every site is told how many
each shard has of them; a shard works its own number out, and pads are off where two
sites were told others.
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
        split_rows: of each shard of another table that is held out at random, those in
            joined rows.
    """

    site: Site
    number: int
    label_rows: Sequence[int]
    split_rows: Sequence[int]

    def check(self, bits: AnyArray, takes_part: BoolArray, splitting: str) -> None:
        """Refuse passes that are not those of the run's split.

        ``bits`` are a bit of each row, uint8 (n,), for every pass that it takes part
        in; ``takes_part`` are the rows in joined rows by the counts alone, (n,), and
        ``splitting`` is the table by whose rows joined rows are held out.

        Raises:
            MessageError: the server chose them.
        """
        is_sampled = self._sampled
        is_left_out = is_sampled & takes_part & (bits == 0)
        if is_left_out.any() or bits[~is_sampled].any():
            raise MessageError(_CONTRADICTION)
        if self._table != splitting:
            return
        if self.site.terms.settings.split.kind == TIME:
            _check_times(bits, self._told["times"])
            return
        subset = self._subset(takes_part)
        if np.any(bits & ~(np.uint8(1) << subset)):
            raise MessageError(_CONTRADICTION)

    @property
    def _table(self) -> str:
        return self.site.terms.proposal.parts[self.number].table

    @property
    def _has_label(self) -> bool:
        return self._table == self.site.terms.proposal.label_table

    def _span(self, field: str, told: Sequence[int], rows: int) -> slice:
        """Return where a shard's rows are among those of all shards of its table.

        ``told`` is how many each shard has, of which this one has ``rows``.
        """
        shards = sorted(self.site.terms.proposal.shards_of(self._table))
        agree(field, len(shards), len(told))
        place = shards.index(self.number)
        agree(field, rows, told[place])
        start = sum(told[:place])
        return slice(start, start + rows)

    @cached_property
    def _label_span(self) -> slice:
        """The rows of a shard of the label's table among those of all shards."""
        rows = self.site.extracted(self.number).rows
        return self._span("label_rows", self.label_rows, rows)

    @cached_property
    def _sampled(self) -> BoolArray:
        """Which rows can take part, (n,)."""
        if self._has_label:
            return self._sampled_of_all[self._label_span]
        return np.ones(self.site.extracted(self.number).rows, np.bool_)

    @cached_property
    def _sampled_of_all(self) -> BoolArray:
        """Which rows of all shards of the label's table can take part."""
        return sampled_rows(sum(self.label_rows), self.site.terms.settings)

    def _subset(self, takes_part: BoolArray) -> SubsetArray:
        """Return the subset of each row, (n,); of rows in no joined row any."""
        settings = self.site.terms.settings
        if settings.split.kind == GROUP:
            subset: SubsetArray = self._told["subset"]
            return subset
        if not settings.split.table:
            return random_subset(self._sampled_of_all, settings)[self._label_span]
        if len(self.site.terms.proposal.shards_of(self._table)) == 1:
            return random_subset(takes_part, settings)
        # which of the rows in between take part changes nothing of the others' subsets
        rows = int(np.count_nonzero(takes_part))
        span = self._span("split_rows", self.split_rows, rows)
        of_all = random_subset(np.ones(sum(self.split_rows), np.bool_), settings)
        subset = np.full(len(takes_part), TRAIN, np.uint8)
        subset[takes_part] = of_all[span]
        return subset

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
