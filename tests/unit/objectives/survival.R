# Makes survival.toml: Rscript tests/unit/objectives/survival.R > tests/unit/objectives/survival.toml
# R 4.2.2, survival 3.5-3 (Debian 12: r-base-core, r-cran-survival). The rows are of formulas,
# so that a test makes the same ones: `test_cox_of_r.py`.
library(survival)
i <- 1:120
rows <- data.frame(
  time = 1 + (i * 37) %% 25,
  event = ((i * i * 7) %% 10) < 6,
  age = sin(i),
  crp = cos(2.3 * i),
  clinic = i %% 3,
  weight = 1 + (i %% 4) / 2
)
rows$entry <- floor(rows$time * ((i * 13) %% 11) / 11 * 0.9)

numbers <- function(values) paste(sprintf("%.15g", values), collapse = ", ")

describe <- function(name, formula, weights = NULL) {
  w <- if (is.null(weights)) rep(1, nrow(rows)) else weights
  environment(formula) <- environment()
  model <- coxph(formula, data = rows, weights = w, ties = "efron",
                 control = coxph.control(eps = 1e-12, iter.max = 100, toler.chol = 1e-13))
  hazard <- basehaz(model, centered = FALSE)
  strata <- if (is.null(hazard$strata)) rep("0", nrow(hazard)) else sub(".*=", "", hazard$strata)
  cat(sprintf("[%s]\n", name))
  cat(sprintf("coefficients = [%s]\n", numbers(coef(model))))
  cat(sprintf("log_likelihood = [%s]  # without coefficients, with them\n", numbers(model$loglik)))
  cat(sprintf("concordance = %.15g\n", model$concordance["concordance"]))
  cat(sprintf("strata = [%s]\n", paste(strata, collapse = ", ")))
  cat(sprintf("times = [%s]\n", numbers(hazard$time)))
  cat(sprintf("hazards = [%s]  # cumulative, at both features 0\n", numbers(hazard$hazard)))
  if (name %in% c("ties", "weights")) describe_brier(model, hazard, w)
  cat("\n")
}

# Graf's score at some times, of the rows and between them, by the weights that redistribute censored rows to the right
describe_brier <- function(model, hazard, w) {
  at <- c(3, 10.5, 17, 25)
  known <- rttright(Surv(time, event) ~ 1, rows, weights = w, times = at)
  scores <- as.matrix(rows[, c("age", "crp")]) %*% coef(model)
  cumulative <- stepfun(hazard$time, c(0, hazard$hazard))
  brier <- sapply(seq_along(at), function(k) {
    alive <- exp(-cumulative(at[k]) * exp(scores))
    is_alive <- rows$time > at[k] | (rows$time == at[k] & !rows$event)
    sum(known[, k] * (is_alive - alive)^2) / sum(known[, k])
  })
  cat(sprintf("brier = [%s]  # at 3, 10.5, 17 and 25\n", numbers(brier)))
}

cat("# Made by survival.R, which stands beside it.\n\n")
describe("ties", Surv(time, event) ~ age + crp)
describe("weights", Surv(time, event) ~ age + crp, weights = rows$weight)
describe("strata", Surv(time, event) ~ age + crp + strata(clinic))
describe("entry", Surv(entry, time, event) ~ age + crp)
describe("all", Surv(entry, time, event) ~ age + crp + strata(clinic), weights = rows$weight)
