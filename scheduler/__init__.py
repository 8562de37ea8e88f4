"""Decides what the engine computes next: plain Python, no torch, no Redis, no clock of its own."""
