"""The faults that ``plant_faults.py`` plants, one at a time, into the product's code.

A fault replaces a snippet that occurs exactly once in the product, wherever its file
lies, so that files may move. Whoever rewrites the line of a snippet adapts it here: a
test compares. Each fault is one that somebody could make without noticing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A small error in the code, and who ought to notice it.

    Attributes:
        name: of the fault, in a few words with dashes.
        old: the snippet that is replaced.
        new: what replaces it.
        tests: patterns of the names of the test files that ought to fail.
        file: pattern of the name of the product file, where the snippet alone does not
            tell which one is meant.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    file: str = "*.py"


JOINS = (
    Fault(
        "null-joins-null",
        "lookup = np.append(_dense(hashes), np.int32(NULL))",
        "lookup = np.append(_dense(hashes), np.int32(len(hashes)))",
        ("test_mapping.py",),
    ),
    Fault(
        "composite-key-half-null",
        "pairs[(first < 0) | (second < 0)] = NULL",
        "pairs[(first < 0) & (second < 0)] = NULL",
        ("test_joining.py",),
    ),
    Fault(
        "many-to-many-first-match",
        'counts=sizes.take(group_old, mode="wrap"),',
        'counts=np.minimum(sizes, 1).take(group_old, mode="wrap"),',
        ("test_mapping.py",),
    ),
    Fault(
        "left-join-drops-rows",
        "if step.is_outer and step.unmatched_before:",
        "if step.is_outer and step.unmatched_before > 1:",
        ("test_mapping.py", "test_left_join.py"),
    ),
    Fault(
        "left-join-takes-last-row",
        "            values = with_zero_row(values)\n",
        "            pass\n",
        ("test_mapping.py", "test_left_join.py"),
    ),
    Fault(
        "left-join-ignores-guard",
        """key = f"CASE WHEN {' AND '.join(conditions)} THEN {left.sql} END\"""",
        "key = left.sql",
        ("test_sql_pairs.py", "test_left_join.py"),
    ),
    Fault(
        "where-keeps-left-join",
        "return not is_true_on_nulls(side.sql, types)",
        "return is_true_on_nulls(side.sql, types)",
        ("test_sql_pairs.py", "test_left_join.py"),
    ),
    Fault(
        "segment-sum-unmatched-rows",
        "return np.where(self.row_of < 0, self.rows, self.row_of).astype(np.int32)",
        "return np.where(self.row_of < 0, 0, self.row_of).astype(np.int32)",
        ("test_mapping.py", "test_left_join.py"),
    ),
    Fault(
        "segment-sum-shifted",
        "np.bincount(slots, column, rows + 1)[:rows]",
        "np.bincount(slots, column, rows + 1)[1 : rows + 1]",
        ("test_mapping.py", "test_batches.py"),
    ),
    Fault(
        "expand-runs-shifted",
        "lag[self.row_of < 0] = self.rows",
        "lag[self.row_of < 0] = 0",
        ("test_mapping.py",),
    ),
    Fault(
        "join-kinds-unchecked",
        "if len({kind for kinds_of in kinds.values() for kind in kinds_of}) > 1:",
        "if len({kind for kinds_of in kinds.values() for kind in kinds_of}) > 2:",
        ("test_mapping.py", "test_joining.py"),
    ),
    Fault(
        "keys-without-nfc",
        'return f"nfc_normalize(CAST({column.sql} AS VARCHAR))"',
        'return f"CAST({column.sql} AS VARCHAR)"',
        ("test_extraction.py",),
    ),
    Fault(
        "key-parts-run-together",
        "part = f\"'{column.kind}' || strlen({text}) || ':' || {text}\"",
        "part = f\"'{column.kind}:' || {text}\"",
        ("test_extraction.py",),
    ),
    Fault(
        "float-key-differs-from-integer",
        'whole = f"{value} = trunc({value}) AND abs({value}) < 1e38"',
        'whole = "false"',
        ("test_extraction.py",),
    ),
    Fault(
        "row-order-without-key",
        "order = f\"ORDER BY sha256('{order_key.hex()}' || {row})\"",
        'order = f"ORDER BY sha256({row})"',
        ("test_extraction.py",),
    ),
    Fault(
        "test-split-not-drawn",
        "held_out[rng.permutation(rows)[: round(rows * test_fraction)]] = True",
        "held_out[: round(rows * test_fraction)] = True",
        ("test_mapping.py", "test_centralized.py"),
    ),
    Fault(
        "test-rows-are-trained",
        "train, test = mapping.select(~is_test), mapping.select(is_test)",
        "train, test = mapping, mapping.select(is_test)",
        ("test_admm.py", "test_centralized.py", "test_expanded_rows.py"),
    ),
    Fault(
        "row-weights-not-scaled",
        "scaled = weights / weights.mean()",
        "scaled = weights",
        ("test_weighted_maths.py", "test_row_weights.py"),
    ),
    Fault(
        "entity-weight-replaces-weight",
        "weights = by_entity if weights is None else weights * by_entity",
        "weights = by_entity",
        ("test_weighted_maths.py", "test_row_weights.py"),
    ),
    Fault(
        "messages-without-row-weights",
        "message = weights.rows[:, None] * message",
        "message = message.copy()",
        ("test_weighted_maths.py", "test_row_weights.py"),
    ),
)

