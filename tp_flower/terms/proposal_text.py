"""The text of a proposal for the owner of a table: the whole run, in plain words.

Every name, expression and setting comes from the server. None of them can begin a line
of the text or hide a part of it: line ends and invisible characters are escaped.
"""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tp_flower.errors import QueryError
from tp_flower.features.choice import render_entries
from tp_flower.protocol.fields import MASKED, SEALED
from tp_flower.protocol.proposal import (
    EXPLAIN_AS_TRAIN,
    Proposal,
    ProposedJoin,
    ProposedPart,
)
from tp_flower.query import Fragment
from tp_flower.settings import Settings
from tp_flower.settings.run import EVALUATE, PREDICT, SERVE, TRAIN, WITH_A_MODEL
from tp_flower.settings.run_config import changed_settings
from tp_flower.settings.search import candidates_of, fits_of
from tp_flower.settings.training import MLP
from tp_flower.terms.fragment_text import fragment_text, printable
from tp_flower.terms.partials import makes_partials

# of a site's public key, to be compared with the one in allowed-keys
KEY_DIGITS: Final = 16
# what no setting of a run decides
_BY_POLICY: Final = (
    "where a policy of yours has coefficients = true, the report shows coefficients "
    'of the table, or gains of trees; with releases.categories = "clear" the texts of '
    "their categories, too"
)
_TASKS: Final[Mapping[str, str]] = {
    PREDICT: "predicts these rows",
    EVALUATE: "is measured on these rows",
    SERVE: "predicts some of these rows at a time, as requests name them, until it "
    "is ended",
}
_HOW_OFTEN: Final[Mapping[str, str]] = {
    PREDICT: "once",
    EVALUATE: "once",
    SERVE: "whenever a request names the row",
}
_INDENT = "  "
_WIDTH = 100


def proposal_text(proposal: Proposal, own_sites: Collection[str]) -> str:
    """Return the text of a proposal for the sites of an owner.

    TPFlowerError if a fragment or a setting is none that this version can read: what
    cannot be explained is not to be approved.
    """
    # who approves training approves that it is explained
    mode = proposal.settings.get("mode", TRAIN)
    config = {**proposal.settings, "mode": EXPLAIN_AS_TRAIN.get(mode, mode)}
    settings = Settings.from_run_config(config)
    fragments = {
        number: _fragment(part) for number, part in sorted(proposal.parts.items())
    }
    sections = {
        f"RUN {proposal.digest}": (),
        "TABLES": _tables(proposal, fragments, own_sites),
        "TRAINING": _training(proposal, fragments, settings),
        "PROTECTION": _protection(settings, proposal.tables),
        "YOU": _meaning(proposal, fragments, settings, own_sites),
        "QUERY AND SETTINGS": (
            f"query: {printable(proposal.query)}",
            *_settings(config),
        ),
    }
    # only a heading begins a line
    return "\n".join(
        line
        for heading, lines in sections.items()
        for line in (
            heading,
            *(wrapped for text in lines for wrapped in _wrap(text)),
        )
    )


def _fragment(part: ProposedPart) -> Fragment:
    """Return a part's query; QueryError if it reads another table."""
    fragment = Fragment.from_json(part.fragment)
    if fragment.table != part.table:
        raise QueryError(
            f"table {part.table!r} of the proposal is {fragment.table!r} in its query"
        )
    return fragment


