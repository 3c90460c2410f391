"""Set-up: from a query and the sites' tables to a training problem."""
