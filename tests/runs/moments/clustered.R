# Clustered errors of claims (tests/support/examples/claims.py) by R: the numbers of clustered.toml.
# As sandwich::vcovCL(fit, cluster, type = "HC0", cadjust = TRUE), in base R.
#
#   Rscript clustered.R FOLDER > clustered.toml
#
# FOLDER has the files of information.R, with the column pid, by which rows are clustered.
families <- list(squared = gaussian(), logistic = binomial(), poisson = poisson(), gamma = Gamma("log"))
for (loss in names(families)) {
  rows <- read.csv(file.path(commandArgs(TRUE), paste0(loss, ".csv")))
  fit <- glm(label ~ km + age + density + rain, families[[loss]], rows, control = list(epsilon = 1e-14, maxit = 100))
  scores <- model.matrix(fit) * fit$weights * residuals(fit, "working")
  sums <- rowsum(scores, rows$pid)
  unscaled <- summary(fit)$cov.unscaled
  meat <- crossprod(sums) * nrow(sums) / (nrow(sums) - 1)
  errors <- sqrt(diag(unscaled %*% meat %*% unscaled))
  cat(loss, " = [", paste(format(errors, digits = 12), collapse = ", "), "]\n", sep = "")
}
