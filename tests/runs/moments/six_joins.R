# Six made-up joins (tests/support/examples/six_joins.py) by glm, MASS::glm.nb and survival::coxph, which writes the
# ties by Efron's formula: the numbers of six_joins.toml. R 4.2.2, MASS 7.3, survival 3.5-3 (Debian 12: r-base-core,
# r-cran-mass, r-cran-survival).
#
#   python -m tests.support.examples.six_joins FOLDER
#   Rscript tests/runs/moments/six_joins.R FOLDER > tests/runs/moments/six_joins.toml
suppressMessages({library(MASS); library(survival)})
numbers <- function(name, x) cat(name, " = [", paste(sprintf("%.10g", x), collapse = ", "), "]\n", sep = "")
rows_of <- function(name) read.csv(file.path(commandArgs(TRUE), paste0(name, ".csv")))
exact <- list(epsilon = 1e-14, maxit = 200)

describe <- function(name, fit, found, freedom = Inf) {
  half <- qt(0.975, freedom) * found[, 2]
  cat("[", name, "]\n", sep = "")
  if (inherits(fit, "negbin")) numbers("dispersion", 1 / fit$theta)
  numbers("coefficients", found[, 1])
  numbers("errors", found[, 2])
  numbers("ratios", found[, 3])
  numbers("chances", found[, 4])
  numbers("low", found[, 1] - half)
  numbers("high", found[, 1] + half)
}
of_glm <- function(name, fit) {
  found <- summary(fit)$coefficients[-1, , drop = FALSE]
  describe(name, fit, found, if (colnames(found)[3] == "t value") fit$df.residual else Inf)
}
cat("# Printed by six_joins.R, which says of what.\n")
of_glm("births", glm(label ~ ., binomial, rows_of("births"), control = exact))
of_glm("policies", glm(label ~ . - offset + offset(offset), poisson, rows_of("policies"), control = exact))
of_glm("absences", glm.nb(label ~ ., rows_of("absences"), control = do.call(glm.control, exact)))
costs <- rows_of("costs")
of_glm("costs", glm(label ~ . - weight, Gamma("log"), costs, costs$weight, control = exact))
of_glm("homes", glm(label ~ ., gaussian, rows_of("homes"), control = exact))
times <- rows_of("relapses")
fit <- coxph(Surv(time, event) ~ hours + age + depth + strata(strata), times, times$weight, ties = "efron", robust = FALSE,
             control = coxph.control(eps = 1e-12, iter.max = 100, toler.chol = 1e-13))
describe("relapses", fit, summary(fit)$coefficients[, c("coef", "se(coef)", "z", "Pr(>|z|)")])
