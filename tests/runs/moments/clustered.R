# Clustered errors of claims (tests/support/examples/claims.py) by R: the numbers of clustered.toml.
# As sandwich::vcovCL(fit, cluster, type = "HC1", cadjust = TRUE), in base R; p and the intervals of
# 95 % by t with G - 1 degrees of freedom, as lmtest::coeftest(fit, vcov, df = G - 1).
#
#   Rscript clustered.R FOLDER > clustered.toml
#
# FOLDER has the files of information.R, with the column pid, by which rows are clustered.
families <- list(squared = gaussian(), logistic = binomial(), poisson = poisson(), gamma = Gamma("log"))
numbers <- function(name, x) cat(name, " = [", paste(format(x, digits = 12), collapse = ", "), "]\n", sep = "")
cat("# Printed by clustered.R, of R 4.2.2.\n")
for (loss in names(families)) {
  rows <- read.csv(file.path(commandArgs(TRUE), paste0(loss, ".csv")))
  fit <- glm(label ~ km + age + density + rain, families[[loss]], rows, control = list(epsilon = 1e-14, maxit = 100))
  scores <- model.matrix(fit) * fit$weights * residuals(fit, "working")
  sums <- rowsum(scores, rows$pid)
  clusters <- nrow(sums)
  unscaled <- summary(fit)$cov.unscaled
  factor <- clusters / (clusters - 1) * (nrow(rows) - 1) / df.residual(fit)
  errors <- sqrt(factor * diag(unscaled %*% crossprod(sums) %*% unscaled))
  cat("[", loss, "]\n", sep = "")
  numbers("errors", errors)
  numbers("chances", 2 * pt(-abs(coef(fit) / errors), clusters - 1))
  numbers("reach", qt(0.975, clusters - 1) * errors)
}
