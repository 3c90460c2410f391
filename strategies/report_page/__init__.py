"""report.html: one page that shows a run, made from report.json alone."""