def _wrap(text: str) -> list[str]:
    """Return a line in lines of the page's width, indented as it is."""
    indent = f"{_INDENT}{text[: len(text) - len(text.lstrip(' '))]}"
    return textwrap.wrap(
        text.lstrip(" "),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}{_INDENT}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _tables(
    proposal: Proposal, fragments: dict[int, Fragment], own_sites: Collection[str]
) -> Iterator[str]:
    """Yield each table of the query: who holds it, what is read, and its joins."""
    shards: dict[str, dict[Fragment, list[str]]] = {}
    for number, fragment in fragments.items():
        part = proposal.parts[number]
        key = "no pinned key"
        if part.site_key:
            key = f"key {part.site_key[:KEY_DIGITS]}"
        yours = ", yours" if part.site in own_sites else ""
        holder = f"{printable(part.site)} ({key}{yours})"
        shards.setdefault(part.table, {}).setdefault(fragment, []).append(holder)
    first_fragments = {
        alias: next(iter(table_fragments)) for alias, table_fragments in shards.items()
    }
    for alias, table_fragments in shards.items():
        outer = ""
        if alias in proposal.outer:
            outer = ", LEFT JOINed"
        for fragment, holders in table_fragments.items():
            table, *pieces = fragment_text(replace(fragment, keys=())).split("\n")
            yield f"{printable(alias)}: {table}{outer}, at {', '.join(holders)}"
            yield from (f"{_INDENT}{line}" for line in pieces)
            yield from _keys(alias, fragment, proposal.joins, first_fragments)


def _keys(
    alias: str,
    fragment: Fragment,
    joins: Collection[ProposedJoin],
    first: dict[str, Fragment],
) -> Iterator[str]:
    """Yield a table's join keys with the keys compared to them, then its other keys."""
    compared = set()
    for join in joins:
        sides = ((join.left, join.left_key), (join.right, join.right_key))
        for (name, key), (partner, partner_key) in (sides, sides[::-1]):
            if name != alias:
                continue
            compared.add(key)
            partner_expressions = _expressions(first.get(partner), partner_key)
            yield (
                f"{_INDENT}joined with {printable(partner)}: "
                f"{_expressions(fragment, key)} = {partner_expressions}"
            )
    for key in range(len(fragment.keys)):
        if key not in compared:
            yield f"{_INDENT}names or holds out rows: {_expressions(fragment, key)}"


def _expressions(fragment: Fragment | None, key: int) -> str:
    if fragment is None or key >= len(fragment.keys):
        return "no such key"
    return f"({', '.join(map(printable, fragment.keys[key]))})"


def _training(
    proposal: Proposal, fragments: dict[int, Fragment], settings: Settings
) -> Iterator[str]:
    """Yield the label, the method and the models."""
    table = printable(proposal.label_table)
    labels = dict.fromkeys(f.label for f in fragments.values() if f.label is not None)
    label = "none"
    if labels:
        label = f"{', '.join(map(printable, labels))} of {table}"
    yield f"label: {label}"
    if settings.mode in WITH_A_MODEL:
        model = printable(settings.model_name)
        task = _TASKS[settings.mode]
        yield f"nothing is trained: the saved model {model} {task}"
        return
    epochs = f"{settings.epochs} epoch{'s' if settings.epochs > 1 else ''}"
    yield f"strategy: {settings.method_name}, at most {epochs}"
    yield from _search(settings)
    if settings.start:
        model = printable(settings.start)
        yield f"begins with the scores of the saved model {model}"
    for alias in dict.fromkeys(fragment.table for fragment in fragments.values()):
        kind = settings.method.only_model or settings.model_of(alias)
        layers = ", ".join(map(str, settings.hidden_sizes))
        layers_text = ""
        if kind == MLP:
            layers_text = f", hidden layers of {layers}"
        yield f"model of {printable(alias)}: {printable(kind)}{layers_text}"
    for entry in settings.encoders:
        yield f"encoder: {printable(render_entries([entry]))}"


def _search(settings: Settings) -> Iterator[str]:
    """Yield what a search trains: its candidates, and how often."""
    if not settings.folds:
        return
    count = len(candidates_of(settings))
    candidates = f"{count} candidate{'s' if count > 1 else ''}"
    yield (
        f"search: {candidates} on {settings.folds} folds of the rows, then the best of "
        f"them on all: {len(fits_of(settings))} trainings, and what leaves in training "
        "leaves again in each"
    )
    for number, candidate in enumerate(settings.candidates, 1):
        named = ", ".join(f"{printable(k)} = {_value(value)}" for k, value in candidate)
        yield f"candidate {number}: {named}"


