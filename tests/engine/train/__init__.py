"""What trains the net: schedule, optimizer, checkpoints, the trainer's story, the rank launcher."""
