"""What a run costs and how its work is dealt out, as arithmetic on its configuration. Never imports torch."""