LEARNING = (
    Fault(
        "squared-prox",
        "return (labels[:, None] + rho * centre) / (1.0 + rho)",
        "return (labels[:, None] + centre) / (1.0 + rho)",
        ("test_losses.py",),
    ),
    Fault(
        "logistic-prox-sign",
        "return np.copysign(w, k)[:, None]",
        "return np.copysign(w, start[:, 0])[:, None]",
        ("test_losses.py",),
    ),
    Fault(
        "logistic-prox-inexact",
        "SMALL_STEP = 2e-4",
        "SMALL_STEP = 2e-1",
        ("test_losses.py",),
    ),
    Fault(
        "softmax-prox-inexact",
        "SMALL_RANGE = 2.5e-4",
        "SMALL_RANGE = 2.5e-1",
        ("test_losses.py",),
    ),
    Fault(
        "softmax-prox-far-rows",
        "open_rows = np.abs(gradient).max(axis=1, initial=0.0) > PROX_TOLERANCE",
        "open_rows = np.abs(gradient).max(axis=1, initial=0.0) > 1e-2",
        ("test_losses.py",),
    ),
    Fault(
        "softmax-gradient",
        "out[np.arange(len(labels)), labels.astype(np.intp)] -= 1.0",
        "out[np.arange(len(labels)), labels.astype(np.intp)] -= 0.5",
        ("test_losses.py",),
    ),
    Fault(
        "logistic-base-score",
        "return np.array([np.log(rate / (1.0 - rate))])",
        "return np.array([np.log(rate)])",
        ("test_losses.py",),
    ),
    Fault(
        "loss-of-weighted-rows",
        "return total / (len(labels) if weights is None else float(weights.sum()))",
        "return total / len(labels)",
        ("test_weighted_maths.py",),
    ),
    Fault(
        "corrected-class-loss",
        "out[np.arange(len(labels)), labels.astype(np.intp)] = (k - 1) * c",
        "out[np.arange(len(labels)), labels.astype(np.intp)] = k * c",
        ("test_corrected_losses.py",),
    ),
    Fault(
        "corrected-squared-loss",
        "return self.plain.row_values(scores, labels) - 0.5 * self.noise.variance",
        "return self.plain.row_values(scores, labels) - self.noise.variance",
        ("test_corrected_losses.py",),
    ),
    Fault(
        "corrected-class-rate",
        "return (noisy - self.flip) / self.contrast",
        "return noisy - self.flip",
        ("test_corrected_losses.py", "test_label_privacy.py"),
    ),
    Fault(
        "admm-dual-not-scaled",
        "centre = state.duals[block] / state.rho",
        "centre = 1.0 * state.duals[block]",
        ("test_admm.py",),
    ),
    Fault(
        "admm-message-of-relaxed-scores",
        "gap = h - new_z",
        "gap = relaxed - new_z",
        ("test_admm.py",),
    ),
    Fault(
        "admm-over-relaxation",
        "relaxed = over_relaxation * h + (1.0 - over_relaxation) * old_z",
        "relaxed = over_relaxation * h + (over_relaxation - 1.0) * old_z",
        ("test_admm.py",),
    ),
    Fault(
        "admm-target-is-sum",
        "    out *= inverse[:, None]\n    out *= -1.0 / kappa\n",
        "    out *= -1.0 / kappa\n",
        ("test_admm.py",),
    ),
    Fault(
        "admm-kappa-without-tables",
        "return self.corrections * self.rho",
        "return self.rho",
        ("test_training.py",),
    ),
    Fault(
        "admm-balances-the-wrong-way",
        "return rho * 2.0",
        "return rho / 2.0",
        ("test_admm.py",),
    ),
    Fault(
        "admm-dual-residual",
        "dual=float(state.rho * change / max(dual_size, tiny)),",
        "dual=float(change / max(dual_size, tiny)),",
        ("test_admm.py",),
    ),
    Fault(
        "anderson-mixes-away",
        "np.subtract(after[block], back.reshape(out[block].shape), out[block])",
        "np.add(after[block], back.reshape(out[block].shape), out[block])",
        ("test_anderson.py", "test_admm.py"),
    ),
    Fault(
        "anderson-half-of-products",
        "self._products[slot, :used] = self._products[:used, slot] = products",
        "self._products[slot, :used] = products",
        ("test_anderson.py", "test_admm.py"),
    ),
    Fault(
        "gram-of-last-shard",
        "total += self.array(replies, index, name, shape)",
        "total = self.array(replies, index, name, shape)",
        ("test_admm.py", "test_sgd.py"),
    ),
    Fault(
        "consensus-shrinks-too-much",
        "shrink = shards * rho_in / (shards * rho_in + l2)",
        "shrink = rho_in / (rho_in + l2)",
        ("test_admm.py", "test_training.py"),
    ),
    Fault(
        "consensus-dual-sign",
        'self.vectors["consensus_duals"] += self.vectors["theta"] - consensus',
        'self.vectors["consensus_duals"] -= self.vectors["theta"] - consensus',
        ("test_shard.py",),
    ),
    Fault(
        "consensus-dual-rescaled",
        'self.vectors["consensus_duals"] *= before[0] / rho_in',
        'self.vectors["consensus_duals"] *= rho_in / before[0]',
        ("test_shard.py",),
    ),
    Fault(
        "consensus-of-empty-shards",
        "trained = [index for index in every if table.rows[index].trained] or",
        "trained = list(every) or",
        ("test_empty_shards.py",),
    ),
    Fault(
        "moments-without-multiplicity",
        "weighted = self.data.multiplicity[:, None] * target",
        "weighted = 1.0 * target",
        ("test_shard.py",),
    ),
    Fault(
        "ridge-penalises-intercept",
        "return np.vstack([weights, centre - self.mean @ weights])",
        "return np.vstack([weights, centre])",
        ("test_solvers.py",),
    ),
    Fault(
        "sgd-penalises-bias",
        "decay = self.data.l2 * np.where(self.model.penalised, theta, 0.0)",
        "decay = self.data.l2 * theta",
        ("test_shard.py",),
    ),
    Fault(
        "sgd-forgets-momentum",
        'self.vectors["momentum"] = velocity',
        'self.vectors["momentum"] = gradient',
        ("test_shard.py",),
    ),
    Fault(
        "batches-not-drawn",
        "order = rng.permutation(total)",
        "order = np.arange(total)",
        ("test_batches.py",),
    ),
    Fault(
        "batch-sum-of-unmatched-rows",
        "slots = np.where(slots < 0, count, slots)",
        "slots = np.where(slots < 0, 0, slots)",
        ("test_batches.py",),
    ),
    Fault(
        "gd-rate-falls",
        'average."""\n        return 1.0\n',
        'average."""\n        return super().decay(epoch)\n',
        ("test_gd.py",),
    ),
    Fault(
        "vfl-rows-of-second-shard",
        "train.row_of[to_train] - np.int32(offset)",
        "train.row_of[to_train]",
        ("test_expanded_rows.py",),
    ),
    Fault(
        "vfl-rows-at-site",
        "place=(np.cumsum(is_used) - 1)[behind],",
        "place=(np.cumsum(is_used) - 1)[np.sort(behind)],",
        ("test_expanded_rows.py", "test_vfl.py"),
    ),
    Fault(
        "auc-of-ties",
        'below = np.searchsorted(low, high, side="left").sum(dtype=np.float64)',
        'below = np.searchsorted(low, high, side="right").sum(dtype=np.float64)',
        ("test_weighted_maths.py",),
    ),
    Fault(
        "auc-of-weights-in-disorder",
        "total = np.append(0.0, np.cumsum(weights[~positive][order]))",
        "total = np.append(0.0, np.cumsum(weights[~positive]))",
        ("test_weighted_maths.py",),
    ),
    Fault(
        "rmse-is-half",
        'return {"rmse": float(np.sqrt(2.0 * half_mse)), "r2": r2}',
        'return {"rmse": float(np.sqrt(half_mse)), "r2": r2}',
        ("test_weighted_maths.py",),
    ),
)

