"""Effects and factors of tables' keys, which a run fits to its best model's scores.

The keys that may get some are found in the set-up; here the server fits both, one after
the other, and reports them. What the tables get is brought by the message that ends the
run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from strategies.setup.problem import TrainingProblem
from strategies.training.key_factors import NO_FACTORS, FittedFactors, fit_factors
from strategies.training.row_effects import NO_EFFECTS, FittedEffects, fit_effects
from tp_flower.arrays import AnyArray
from tp_flower.joins.mapping import TableRows
from tp_flower.protocol.inference_messages import FinishPart
from tp_flower.settings.training import NONE

if TYPE_CHECKING:
    from strategies.training.strategy import TrainingStrategy

Keys = Mapping[str, TableRows]
"""By table, the key of each row that takes part."""
LEAST_GAIN: Final = 0.005
"""Of the validation loss, by a table's effects: beside less, factors gain hardly more,
and take as long as all the rest."""


@dataclass(frozen=True)
class Refined:
    """The effects and the factors that were fitted; None where none help."""

    effects: FittedEffects | None
    factors: FittedFactors | None

    @property
    def is_empty(self) -> bool:
        """Whether neither help."""
        return self.effects is None and self.factors is None

    def parts(
        self, problem: TrainingProblem, share: float = 1.0
    ) -> dict[int, FinishPart]:
        """Return what the last message brings each part, by number.

        ``share`` is that by which the tables' scores count, effects among them.
        """
        fields: dict[int, dict[str, AnyArray]] = {}
        for field, fitted in (("effects", self.effects), ("factors", self.factors)):
            of_rows = {} if fitted is None else fitted.of_rows
            scale = share if field == "effects" else 1.0
            for name, each in of_rows.items():
                values = each / scale
                for number, rows in problem.tables[name].scatter_rows(values).items():
                    fields.setdefault(number, {})[field] = rows
        return {number: FinishPart(**each) for number, each in fields.items()}


def warn_of_keys(run: "TrainingStrategy", keys: Keys, factor_keys: Keys) -> None:
    """Warn of tables that are to have effects or factors, and can have none."""
    settings = run.settings
    with_keys = {name.lower() for name in keys}
    for name in settings.effect_tables:
        if name.lower() not in with_keys:
            run.warn(NO_EFFECTS % name)
    if settings.factor_tables and len(factor_keys) < len(settings.factor_tables):
        run.warn(NO_FACTORS % ", ".join(settings.factor_tables))


def refine_by_keys(
    run: "TrainingStrategy", problem: TrainingProblem, keys: Keys, factor_keys: Keys
) -> Refined:
    """Fit effects to the scores, then factors, and report both.

    ``keys`` may get the former, ``factor_keys`` the latter. The vectors of scores
    become those with what was fitted.
    """
    settings = run.settings
    effects = factors = None
    if keys:
        are_wanted = bool(settings.effect_tables)
        effects = fit_effects(problem, keys, are_wanted=are_wanted)
        run.chosen["effects"] = NONE if effects is None else dict(effects.entries)
    if len(factor_keys) > 1:
        with_effects = () if effects is None else effects.tables_of(LEAST_GAIN)
        factors = fit_factors(problem, factor_keys, settings, with_effects)
        run.chosen["factors"] = NONE if factors is None else dict(factors.entry)
        if effects is not None and factors is not None:
            effects.fit_again()
    return Refined(effects, factors)
