"""The terms that sites derive from a run's proposal to compare later requests with."""

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tp_flower.errors import ProposalError, SettingsError
from tp_flower.extraction.empty_answers import NoRows
from tp_flower.features.choice import TableChoice, choose_encoders
from tp_flower.learning.models.local_model import LINEAR, NUMPY_KINDS, ModelSpec
from tp_flower.methods.method import METHODS
from tp_flower.protocol.codec import parse
from tp_flower.protocol.fields import MASKED, SEALED
from tp_flower.protocol.messages import Action
from tp_flower.protocol.proposal import Proposal, ProposedPart
from tp_flower.protocol.setup_messages import ExtractPart, TableShards
from tp_flower.protocol.training_messages import Outline, PrivacyTerms, Update
from tp_flower.query import Fragment
from tp_flower.settings import Settings
from tp_flower.settings.rules import rules_of
from tp_flower.settings.run import (
    EVALUATE,
    EXPLAIN,
    JOINED,
    PREDICT,
    SERVE,
    TRAIN,
    WITH_A_MODEL,
)
from tp_flower.terms.cutoffs import (
    SealedPairs,
    answered_nulls,
    answering_tables,
    recipients,
    sealed_pairs,
)
from tp_flower.terms.extraction import extract_parts
from tp_flower.terms.fits import CountedFit
from tp_flower.terms.groups import (
    JoinSide,
    join_group,
    join_sides,
    members_of_groups,
    table_group,
)
from tp_flower.terms.partials import Overlap, overlaps


