"""Drills on the running service: what is killed, stopped or drained, and what becomes of the job."""
