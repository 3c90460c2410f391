"""Records of report.json, and their presentation in a console."""
