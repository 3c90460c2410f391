"""What a method adds to the settings of a run, in ``settings.py`` of its room."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from tp_flower.methods.method import METHODS, Method, import_reference
from tp_flower.protocol.messages import Action
from tp_flower.settings.declare import Setting

if TYPE_CHECKING:
    from tp_flower.settings.settings import Settings


def names_of(*groups: type[Any]) -> frozenset[str]:
    """Return the fields of groups of settings."""
    return frozenset(entry.name for group in groups for entry in fields(group))


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a method, and what follows from them.

    Attributes:
        groups: of its own settings; a shared group may be among them for its position.
        reads: the fields that it reads, besides those that every run reads.
        conflicts: yields the combinations of settings that it refuses.
        preference: of the methods, strategy "auto" is the one with the highest; 0 is
            never chosen.
        sends: returns the form in which sampled rows leave, if the server solves.
        begins: by action, whether a run has the stage that begins with it.
        tells: returns what a run tells the server of a table besides what its method
            does, in words for its owner; "" for nothing.
        tells_instead: returns what a run tells the server of a table in place of what
            its method does by default; "" for that.
        pads_sums: whether the sites of a join's two sides share a secret, though no
            scores leave masked.
        seals_to_label: whether each table's sites share a secret with the label's.
        covers_values: whether noise covers all values of a table, by its alias.
        instead: what does the work of a setting that it does not read, by field.
        synonyms: its settings, by the names that other libraries have for them.
    """

    groups: tuple[type[Any], ...] = ()
    reads: frozenset[str] = frozenset()
    conflicts: "Callable[[Settings], Iterator[str]]" = lambda _: iter(())
    preference: "Callable[[Settings], int]" = lambda _: 0
    sends: "Callable[[Settings], str | None]" = lambda _: None
    begins: "Mapping[Action, Callable[[Settings], bool]]" = field(default_factory=dict)
    tells: "Callable[[Settings], str]" = lambda _: ""
    tells_instead: "Callable[[Settings], str]" = lambda _: ""
    pads_sums: "Callable[[Settings], bool]" = lambda _: False
    seals_to_label: "Callable[[Settings], bool]" = lambda _: False
    covers_values: "Callable[[Settings, str], bool]" = lambda *_: False
    instead: Mapping[str, str] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)


def rules_of(method: Method) -> Rules:
    """Return the rules of a method."""
    return rules_at(method.rules)


@cache
def rules_at(reference: str) -> Rules:
    """Return the rules that a reference names, ``module:name``; none for ""."""
    rules: Rules = import_reference(reference) if reference else Rules()
    return rules


def is_read(setting: Setting, strategy: str, mode: str) -> bool:
    """Return whether a run of the strategy, in the mode, reads a setting."""
    readers = setting.readers
    reads = rules_of(METHODS[strategy]).reads
    is_of_strategy = not readers.of_methods or setting.field in reads
    return is_of_strategy and (not readers.modes or mode in readers.modes)


def general_methods() -> str:
    """Return the methods over joins that train all models, with noise."""
    return " or ".join(
        name
        for name, method in METHODS.items()
        if method.joins
        and method.plans_noise
        and method.sends_a_row_once
        and not (method.is_full_batch or method.only_model)
    )