FEATURES = (
    Fault(
        "deviations-of-shards",
        "a.m2 + b.m2 + delta * delta * (a.count * (b.count / count)),",
        "a.m2 + b.m2,",
        ("test_statistics.py",),
    ),
    Fault(
        "missing-number-is-zero",
        "scaled = np.where(np.isnan(values), self.fill, values)",
        "scaled = np.where(np.isnan(values), 0.0, values)",
        ("test_encoding.py",),
    ),
    Fault(
        "one-hot-unknown-category",
        "is_listed = (listed[position] == hashes[:, :2]).all(axis=1)",
        "is_listed = listed[position][:, 0] >= hashes[:, 0]",
        ("test_encoding.py",),
    ),
    Fault(
        "cyclic-half-a-turn",
        "angle = place(values) * (2 * np.pi / period)",
        "angle = place(values) * (np.pi / period)",
        ("test_encoding.py",),
    ),
    Fault(
        "indicator-always",
        "if wants_missing and (column.is_declared or 0 < column.count < column.rows):",
        "if wants_missing and (column.is_declared or 0 < column.count <= column.rows):",
        ("test_encoding.py",),
    ),
    Fault(
        "indicator-inverted",
        "out[:, 0] = values",
        "out[:, 0] = ~values",
        ("test_encoding.py",),
    ),
    Fault(
        "bin-edges",
        'hot = np.searchsorted(np.array(self.edges), values, side="right")',
        'hot = np.searchsorted(np.array(self.edges), values, side="left")',
        ("test_encoding.py",),
    ),
    Fault(
        "categories-of-last-shard",
        "np.add.at(counts, group, np.concatenate([part.counts for part in parts]))",
        "counts[group] = np.concatenate([part.counts for part in parts])",
        ("test_categories.py",),
    ),
    Fault(
        "quantiles-of-equal-shards",
        "weights = np.concatenate([summary.weights for summary in summaries])",
        "weights = np.concatenate([summary.weights * 0 + 1 for summary in summaries])",
        ("test_quantiles.py",),
    ),
    Fault(
        "category-key-of-all-tables",
        'return f"category/{len(table)}/{table}/{feature}"',
        'return f"category/{feature}"',
        ("test_encoding.py", "test_categories.py"),
    ),
)

