# Makes curves.toml: Rscript tests/runs/moments/curves.R > tests/runs/moments/curves.toml
# R 4.2.2, survival 3.5-3 (Debian 12: r-base-core, r-cran-survival). The rows are of formulas, so
# that test_curves.py makes the same ones: stays, joined to clinics of which number 0 has two rows.
library(survival)
i <- 1:120
rows <- data.frame(time = 1 + (i * 37) %% 25, event = ((i * i * 7) %% 10) < 6, clinic = i %% 3)
rows <- rbind(rows, rows[rows$clinic == 0, ])

numbers <- function(name, values) {
  cat(name, " = [", paste(sprintf("%.15g", values), collapse = ", "), "]\n", sep = "")
}

describe <- function(name, width) {
  counted <- rows
  counted$time <- width * ceiling(rows$time / width)
  cat(sprintf("[%s]\n", name))
  curves <- summary(survfit(Surv(time, event) ~ clinic, counted), times = seq(width, 25, width), extend = TRUE)
  numbers("at_risk", curves$n.risk)
  numbers("events", curves$n.event)
  numbers("survival", curves$surv)
  numbers("error", curves$std.err)
  numbers("low", curves$lower)
  numbers("high", curves$upper)
  test <- survdiff(Surv(time, event) ~ clinic, counted)
  numbers("observed", test$obs)
  numbers("expected", test$exp)
  numbers("log_rank", c(test$chisq, pchisq(test$chisq, 2, lower.tail = FALSE)))
}

cat("# Made by curves.R, which stands beside it; groups one after the other.\n")
describe("exact", 1)
describe("grid", 5)
