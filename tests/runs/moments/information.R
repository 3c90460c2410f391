# Coefficients and standard errors of claims (tests/support/examples/claims.py), by R's glm and
# MASS: the numbers of information.toml. Robust ones are HC0, as of sandwich::vcovHC.
#
#   Rscript information.R FOLDER > information.toml
#
# FOLDER has a file for each loss, such as poisson.csv: the standardised columns km, age, density and
# rain of the join (0 where a LEFT JOIN finds no row), the label, and the text job. "inflation" is what car::vif
# prints of a model with the job besides: the generalised VIF of each feature, from the correlations of its estimates.
families <- list(
  squared = gaussian(), logistic = binomial(), poisson = poisson(), gamma = Gamma("log"),
  `negative-binomial(0.7)` = MASS::negative.binomial(1 / 0.7)
)
inflation <- function(fit) {
  assigned <- attr(model.matrix(fit), "assign")[-1]
  correlations <- cov2cor(vcov(fit)[-1, -1])
  sapply(unique(assigned), function(term) {
    own <- assigned == term
    within <- det(correlations[own, own, drop = FALSE])
    within * det(correlations[!own, !own]) / det(correlations)
  })
}
known <- c("logistic", "poisson", "negative-binomial(0.7)")
numbers <- function(name, x) cat(name, " = [", paste(format(x, digits = 12), collapse = ", "), "]\n", sep = "")
for (loss in names(families)) {
  rows <- read.csv(file.path(commandArgs(TRUE), paste0(loss, ".csv")))
  fit <- glm(label ~ km + age + density + rain, families[[loss]], rows, control = list(epsilon = 1e-14, maxit = 100))
  dispersion <- if (loss %in% known) 1 else NULL
  found <- summary(fit, dispersion = dispersion)$coefficients
  unscaled <- summary(fit)$cov.unscaled
  slopes <- model.matrix(fit) * fit$weights * residuals(fit, "working")
  robust <- sqrt(diag(unscaled %*% crossprod(slopes) %*% unscaled))
  cat('["', loss, '"]\n', sep = "")
  numbers("coefficients", found[, 1])
  numbers("errors", found[, 2])
  numbers("ratios", found[, 3])
  numbers("chances", found[, 4])
  numbers("robust", robust)
  few <- update(fit, . ~ km + age)
  kind <- if (loss %in% known) "LRT" else "F"
  dispersion <- if (loss %in% known) 1 else summary(fit)$dispersion
  compared <- anova(few, fit, test = kind, dispersion = dispersion)
  numbers("columns_beside", c(if (kind == "F") compared$F[2] else compared$Deviance[2], compared[2, ncol(compared)]))
  numbers("inflation", inflation(update(fit, . ~ . + job)))
}
