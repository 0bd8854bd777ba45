"""Inputs that other trainers got wrong, as folders with an `expect.json`, played against the API and the engine."""