PRIVACY = (
    Fault(
        "gradient-noise-without-clip",
        "return noise.with_gaussian(total, noise_multiplier * clip)",
        "return noise.with_gaussian(total, noise_multiplier)",
        ("test_private_gradients.py",),
    ),
    Fault(
        "score-noise-without-clip",
        "return noise.with_gaussian(clipped, noise_multiplier * clip)",
        "return noise.with_gaussian(clipped, noise_multiplier)",
        ("test_private_scores.py",),
    ),
    Fault(
        "statistics-noise-without-radius",
        "return sigma * self.radius * self.radius if sigma else 0.0",
        "return sigma * self.radius if sigma else 0.0",
        ("test_private_statistics.py",),
    ),
    Fault(
        "statistics-target-not-clipped",
        "weights *= plan.target_bound / np.maximum(size, plan.target_bound)",
        "weights *= plan.target_bound / plan.target_bound",
        ("test_private_statistics.py",),
    ),
    Fault(
        "clip-forgets-intercept",
        'squares = np.einsum("ij,ij->i", rows, rows) + float(model.intercept)',
        'squares = np.einsum("ij,ij->i", rows, rows)',
        ("test_private_gradients.py",),
    ),
    Fault(
        "clip-of-torch-gradients",
        "weights = clip_weights(_norms(model), clip * (1.0 - _ROUNDING))",
        "weights = clip_weights(_norms(model), 2.0 * clip)",
        ("test_private_gradients.py",),
    ),
    Fault(
        "scores-not-clipped",
        "clipped: FloatArray = finite * (clip / np.maximum(norms, clip))",
        "clipped: FloatArray = finite * (clip / clip)",
        ("test_private_scores.py",),
    ),
    Fault(
        "laplace-noise-one-sided",
        "noise = -np.sign(centred) * np.log1p(-2.0 * np.abs(centred))",
        "noise = -np.log1p(-2.0 * np.abs(centred))",
        ("test_noise.py",),
    ),
    Fault(
        "accounting-once",
        "sum(each.count / each.noise_multiplier**2 for each in gaussians)",
        "sum(1 / each.noise_multiplier**2 for each in gaussians)",
        ("test_accounting.py",),
    ),
    Fault(
        "accounting-multiplicity",
        "math.expm1(multiplicity * math.log1p(-batch_rate))",
        "math.expm1(math.log1p(-batch_rate))",
        ("test_accounting.py",),
    ),
    Fault(
        "plan-counts-one-update",
        "count=steps * updates,",
        "count=steps,",
        ("test_privacy_plan.py",),
    ),
    Fault(
        "plan-counts-batches-as-one",
        "total = sum(limit * rows for limit, rows in limits.values())",
        "total = sum(limit for limit, _ in limits.values())",
        ("test_privacy_plan.py",),
    ),
    Fault(
        "groups-cost-as-rows",
        "return replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2.0)",
        "return mechanism",
        ("test_groups.py",),
    ),
    Fault(
        "response-keeps-too-often",
        "return 1.0 / (1.0 + (classes - 1) * math.exp(-epsilon))",
        "return 1.0 / (1.0 + (classes - 1) * math.exp(-2.0 * epsilon))",
        ("test_label_privacy.py",),
    ),
    Fault(
        "label-noise-scale",
        "return (self.limits[1] - self.limits[0]) / self.epsilon",
        "return 0.5 * (self.limits[1] - self.limits[0]) / self.epsilon",
        ("test_label_privacy.py",),
    ),
    Fault(
        "label-noise-drawn-again",
        "site.store.labels(name, lambda: _draw(domain, plan, NoiseSource()))",
        "site.store.labels(run, lambda: _draw(domain, plan, NoiseSource()))",
        ("test_private_labels.py",),
    ),
    Fault(
        "ledger-chain",
        "text = (previous + line).encode()",
        "text = line.encode()",
        ("test_ledger.py",),
    ),
    Fault(
        "ledger-lines-cut-off",
        "if seq and _checksum_at(connection, seq) != checksum:",
        "if seq and not _checksum_at(connection, seq):",
        ("test_ledger.py",),
    ),
    Fault(
        "ledger-end-cut-off",
        "if end != ([(seq, checksum)] if seq else []):",
        "if seq and not end:",
        ("test_ledger.py",),
    ),
    Fault(
        "ledger-not-on-the-disk",
        'mode = "FULL" if is_durable else "NORMAL"',
        'mode = "NORMAL"',
        ("test_ledger.py",),
    ),
    Fault(
        "database-open-to-others",
        "if status.st_mode & _OTHERS:",
        "if status.st_mode & 0o007:",
        ("test_ledger.py",),
    ),
    Fault(
        "budget-of-this-run-alone",
        "together = epsilon_of(spent + costs)",
        "together = epsilon_of(costs)",
        ("test_ledger.py",),
    ),
    Fault(
        "spend-beyond-reservation",
        "if used + count > limit:",
        "if used > limit:",
        ("test_ledger.py",),
    ),
    Fault(
        "spend-paid-twice",
        "if _has_done(connection, run, SPEND, ident):",
        'if _has_done(connection, run, SPEND, ""):',
        ("test_ledger.py", "test_exactly_once.py"),
    ),
    Fault(
        "charge-paid-twice",
        "if _is_paid(connection, release.source, ident):",
        'if _is_paid(connection, release.source, ""):',
        ("test_ledger.py", "test_private_labels.py"),
    ),
    Fault(
        "hash-without-key",
        'return bytes(b ^ byte for b in self.secret.ljust(_BLOCK_BYTES, b"\\0"))',
        "return bytes(byte for _ in range(_BLOCK_BYTES))",
        ("test_keyed_hash.py",),
    ),
    Fault(
        "one-hash-key-for-all-joins",
        'return self.hasher().purpose(f"join keys {group}")',
        'return self.hasher().purpose("join keys")',
        ("test_key_attacks.py", "test_hidden_channels.py"),
    ),
    Fault(
        "run-key-without-public-keys",
        'named = _RUN + b"".join(sorted(public_keys)) + str(run_id).encode()',
        "named = _RUN + str(run_id).encode()",
        ("test_key_agreement.py",),
    ),
    Fault(
        "sealed-secret-of-any-run",
        "info = (_PINNED if sender.site else _AGREED) + public + str(run_id).encode()",
        "info = (_PINNED if sender.site else _AGREED) + public",
        ("test_key_agreement.py",),
    ),
    Fault(
        "simulated-secret-accepted",
        "if secret.is_simulated and not site.is_simulated:",
        "if secret.is_simulated and site.is_simulated is None:",
        ("test_key_relay.py",),
    ),
    Fault(
        "leader-not-pinned",
        '_check_pin(leader.site, trusted, "of the site that made the run\'s secret")',
        "pass",
        ("test_key_relay.py", "test_key_sources.py"),
    ),
    Fault(
        "policy-empty-list-is-open",
        "if allowed is not None and not _has(allowed, read.column):",
        "if allowed and not _has(allowed, read.column):",
        ("test_policy.py",),
    ),
    Fault(
        "policy-private-is-clear",
        "is_refused = level == NEVER or (level == PRIVATE and not is_private)",
        "is_refused = level == NEVER",
        ("test_policy.py",),
    ),
    Fault(
        "policy-scores-always-covered",
        "SCORES: privacy.covers_predictions,",
        "SCORES: True,",
        ("test_policy.py",),
        file="*guard*.py",
    ),
    Fault(
        "policy-labels-always-private",
        "order.source.policy.check_release(LABELS, is_private=plan is not None)",
        "order.source.policy.check_release(LABELS, is_private=True)",
        ("test_private_labels.py", "test_policy.py"),
    ),
    Fault(
        "policy-min-rows",
        "if rows < self.min_rows and self.min_rows > 1:",
        "if rows < self.min_rows - 1 and self.min_rows > 1:",
        ("test_policy.py",),
    ),
    Fault(
        "policy-min-rows-of-batches",
        "least = int(sizes[sizes > 0].min())",
        "least = int(sizes[sizes > 0].max())",
        ("test_policy.py",),
    ),
    Fault(
        "policy-min-count-of-categories",
        "listed = np.flatnonzero(counts >= max(1, min_count))",
        "listed = np.flatnonzero(counts >= 1)",
        ("test_categories.py", "test_policy.py"),
    ),
    Fault(
        "coefficients-always-leave",
        "if not (source.policy.coefficients and isinstance(model, LinearModel)):",
        "if not isinstance(model, LinearModel):",
        ("test_model_runs.py", "test_policy.py"),
    ),
    Fault(
        "path-of-file-in-errors",
        "text = source.without_place(text)",
        "text = str(text)",
        ("test_site_log.py",),
    ),
    Fault(
        "state-folder-in-errors",
        'return text.replace(str(self._root), "<state-dir>")',
        "return text",
        ("test_site_log.py",),
    ),
    Fault(
        "unexpected-error-is-quoted",
        'text = f"{_place(error)}; its text is in the site\'s log"',
        "text = str(error)",
        ("test_sites.py",),
    ),
    Fault(
        "values-in-engine-errors",
        "if isinstance(error, _HARMLESS):",
        "if isinstance(error, duckdb.Error):",
        ("test_engine_errors.py",),
    ),
)

