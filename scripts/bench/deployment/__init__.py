"""What a round costs in a real deployment."""
