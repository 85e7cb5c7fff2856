"""Noise with a memory: rounds that take away again what earlier rounds of a run added."""