ROUNDS = (
    Fault(
        "noise-of-every-round-alike",
        'text = purpose + b" " + self._history.encode()',
        "text = purpose",
        ("test_noise.py",),
    ),
    Fault(
        "noise-key-is-payment-id",
        'text = purpose + b" " + self._history.encode()',
        "text = self._history.encode()",
        ("test_noise.py",),
    ),
    Fault(
        "noise-of-another-request-alike",
        "self._history = later(before, number, digest)",
        "self._history = later(before, number)",
        ("test_noise.py",),
    ),
    Fault(
        "replay-is-computed-again",
        "if last is not None and request.number <= last.number:",
        "if last is not None and request.number < last.number:",
        ("test_exactly_once.py",),
    ),
    Fault(
        "replay-of-another-request",
        "if request.number == last.number and request.digest == last.digest:",
        "if request.number == last.number:",
        ("test_exactly_once.py",),
    ),
    Fault(
        "site-behind-unnoticed",
        "if request.after is not None and (at is None or at < request.after):",
        "if request.after is not None and at is None:",
        ("test_exactly_once.py", "test_sites.py"),
    ),
    Fault(
        "round-is-not-paid",
        "            site.pay()\n            # nothing is to be kept",
        "            # nothing is to be kept",
        ("test_exactly_once.py", "test_private_runs.py"),
    ),
    Fault(
        "kept-reply-unchecked",
        "if checksum != _checksum(name, (meta, layout), data, large):",
        "if checksum is None:",
        ("test_store.py", "test_exactly_once.py"),
    ),
    Fault(
        "journal-takes-damaged-round",
        "if _checksum(text, parcels) != checksum:",
        "if checksum is None:",
        ("test_resume.py",),
    ),
    Fault(
        "resume-with-other-settings",
        "if fixed := [key for key in changed if key not in FREE]:",
        "if fixed := [key for key in changed if key == FREE]:",
        ("test_resume.py",),
    ),
    Fault(
        "payload-not-aligned",
        "            offset += array.nbytes + (-array.nbytes % ALIGNMENT_BYTES)\n",
        "            offset += array.nbytes\n",
        ("test_protocol.py",),
    ),
    Fault(
        "payload-longer-than-layout",
        "if offset != len(view):",
        "if offset > len(view):",
        ("test_protocol.py",),
    ),
    Fault(
        "mask-of-another-length",
        "if packed.dtype != np.uint8 or packed.shape != (-(-count // 8),):",
        "if packed.dtype != np.uint8:",
        ("test_protocol.py", "test_bad_input.py"),
    ),
    Fault(
        "reply-with-nan",
        "is_above = spec.low is None or smallest >= spec.low\n"
        "    is_below = spec.high is None or largest <= spec.high\n",
        "is_above = spec.low is None or not smallest < spec.low\n"
        "    is_below = spec.high is None or not largest > spec.high\n",
        ("test_array_checks.py",),
    ),
    Fault(
        "reply-of-another-shape",
        "    if not fits:\n        expected = ",
        "    if array.ndim != len(shape):\n        expected = ",
        ("test_array_checks.py",),
    ),
    Fault(
        "reply-of-foreign-parts",
        "if sent - hosted or (lists_all and sent != hosted):",
        "if lists_all and len(sent) != len(hosted):",
        ("test_sites.py",),
    ),
    Fault(
        "message-out-of-range",
        "if not (is_above and is_below):",
        "if not (is_above or is_below):",
        ("test_array_checks.py",),
    ),
    Fault(
        "message-of-another-dtype",
        "if array.dtype.name not in (spec.dtype, *spec.shorter):",
        "if array.dtype.kind != np.dtype(spec.dtype).kind:",
        ("test_array_checks.py",),
    ),
    Fault(
        "request-of-another-shape",
        "        if length != expected:\n            raise _wrong_form",
        "        if length > expected:\n            raise _wrong_form",
        ("test_array_checks.py",),
    ),
    Fault(
        "message-with-undeclared-facts",
        "    forbid_unknown_fields=True,\n    omit_defaults=True,\n",
        "    omit_defaults=True,\n",
        ("test_hostile_server.py",),
    ),
    Fault(
        "codes-beyond-hashes",
        "codes.max(initial=-1) >= len(hashes)",
        "codes.max(initial=-1) > len(hashes)",
        ("test_array_checks.py",),
    ),
    Fault(
        "saved-model-unchecked",
        "if digest and digest_of(files) != digest:",
        "if digest and not digest_of(files):",
        ("test_model_runs.py",),
    ),
    Fault(
        "digest-of-weights-alone",
        "for name in (_FACTS, _PARAMETERS):\n        digest.update(len",
        "for name in (_PARAMETERS,):\n        digest.update(len",
        ("test_saved_models.py",),
    ),
    Fault(
        "saved-model-of-another-table",
        "        if queried != saved_one:\n            raise ModelError(",
        "        if queried is None:\n            raise ModelError(",
        ("test_predict_hostile.py", "test_predict.py"),
    ),
    Fault(
        "row-keys-of-the-first-rows",
        "names = hex_texts(extracted.row_hashes[scored.rows])",
        "names = hex_texts(extracted.row_hashes[: len(scored.rows)])",
        ("test_predict.py",),
    ),
    Fault(
        "predictions-of-second-shard",
        "rows=(scored.rows[span] - start).astype(np.int32),",
        "rows=scored.rows[span].astype(np.int32),",
        ("test_predict.py",),
    ),
    Fault(
        "row-keys-without-secret",
        "hashes = hasher.purpose(PURPOSE).hash_texts(joined.dictionary)[:, :2]",
        "hashes = KeyedHasher(bytes(32)).hash_texts(joined.dictionary)[:, :2]",
        ("test_predict.py", "test_predict_hostile.py"),
    ),
    Fault(
        "missing-table-has-no-mean",
        "total[unmatched] += manifest.table(table).mean_score",
        "total[unmatched] += 0.0",
        ("test_predict_missing.py",),
    ),
    Fault(
        "source-changes-while-read",
        "if state is not None and fingerprint(source) != state:",
        "if state is not None and fingerprint(source) is None:",
        ("test_cache.py", "test_tables.py"),
    ),
    Fault(
        "fingerprint-without-times",
        'files.append(f"{path}|{status.st_size}|{times}")',
        'files.append(f"{path}|{status.st_size}")',
        ("test_sources.py",),
    ),
    Fault(
        "cache-of-another-query",
        "facts = (_identity(source), fragment.to_json(), changes, self._is_simulated)",
        "facts = (_identity(source), fragment.table, changes, self._is_simulated)",
        ("test_cache.py", "test_tables.py"),
    ),
)