@dataclass(frozen=True)
class RunTerms:
    """The terms of one run, or of a fit of a search.

    A ``ProposalError`` reports that a proposal contradicts itself.
    """

    proposal: Proposal
    fit: CountedFit | None = None

    @cached_property
    def digest(self) -> str:
        """The digest of the proposal, which owners approve; computed once."""
        return self.proposal.digest

    @cached_property
    def settings(self) -> Settings:
        """The settings of the fit; those of the operator alone have their defaults."""
        return self.proposed if self.fit is None else self.fit.settings(self.proposed)

    @cached_property
    def proposed(self) -> Settings:
        """The settings that the run was proposed with."""
        try:
            return parse(self.proposal.settings, "settings", Settings.from_run_config)
        except SettingsError as error:
            raise ProposalError(
                f"the settings of the run's proposal: {error}"
            ) from None

    @cached_property
    def fragments(self) -> dict[int, Fragment]:
        """The query's fragment of each part."""
        parts = self.proposal.parts.items()
        return {
            n: parse(part.fragment, "fragment", Fragment.from_json) for n, part in parts
        }

    @cached_property
    def _shards(self) -> dict[str, dict[int, ProposedPart]]:
        """The shards of each table."""
        return {t: self.proposal.shards_of(t) for t in self.proposal.tables}

    def shards_beside(self, number: int) -> dict[int, ProposedPart]:
        """Return the shards of a part's table by participant, itself among them."""
        return self._shards[self.proposal.parts[number].table]

    @cached_property
    def extract_parts(self) -> dict[int, ExtractPart]:
        """The requests for the parts' rows, without readings and types of columns."""
        return extract_parts(self.proposal, self.settings)

    @cached_property
    def sealed_pairs(self) -> dict[int, tuple[SealedPairs, ...]]:
        """The pairs that parts of LATERAL sub-queries take from other sites."""
        return sealed_pairs(self.proposal, self.fragments)

    @cached_property
    def recipients(self) -> dict[SealedPairs, tuple[str, ...]]:
        """The nodes that each of these pairs are sealed for."""
        return recipients(self.proposal, self.sealed_pairs)

    @cached_property
    def overlaps(self) -> tuple[Overlap, ...]:
        """The shards of LATERAL sub-queries that may have rows of one key."""
        return overlaps(self.proposal, self.settings)

    def shares_keys(self, number: int) -> bool:
        """Return whether rows of a part's keys may be in other shards, too."""
        return any(number in overlap for overlap in self.overlaps)

    @cached_property
    def answering_tables(self) -> dict[int, str]:
        """By join the table whose last row answers for all keys that it lacks."""
        privacy = self.proposed.privacy
        return answering_tables(self.proposal, self.fragments, privacy)

    def no_rows(self, number: int) -> NoRows:
        """Return whether a part has that row, and which NULL keys of it that is for.

        The row is in the last shard of its table.
        """
        table = self.proposal.parts[number].table
        answering = self.answering_tables
        is_last = number == max(self.shards_beside(number))
        of_tables = {fragment.table: fragment for fragment in self.fragments.values()}
        nulls = answered_nulls(self.proposal.joins, answering, of_tables)
        return NoRows(
            is_last and table in answering.values(), nulls.get(table, frozenset())
        )

    def answered_groups(self, number: int) -> set[str]:
        """Return the groups of the joins whose other side has that row for a part."""
        table = self.proposal.parts[number].table
        joins = self.answering_tables.items()
        return {join_group(join) for join, other in joins if other != table}

    def groups_of(self, node: str) -> dict[str, set[str]]:
        """Return the nodes of the groups that a node shares a secret with."""
        groups = members_of_groups(
            self.proposal,
            has_join_secrets=self.settings.has_join_secrets,
            has_label_secrets=self.settings.has_label_secrets,
        )
        return {group: nodes for group, nodes in groups.items() if node in nodes}

    def join_sides(self, number: int) -> list[JoinSide]:
        """Return the sides of the joins that a part's rows take part in."""
        return join_sides(self.proposal, self.proposal.parts[number].table)

    def allows(self, action: Action) -> bool:
        """Return whether the run has a message that begins this action."""
        settings = self.settings
        is_training = settings.mode == TRAIN
        begun = {
            Action.CUTOFFS: bool(self.sealed_pairs or self.overlaps),
            Action.PARTIALS: bool(self.overlaps),
            Action.STATISTICS: settings.mode == EXPLAIN
            or (is_training and (self.fit is not None or not self.is_search)),
            Action.NEXT: self.is_search,
            # a search trains in fits that are counted
            Action.PREPARE: is_training
            and settings.method.is_prepared
            and (self.fit is not None or not self.is_search),
            # nothing is told of rows whose scores do not leave
            Action.RANK: settings.mode in (PREDICT, EVALUATE)
            or (settings.method.sends_scores and not self.is_resident),
            **dict.fromkeys(
                (Action.SCORE, Action.DIVIDE),
                settings.mode in WITH_A_MODEL or bool(settings.start),
            ),
            Action.INSPECT: settings.mode == EVALUATE and settings.inspects,
            Action.BINS: is_training and settings.asks_bins,
        }
        if action in begun:
            return begun[action]
        rules = map(rules_of, METHODS.values())
        begins = [rule.begins[action] for rule in rules if action in rule.begins]
        return any(is_begun(settings) for is_begun in begins)

    @property
    def is_resident(self) -> bool:
        """Whether rows are scored as requests ask for them, some at a time."""
        return self.settings.mode == SERVE

    @property
    def is_search(self) -> bool:
        """Whether the run trains candidates on folds of its rows."""
        return self.proposed.mode == TRAIN and self.proposed.folds > 0

    @property
    def trains_on_sample(self) -> bool:
        """Whether the run trains on a sample of the joined rows."""
        return bool(self.settings.training_sample)

    @property
    def saved_model(self) -> str:
        """The saved model that the proposal names, perhaps by version; "" for none."""
        return self.settings.start or self.settings.model_name

    @property
    def masks_scores(self) -> bool:
        """Whether scores leave masked, by the joins."""
        return self.settings.privacy.scores == MASKED

    @property
    def privacy(self) -> PrivacyTerms:
        """The mechanisms for models and scores."""
        return PrivacyTerms.of(self.settings.privacy)

    @property
    def outline(self) -> Outline:
        """The schedule of training over joins."""
        return outline_of(self.settings)

    def most_scores(self, batches: int) -> int:
        """Return the highest score number of a run with so many batches."""
        settings = self.settings
        epoch_scores = settings.method.scores_per_epoch
        # where there are two, they count from 2: their epochs follow from them
        return settings.epochs * epoch_scores * max(batches, 1) + epoch_scores - 1

    def most_sums(self, batches: int) -> int:
        """Return how many arrays a table's shards sum, besides a Gram matrix."""
        return self.settings.epochs * max(batches, 1) + 1

    def updates(self, number: int) -> tuple[Update, ...]:
        """Return how a part may train with the other shards of its table."""
        method = self.settings.method
        if len(self.shards_beside(number)) == 1 and not method.solvers:
            return (Update.LOCAL,)
        return method.updates

    def shards_of(self, number: int) -> TableShards | None:
        """Return the shards of a part's table; None if it is the only one."""
        table = self.proposal.parts[number].table
        numbers = list(self.shards_beside(number))
        if numbers[1:]:
            return TableShards(table_group(self.proposal, table), numbers)
        return None

    def union_group(self, number: int) -> str | None:
        """Return the group whose key seals the sums of a table's shards.

        It is None if the sums are in the clear.
        """
        if self.settings.privacy.unions != SEALED:
            return None
        return table_group(self.proposal, self.proposal.parts[number].table)

    def spec(self, number: int, received: ModelSpec) -> ModelSpec:
        """Return the model of a part.

        ``received`` has the number and the scale of its outputs: what a model has of
        classes, labels and the head does not follow from the proposal.
        """
        settings = self.settings
        table = self.proposal.parts[number].table
        kind = settings.model_of(table)
        if received.kind == LINEAR:
            # nothing is to be learned of features that are all constant
            kind = LINEAR
        if settings.method.only_model:
            kind = settings.method.only_model
        fields: dict[str, Any] = {
            "intercept": table == self.proposal.label_table,
            "hidden_sizes": settings.hidden_sizes,
            "seed": model_seed(settings.seed, table),
        }
        if kind in NUMPY_KINDS:
            fields = {name: fields[name] for name in NUMPY_KINDS[kind].fields}
        scale = received.output_scale
        return ModelSpec(
            kind=kind, outputs=received.outputs, output_scale=scale, **fields
        )

    def l2(self, spec: ModelSpec) -> float:
        """Return the weight of a model's penalty, in the unit of its parameters."""
        unit = 1.0
        if spec.kind not in NUMPY_KINDS:
            unit = spec.output_scale
        return self.settings.l2 * unit**2

    def choice(self, number: int) -> TableChoice:
        """Return the encoders of a part's features."""
        return self.choices[self.fragments[number].table]

    @cached_property
    def choices(self) -> dict[str, TableChoice]:
        """The encoders of each table's features."""
        settings = self.settings
        fragments = self.fragments.values()
        return choose_encoders(
            settings.encoders,
            {of.table: [feature.name for feature in of.features] for of in fragments},
            settings.max_categories,
            for_trees=settings.method.takes_codes,
            weighted=settings.row_weight != JOINED
            or any(of.weight for of in fragments),
        )

    def of_fit(self, number: int, candidate: int) -> "RunTerms":
        """Return the terms of a fit of a search; what they share is not read again."""
        fit = CountedFit.of(self.proposed, number, candidate)
        terms = RunTerms(self.proposal, fit)
        shared = ("proposed", "fragments", "extract_parts", "candidates")
        vars(terms).update({name: getattr(self, name) for name in shared})
        alike = self.candidates.setdefault(candidate, terms)
        vars(terms).update(settings=alike.settings, choices=alike.choices)
        return terms

    @cached_property
    def candidates(self) -> "dict[int, RunTerms]":
        """The terms of a fit of each candidate that has been trained so far."""
        return {}


def outline_of(settings: Settings) -> Outline:
    """Return the schedule of training over joins, which the server announces."""
    return Outline(
        strategy=settings.method_name,
        epochs=settings.epochs,
        sends=settings.rules.sends(settings),
    )


def model_seed(seed: int, table: str) -> int:
    """Return the seed of a table's model, which all its shards share.

    >>> [model_seed(3, table) for table in "ab"]
    [4056279928, 1758247618]
    """
    return zlib.crc32(f"{seed}/{table}".encode())
