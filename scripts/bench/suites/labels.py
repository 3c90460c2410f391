"""What noise on labels costs, with the correction for it and without.

    python scripts/bench/suites/labels.py [--output DIR] [--movielens DIR] [--repeats N]

Trains ADMM on labels of every mechanism. "Corrected" is the loss that is unbiased for
the true labels, "plain" takes noisy classes for true ones; both see the same draws. In
a regression noise on labels changes the reported figures only, so that there is nothing
else to train. Test metrics are of the true labels; beside them stands what the run
itself reports, which knows noisy labels only. Noise comes from a secure source, so that
repeats differ. Writes labels.json and labels.md.
"""

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from scripts.bench.movielens import has_movielens
from scripts.bench.suites.privacy import Task, flights, movielens, option_parser, run
from strategies.setup.labels import label_plan
from tp_flower.learning.label_noise import ClassNoise
from tp_flower.learning.losses import LOSSES
from tp_flower.learning.metrics import evaluate
from tp_flower.settings import PrivacySettings

EPSILONS = (0.5, 1.0, 2.0, 4.0)
PAPER_NOISE = 0.5
SHOWN: Mapping[str, tuple[str, ...]] = {
    "logistic": ("auc", "log_loss", "accuracy"),
    "squared": ("rmse", "r2"),
}


@dataclass
class Line:
    """One setting of the labels' noise.

    Attributes:
        task: name of the task.
        noise: the mechanism, and how much of it.
        keep: probability that a class stays; None in regression.
        corrected: test metrics of the repeats, by the true labels.
        plain: likewise, of runs that do not correct.
        reported: what the corrected runs report.
    """

    task: str
    noise: str
    keep: float | None = None
    corrected: list[Mapping[str, float]] = field(default_factory=list)
    plain: list[Mapping[str, float]] = field(default_factory=list)
    reported: list[Mapping[str, float]] = field(default_factory=list)

    def row(self, metrics: Sequence[str]) -> str:
        """Return the line of a Markdown table: the repeats' means."""
        cells = [self.noise, "" if self.keep is None else f"{self.keep:.3f}"]
        for metric in metrics:
            cells += [
                f"{np.mean([found[metric] for found in own]):.4f}" if own else ""
                for own in (self.corrected, self.plain, self.reported)
            ]
        return f"| {' | '.join(cells)} |"


def noises(task: Task) -> Iterator[tuple[str, PrivacySettings]]:
    """Yield the mechanisms of a task, the papers' setting last."""
    limits = task.label_range
    for mechanism in ("laplace",) if limits else ("randomised-response", "laplace"):
        for epsilon in EPSILONS:
            yield (
                f"{mechanism}, epsilon {epsilon:g}",
                PrivacySettings(
                    labels=mechanism, label_epsilon=epsilon, label_range=limits
                ),
            )
    noisy = PrivacySettings(
        labels="laplace", label_noise=PAPER_NOISE, label_range=limits
    )
    plan = label_plan(replace(task.settings, privacy=noisy))
    epsilon = plan.epsilon if plan else 0.0
    yield (
        f"laplace, lambda {PAPER_NOISE:g} (epsilon {epsilon:.2f})",
        replace(noisy, label_noise=0.0, label_epsilon=epsilon),
    )


def measure(task: Task, repeats: int) -> Iterator[Line]:
    """Yield a line without noise, and one per mechanism."""
    loss = LOSSES[task.loss]()
    clear = run(task, task.settings)
    truth = clear.training_problem.test_labels
    yield Line(task.name, "none", 1.0, [evaluate(loss, clear.scores, truth)])
    for name, privacy in noises(task):
        line = Line(task.name, name)
        settings = replace(task.settings, privacy=privacy)
        plan = label_plan(settings)
        if plan and isinstance(plan.noise, ClassNoise):
            line.keep = plan.noise.keep
        for repeat in range(repeats):
            # a draw is kept for its plan: each repeat has one of its own
            epsilon = privacy.label_epsilon * (1.0 + 1e-12 * repeat)
            own = replace(privacy, label_epsilon=epsilon)
            done = run(task, replace(settings, privacy=own))
            seen = done.training_problem
            line.corrected.append(evaluate(loss, done.scores, truth))
            line.reported.append(evaluate(seen.loss, done.scores, seen.test_labels))
            if line.keep is not None:
                own = replace(own, label_correction=False)
                done = run(task, replace(settings, privacy=own))
                line.plain.append(evaluate(loss, done.scores, truth))
        yield line


def table(task: Task, lines: Sequence[Line]) -> str:
    """Return the lines of a task as a Markdown table."""
    metrics = SHOWN[task.loss]
    heads = ["noise on labels", "kept"]
    for metric in metrics:
        heads += [f"{metric}, corrected", "plain", "reported"]
    return "\n".join(
        [
            f"**{task.name}** ({task.loss} loss), test metrics by the true labels",
            "",
            f"| {' | '.join(heads)} |",
            f"|---|{'---:|' * (len(heads) - 1)}",
            *(line.row(metrics) for line in lines),
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and write the tables."""
    options = option_parser(__doc__ or "", "labels").parse_args(arguments)
    # Flower tells of every run what these tables tell better
    logging.getLogger("flwr").setLevel(logging.WARNING)
    tasks = [flights()]
    if has_movielens(options.movielens):
        tasks.append(movielens(options.movielens))
    written: list[dict[str, object]] = []
    texts = []
    for task in tasks:
        lines = []
        for line in measure(task, options.repeats):
            print(line.row(SHOWN[task.loss]), flush=True)
            lines.append(line)
        texts.append(table(task, lines))
        written += [asdict(line) for line in lines]
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(texts)
    (folder / "labels.json").write_text(json.dumps(written, indent=2), encoding="utf-8")
    (folder / "labels.md").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nResults: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