def _protection(settings: Settings, tables: Sequence[str]) -> Iterator[str]:
    """Yield what covers labels, models and scores, with the requested epsilons."""
    privacy = settings.privacy
    models = "no noise"
    sums = "in the clear"
    if privacy.covers_features:
        protected = "the models, not features behind scores"
        if covered := [t for t in tables if settings.rules.covers_values(settings, t)]:
            protected = f"all values of {', '.join(covered)}, and of no other table"
        models = (
            f"noise of epsilon {privacy.epsilon:g} in the run ({privacy.features}), "
            f"which protects {protected}"
        )
    if privacy.unions == SEALED:
        sums = "sealed: the server reads none"
    yield f"labels: {_label_protection(settings)}"
    yield f"models: {models}; what shards of a table add up is {sums}"
    yield f"scores: {_score_protection(settings)}"


def _label_protection(settings: Settings) -> str:
    """Return what covers labels, or that they stay at their sites."""
    privacy = settings.privacy
    if settings.method.keeps_labels and settings.mode not in WITH_A_MODEL:
        return "none leave"
    if not privacy.covers_labels:
        return "in the clear"
    strength = f"epsilon {privacy.label_epsilon:g}"
    if not privacy.label_epsilon:
        strength = f"standard deviation {privacy.label_noise:g}"
    return f"noise of {strength} on each ({privacy.labels})"


def _score_protection(settings: Settings) -> str:
    """Return what covers the scores of rows, or that there are none."""
    privacy = settings.privacy
    if not (settings.method.sends_scores or settings.mode in WITH_A_MODEL):
        return "none leave"
    scores = "in the clear"
    if privacy.scores == MASKED:
        scores = (
            "masked: a server that follows the protocol reads their sums over the "
            "tables"
        )
    if privacy.covers_predictions:
        scores += f"; noise of epsilon {privacy.predictions:g} on them"
    return scores


def _meaning(
    proposal: Proposal,
    fragments: dict[int, Fragment],
    settings: Settings,
    own_sites: Collection[str],
) -> Iterator[str]:
    """Yield what the owner's sites tell and learn, in a sentence or two per table."""
    holders: dict[str, list[str]] = {}
    for number, fragment in fragments.items():
        holders.setdefault(fragment.table, []).append(proposal.parts[number].site)
    sites = dict.fromkeys(site for names in holders.values() for site in names)
    others = [printable(site) for site in sites if site not in own_sites]
    yield f"with you take part: {', '.join(('the server', *others))}"
    hosted = {
        fragment.table: fragment
        for number, fragment in fragments.items()
        if proposal.parts[number].site in own_sites
    }
    for alias, fragment in hosted.items():
        name = printable(alias)
        disclosures = (
            *_learned_by_server(fragment, settings),
            *_by_settings(fragment, settings),
        )
        learned = "; ".join(disclosures)
        yield f"{name} tells the server {learned}"
        if len(holders[alias]) > 1:
            yield (
                f"{name} tells the table's other shards statistics, and sums over all "
                "shards"
            )
        if tells_sites := _told_sites(fragment, settings, len(holders)):
            yield f"{name} tells other sites {tells_sites}"
        if takers := _takers_of_cutoffs(alias, fragments.values()):
            yield (
                f"{name} tells the sites of {takers}, sealed, at which times each of "
                "its keys has rows: by name the keys that they have or guess"
            )
        if makes_partials(fragment, settings) and len(holders[alias]) > 1:
            yield (
                f"{name} tells the sites of the table's other shards, sealed, which "
                "keys it has, and of keys that both have what its rows add to the "
                "answers"
            )
    if settings.method.joins and settings.mode not in WITH_A_MODEL:
        yield _BY_POLICY


