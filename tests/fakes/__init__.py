"""Stand-ins for what lies behind a seam: the engine's processes, the queue and the bell."""
