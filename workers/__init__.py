"""Turns a placed job into a finished one. The engine is launched, never imported."""