def _takers_of_cutoffs(alias: str, fragments: Iterable[Fragment]) -> str:
    """Return the LATERAL sub-queries that a table's sites seal cutoffs for."""
    takers = (
        fragment.table
        for fragment in fragments
        if (subquery := fragment.subquery) is not None
        and (cutoffs := subquery.cutoffs) is not None
        and cutoffs.sealed
        and cutoffs.table == alias
    )
    return ", ".join(map(printable, dict.fromkeys(takers)))


def _learned_by_server(fragment: Fragment, settings: Settings) -> Iterator[str]:
    """Yield what the server learns of a table."""
    privacy = settings.privacy
    joins_rows = settings.method.joins
    is_used = settings.mode in WITH_A_MODEL
    if fragment.keys:
        yield "which of its rows take part, and have equal join keys"
    method = settings.method
    if fragment.label is not None and (is_used or not method.keeps_labels):
        yield "the label of each row" + (
            ", with noise" if privacy.covers_labels else ""
        )
    for role in fragment.numbers:
        yield f"the {role} of each row"
    if not is_used and method.tells:
        yield settings.rules.tells_instead(settings) or method.tells
    elif not is_used and method.solvers:
        yield "the encoded features of the rows that are drawn"
    elif not (is_used or joins_rows):
        yield "a gradient, and metrics, of its rows in every epoch"
    elif privacy.scores != MASKED:
        yield "the scores of each row, which tell its features"
    else:
        when = _HOW_OFTEN.get(settings.mode, "in every epoch")
        yield f"for each joined row the sum of its score and the other tables', {when}"


def _by_settings(fragment: Fragment, settings: Settings) -> Iterator[str]:
    """Yield what the server learns by a run's settings, not by its method alone.

    Of bins those that the run asks for by their number; others a policy names.
    """
    is_used = settings.mode in WITH_A_MODEL
    if not is_used and (more := settings.rules.tells(settings)):
        yield more
    if settings.importances and fragment.features:
        yield (
            "how far it and each of its features move the scores, and how well the "
            "model does with their values permuted"
        )
    if settings.most_bins and fragment.features:
        yield (
            f"in which of up to {settings.most_bins} bins each column of each row "
            "lies, in the clear"
        )


def _told_sites(fragment: Fragment, settings: Settings, tables: int) -> str:
    """Return what the sites of other tables learn from a table; "" for nothing.

    The derivative of a row that is joined once tells its label, masks or not: noisy
    labels alone bound that.
    """
    is_used = settings.mode in WITH_A_MODEL
    if settings.inspects:
        return (
            "the label and the score of the joined rows, by way of the server; from "
            "these the sum of the other tables' scores follows"
        )
    method = settings.method
    is_trained_at_sites = method.joins and not method.solvers
    if is_used or not is_trained_at_sites or tables == 1:
        return ""
    if not method.sends_scores:
        return (
            "how many of its tuples have each of their join keys, shard by shard; no "
            "label, score or derivative"
        )
    if tables == 2:
        scores = "its score"
    else:
        scores = "the sum of its score and those of third tables"
    label = ""
    if fragment.label is not None:
        label = "the label of each of their rows that is joined once, masks or not"
        if settings.privacy.covers_labels:
            label = "the noisy label of each of their rows that is joined once"
        label = f"{label}: it follows from the first step; and "
    return (
        f"{label}{scores}, in every epoch, for each of their rows that is joined "
        "once: it follows from how far their own score is to step. With as many "
        "persons whose features they know as there are columns, they can compute the "
        "features of others. You learn the same of them"
    )


def _settings(config: Mapping[str, object]) -> Iterator[str]:
    """Yield all settings: those that the operator has changed, and the others."""
    changed = changed_settings(config)
    others = {key: value for key, value in config.items() if key not in changed}
    for title, values in (("settings", changed), ("as by default", others)):
        listed = ", ".join(
            f"{printable(key)} = {_value(value)}" for key, value in values.items()
        )
        yield f"{title}: {listed or 'none'}"


def _value(value: object) -> str:
    if isinstance(value, str):
        return f'"{printable(value)}"'
    return printable(str(value))
