"""What a run costs, as arithmetic on its configuration. Never imports torch."""
