"""What a site keeps on its disk, and between the messages of a run."""