METHODS = (
    Fault(
        "coreset-weights-count-once",
        "weights = counts * (total / (len(draws) * scores))",
        "weights = total / (len(draws) * scores)",
        ("test_coreset_sampling.py",),
    ),
    Fault(
        "coreset-uniform-weights",
        "weights = weights * (joined_rows / taken)",
        "weights = weights * taken / taken",
        ("test_coreset_sampling.py",),
    ),
    Fault(
        "leverage-without-masses",
        "weighted = rows[block] * np.sqrt(masses[block], dtype=np.float64)[:, None]",
        "weighted = rows[block] * np.ones(len(masses[block]))[:, None]",
        ("test_coreset_sampling.py",),
    ),
    Fault(
        "cluster-sensitivity-without-distance",
        "scores = share * shard.distances + cluster[shard.labels]",
        "scores = 0.0 * shard.distances + cluster[shard.labels]",
        ("test_coreset_clusters.py",),
    ),
    Fault(
        "coreset-masks-do-not-cancel",
        "total += stream if part == first else -stream",
        "total += stream",
        ("test_coreset_sampling.py",),
    ),
    Fault(
        "coreset-scores-unchecked",
        "is_beyond = scores > bound * (1.0 + TOLERANCE)",
        "is_beyond = scores > bound * 1e9",
        ("test_coreset_runs.py",),
    ),
    Fault(
        "kmeans-without-weights",
        "solver.fit(weighted, sample_weight=own_weights)",
        "solver.fit(weighted)",
        ("test_coreset_clusters.py",),
    ),
    Fault(
        "kmeans-seeded-alike",
        "random_state=int(rng.integers(2**31)),",
        "random_state=0,",
        ("test_coreset_clusters.py",),
    ),
    Fault(
        "distdim-without-weights",
        "mass = np.bincount(which.reshape(-1), weights, minlength=len(combinations))",
        "mass = np.bincount(which.reshape(-1), minlength=len(combinations))",
        ("test_coreset_clusters.py", "test_coreset_solvers.py"),
    ),
    Fault(
        "coreset-ridge-penalty",
        'return Ridge(alpha=l2 * rows, solver="svd")',
        'return Ridge(alpha=l2, solver="svd")',
        ("test_coreset_solvers.py",),
    ),
    Fault(
        "saga-intercept",
        "return np.append(model.coef_, middle - mean @ model.coef_)",
        "return np.append(model.coef_, middle)",
        ("test_coreset_solvers.py",),
    ),
    Fault(
        "z-step-over-relaxation",
        "centre += (1.0 - OVER_RELAXATION) * differences",
        "centre -= (1.0 - OVER_RELAXATION) * differences",
        ("test_z_step.py",),
    ),
    Fault(
        "graph-norms-swapped",
        "    EdgeNorm.ONE: _onto_box,\n    EdgeNorm.TWO: _onto_sphere,\n",
        "    EdgeNorm.ONE: _onto_sphere,\n    EdgeNorm.TWO: _onto_sphere,\n",
        ("test_z_step.py",),
    ),
    Fault(
        "graph-weights-of-one-end",
        "deviations = np.sqrt(errors[left] + errors[right])",
        "deviations = np.sqrt(2.0 * errors[left])",
        ("test_z_step.py", "test_similarity_graph.py"),
    ),
    Fault(
        "neighbour-of-itself",
        "np.fill_diagonal(others, np.inf)",
        "np.fill_diagonal(others, 0.0)",
        ("test_similarity_graph.py",),
    ),
    Fault(
        "shared-coordinates-of-one-site",
        "out[:, shared] = points[np.ix_(present, shared)].mean(axis=0)",
        "out[:, shared] = points[:1, shared]",
        ("test_personal_problem.py", "test_personalised.py"),
    ),
    Fault(
        "update-code-book-in-disorder",
        "index = places[: runs * bits].reshape(runs, bits) @ powers",
        "index = places[: runs * bits].reshape(runs, bits) @ powers[::-1]",
        ("test_encoded_updates.py",),
    ),
)

FAULTS = (*JOINS, *LEARNING, *FEATURES, *PRIVACY, *ROUNDS, *METHODS)
