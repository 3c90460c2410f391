"""Training over joins and unions: ADMM, SGD, and what they are compared with."""
