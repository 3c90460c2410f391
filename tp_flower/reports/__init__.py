"""Records of report.json, and how they read in a console."""
