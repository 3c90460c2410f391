"""The terms of a run, which follow from its proposal at the server and every site."""
