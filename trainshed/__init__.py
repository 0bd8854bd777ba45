"""Trainshed from Python: what a program of a user's imports. The client itself is `api.client`."""

from api.client import ApiError, Client, Damaged, Event, Json, TrainshedError, Unreachable

__all__ = ["ApiError", "Client", "Damaged", "Event", "Json", "TrainshedError", "Unreachable"]
