"""The declaration of a training method, and the registry of those that a run can name.

A method is a room of one name on three sides: what both sides share in
``tp_flower/methods``, the server's half in ``strategies/methods``, and the sites' in
``client_apps/methods``. Nothing else names it: whatever depends on the method is a
property of its declaration, or of the :class:`~tp_flower.settings.rules.Rules` that its
room adds to the settings.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tp_flower.objectives import Objective
from tp_flower.protocol.messages import Action
from tp_flower.protocol.training_messages import Update

Family = type[Objective]


def any_loss(_family: Family) -> bool:
    """Return True: any family will do."""
    return True


def curved_loss(family: Family) -> bool:
    """Return whether a family has second derivatives to measure steps by."""
    return family.has_curvature


def separable_loss(family: Family) -> bool:
    """Return whether a row's loss depends on that row alone."""
    return family.is_separable


def bounded_loss(family: Family) -> bool:
    """Return whether a family's second derivatives have a bound that labels leave."""
    return math.isfinite(family.max_curvature)


def least_squares(family: Family) -> bool:
    """Return whether squares decide: for classes they are those of indicators."""
    return family.has_constant_hessian or 0 not in family.class_counts


@dataclass(frozen=True, kw_only=True)
class Method:
    """One value of the setting ``strategy``; epochs and sizes are its defaults.

    Attributes:
        family: the room of methods that share messages and state.
        actions: its messages, besides those of every run.
        epochs: at most; training ends where it has converged.
        few_epochs: those with noise, which each costs some budget, with a coreset, or
            where it ``overfits`` and no rows validate.
        patience: the default where validation rows are automatic.
        sends_scores: whether scores of rows leave in training.
        scores_per_epoch: vectors of scores that leave in an epoch, for each batch.
        rules: where its :class:`Rules` are, as ``module:name``; "" for none.
        joins: whether it trains over joins.
        is_prepared: whether its training over joins begins with ``prepare``.
        keeps_labels: whether labels stay at their sites.
        tells: what the server learns of a table's rows, if not scores, in words for
            their owner.
        holds_out: whether joined rows can be held out: there is a label to predict.
        overfits: whether rows validate by default.
        updates: how the shards of a table may train together; ``LOCAL``: each has a
            model of its own. Without any, a table in several shards is refused.
        unions: the values of the setting ``lou`` that choose among these.
        only_model: the kind of models that it trains alone; "" for all kinds.
        takes_codes: whether its models take categories as codes.
        starts_from: the setting that names a saved model to start from; "" for none.
        plans_noise: whether the noise that a run asks for is planned; a run that asks
            for noise on features or predictions is refused otherwise.
        solves_tables: whether linear models are solved for exactly, from sums of
            products that noise can cover.
        sends_gradients: whether a site sends gradients of batches, not updates.
        sends_a_row_once: whether a row of a table is in a release at most once, as the
            accountants assume: rows of a coreset leave in the clear, without any noise
            to count.
        is_full_batch: whether the only batch of an epoch has all joined rows.
        sampled_rows: joined rows to draw; 0 trains on all of them.
        is_compared: whether `explain` compares its bytes with those of the strategy
            that "auto" would take.
        solvers: the server's solvers; empty if the sites train.
        takes_loss: whether it trains by a family of objectives.
    """

    name: str
    family: str
    actions: tuple[Action, ...]
    epochs: int
    few_epochs: int = 0
    patience: int = 10
    sends_scores: bool = True
    scores_per_epoch: int = 1
    rules: str = ""
    joins: bool = True
    is_prepared: bool = True
    keeps_labels: bool = False
    tells: str = ""
    holds_out: bool = True
    overfits: bool = False
    updates: tuple[Update, ...] = ()
    unions: tuple[str, ...] = ()
    only_model: str = ""
    takes_codes: bool = False
    starts_from: str = ""
    plans_noise: bool = False
    solves_tables: bool = False
    sends_gradients: bool = False
    sends_a_row_once: bool = True
    is_full_batch: bool = False
    sampled_rows: int = 0
    is_compared: bool = False
    solvers: tuple[str, ...] = ()
    takes_loss: Callable[[Family], bool] = any_loss


METHODS: Final[dict[str, Method]] = {}
"""By the value of the setting ``strategy``."""


def register(*methods: Method) -> None:
    """Add methods; ValueError if another method already has the name."""
    for method in methods:
        if METHODS.setdefault(method.name, method) is not method:
            raise ValueError(
                f"method {method.name!r} is registered: choose another name"
            )


def start_model(config: Mapping[str, object]) -> str:
    """Return the saved model that a run config starts from; "" for none."""
    return next((str(config[key]) for key in start_keys() if config.get(key)), "")


def start_keys() -> list[str]:
    """Return the keys of the settings that name a saved model to start from."""
    fields = (method.starts_from for method in METHODS.values())
    return [name.replace("_", "-") for name in fields if name]


def import_reference(reference: str) -> Any:
    """Import and return what a reference, ``module:name``, names."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
