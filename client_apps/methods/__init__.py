"""The site half of the training methods: a room or a module of each one's name."""
