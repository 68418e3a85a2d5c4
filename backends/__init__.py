"""Backends: one folder for each device, and what they share."""

SHARED = frozenset({"gpu"})  # folders that are no backend: parts that several of them are made of
