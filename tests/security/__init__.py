"""Attacks, each with the means of somebody whom docs/security.md names."""
