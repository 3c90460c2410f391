"""What only two settings together can get wrong."""

from collections.abc import Mapping

from tp_flower.coreset_settings import coreset_problems
from tp_flower.joins.row_weights import JOINED, uncounted
from tp_flower.methods import ADMM, METHODS, method_problems
from tp_flower.personal_settings import personal_problems
from tp_flower.privacy.settings import STATISTICS, PrivacySettings
from tp_flower.run_modes import mode_problems

TASK_LOSSES: Mapping[str, tuple[str, ...]] = {
    "regression": ("auto", "squared"),
    "classification": ("auto", "logistic", "softmax"),
}


def relation_problems(values: Mapping[str, object]) -> list[str]:
    """Return what of the settings, by key, does not go together.

    Args:
        values: that are fine alone; keys may be missing.
    """
    problems = []
    task, loss = str(values.get("task", "auto")), values.get("loss", "auto")
    if task in TASK_LOSSES and loss not in TASK_LOSSES[task]:
        allowed = ", ".join(TASK_LOSSES[task])
        problems.append(f"loss: {loss!r} does not fit task {task!r}: use {allowed}")
    pairs = values.get("models", ())
    named = [model for _, model in pairs] if isinstance(pairs, tuple) else []
    others = [m for m in [values.get("model", "linear"), *named] if m != "linear"]
    is_admm = METHODS[str(values.get("strategy", "admm"))].family == ADMM
    if values.get("lou") == "gram" and is_admm:
        problems += [
            f"lou: 'gram' needs linear models, but {model!r} is asked for: "
            "use auto or consensus"
            for model in others[:1]
        ]
    privacy = values.get("privacy")
    if isinstance(privacy, PrivacySettings):
        problems += uncounted(str(values.get("row-weight", JOINED)), privacy)
    if isinstance(privacy, PrivacySettings) and privacy.features == STATISTICS:
        problems += [
            f"privacy.features: 'statistics' needs {needed}: use dp-sgd"
            for needed, is_missing in (
                ("strategy 'admm'", not is_admm),
                ("linear models", bool(others)),
            )
            if is_missing
        ]
    problems += method_problems(values) + coreset_problems(values)
    problems += personal_problems(values)
    return problems + mode_problems(values)
