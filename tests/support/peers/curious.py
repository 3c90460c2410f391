"""A site that keeps the derivatives it is sent, a server that keeps sums, and what
follows.

The derivative of a joined row tells its score h: the loss's link turns one into the
other, and the label's part of it is the same in every epoch. A row that is joined once
is sent its joined row's derivative as it is. Its own score taken off h leaves the sum
of the other tables' scores.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.special import expit, logit

from client_apps.operator.participant import Participant
from strategies.setup.problem import TrainingProblem
from tests.support.files import ROOT
from tp_flower.joins.rows import JoinedRows

Change = Callable[[str, np.ndarray], np.ndarray]
MOST = 1.0 - 1e-15  # a probability whose logit is finite


@dataclass
class Epoch:
    """What a shard has at the start of an epoch, of its trained rows (n,)."""

    step: np.ndarray  # as it is sent
    scores: np.ndarray  # the own ones


@dataclass
class SitesMemory:
    """The epochs of every shard, by part number, and its encoded features."""

    epochs: defaultdict[int, list[Epoch]] = field(
        default_factory=lambda: defaultdict(list)
    )
    features: dict[int, np.ndarray] = field(default_factory=dict)

    def table(
        self, problem: TrainingProblem, name: str, what: str, epoch: int
    ) -> np.ndarray:
        """The steps or the scores of a table's rows, (n_i,); 0 where they are not
        trained on.
        """
        table = problem.tables[name]
        numbers = np.zeros(table.total_rows)
        for part, rows in zip(table.parts, table.rows, strict=True):
            numbers[rows.trained_slice] = getattr(self.epochs[part.number][epoch], what)
        return numbers

    def read(self, problem: TrainingProblem, name: str, epoch: int) -> np.ndarray:
        """What a table's sites read of the others' scores at their own rows, (n_i,).

        The first derivative is that at the base score, which the labels' owner knows.
        """
        base = problem.base_score[0]
        first, step = (self.table(problem, name, "step", e) for e in (0, epoch))
        if problem.objective.has_constant_hessian:
            scores = base + first - step
        else:
            scores = logit(np.clip(expit(base) + first - step, 1.0 - MOST, MOST))
        return scores - base - self.table(problem, name, "scores", epoch)

    def others(self, problem: TrainingProblem, name: str, epoch: int) -> np.ndarray:
        """The true sum of the other tables' scores in every joined row, (N,)."""
        return sum(
            self.table(problem, other, "scores", epoch)[rows.row_of]
            for other, rows in problem.train.tables.items()
            if other != name
        )


def watch_sites(monkeypatch: pytest.MonkeyPatch) -> SitesMemory:
    """Let the sites of a run by conjugate gradients keep what they are sent."""
    memory = SitesMemory()
    moments = Participant.moments

    def noted(part: Participant, step: np.ndarray, kappa: float) -> np.ndarray:
        scores = part.model.scores(part.data.trained)
        memory.epochs[part.number].append(Epoch(step[:, 0].copy(), scores[:, 0]))
        memory.features[part.number] = part.data.trained
        return moments(part, step, kappa)

    monkeypatch.setattr(Participant, "moments", noted)
    return memory


def watch_sums(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Return the list of the sums over the tables, (N,), that the server is to make."""
    sums: list[np.ndarray] = []

    run = JoinedRows.run
    read = TrainingProblem.read_sums
    problems: list[TrainingProblem] = []

    def note_problem(problem, words):
        problems[:] = [problem]
        return read(problem, words)

    def watched(rows, kernel, local=None, **how):
        result = run(rows, kernel, local or {}, **how)
        if local and rows is problems[0].rows:
            sums.append(read(problems[0], rows.mapping.expand(local))[:, 0])
        return result

    monkeypatch.setattr(TrainingProblem, "read_sums", note_problem)
    monkeypatch.setattr(JoinedRows, "run", watched)
    return sums


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the server send steps that ``change`` makes of a table's name and honest
    steps.
    """
    scatter = TrainingProblem.scatter_steps

    def changed(problem, sums, kappa):
        return {
            name: change(name, step)
            for name, step in scatter(problem, sums, kappa).items()
        }

    monkeypatch.setattr(TrainingProblem, "scatter_steps", changed)


def quoted(text: str) -> list[float]:
    """Return the numbers that PRIVACY.md has in the places of # in a text."""
    page = " ".join((ROOT / "PRIVACY.md").read_text(encoding="utf-8").split())
    pattern = re.escape(" ".join(text.split())).replace(
        r"\#", r"([\d,]+(?:\.\d+)?(?:e-\d+)?)"
    )
    (match,) = re.finditer(pattern, page)
    return [float(number.replace(",", "")) for number in match.groups()]


def solved(sums: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The parameters that known rows tell, (d, epochs), and the constant, (epochs,)."""
    # the intercept is in every row
    known = np.column_stack([features, np.ones(len(features))])
    theta = np.linalg.lstsq(known, sums, rcond=None)[0]
    return theta[:-1], theta[-1]


def share_read(sums: np.ndarray, features: np.ndarray, known: int) -> float:
    """The share of the other rows' features that are read to a tenth of a deviation,
    who knows some rows.

    The attacker leaves rounding and noise out of Theta in the way that is best for him.
    """
    theta, constant = solved(sums[:known], features[:known])
    others = features[known:]
    shares = []
    for least in 10.0 ** -np.arange(1, 10):
        read = (sums[known:] - constant) @ np.linalg.pinv(theta, rcond=least)
        shares.append(np.mean(np.abs(read - others) < 0.1 * features.std(axis=0)))
    return max(shares)
