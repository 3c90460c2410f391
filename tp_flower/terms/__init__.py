"""The terms of a run: what follows from its proposal, at the server and at every site."""
