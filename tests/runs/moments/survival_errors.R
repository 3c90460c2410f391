# Hazard ratios and their errors by coxph, Efron's ties: the numbers of survival_errors.toml.
# R 4.2.2, survival 3.5-3 (Debian 12: r-base-core, r-cran-survival). The rows are of formulas, so that
# test_survival_errors.py makes the same ones.
#
#   Rscript survival_errors.R > survival_errors.toml
library(survival)
i <- 0:1199
person <- (i * 7) %% 300
rows <- data.frame(hours = 2 + sin(i), age = 60 + 12 * cos(person), crp = 3 + 2 * sin(2.3 * person))
rows$days <- 1 + floor(400 * abs(sin(1.7 * i * i + i)) / exp(0.2 * sin(i) + 0.3 * cos(person)))
rows$died <- (i * i * 7 + i) %% 10 < 6
rows$begun <- floor(rows$days * ((i * 13) %% 11) / 11 * 0.6)
rows$clinic <- i %% 2
rows$weight <- 1 + (i %% 4) / 2
# a LEFT JOIN finds no blood of every tenth person
rows$crp[person %% 10 == 3] <- 0

numbers <- function(name, x) cat(name, " = [", paste(format(x, digits = 12), collapse = ", "), "]\n", sep = "")
describe <- function(name, formula, weights = rep(1, nrow(rows))) {
  environment(formula) <- environment()
  exact <- coxph.control(eps = 1e-12, iter.max = 100, toler.chol = 1e-13)
  fit <- coxph(formula, rows, weights, ties = "efron", robust = FALSE, control = exact)
  found <- summary(fit)$coefficients
  cat("[", name, "]\n", sep = "")
  numbers("coefficients", found[, "coef"])
  numbers("errors", found[, "se(coef)"])
  numbers("chances", found[, "Pr(>|z|)"])
  # as car::vif: of single columns the diagonal of the inverse of the estimates' correlations
  numbers("inflation", diag(solve(cov2cor(vcov(fit)))))
}
cat("# Made by survival_errors.R, which stands beside it.\n")
describe("plain", Surv(days, died) ~ hours + age + crp)
describe("all", Surv(begun, days, died) ~ hours + age + crp + strata(clinic), rows$weight)
