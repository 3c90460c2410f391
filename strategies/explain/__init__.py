"""What a run would do, cost and tell, without running it."""
