"""A scorer that stays: it keeps a session with the sites, and predicts over HTTP."""
