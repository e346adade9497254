"""Experiments and the command line. May import every layer below; nothing imports it."""
