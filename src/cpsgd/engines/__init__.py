"""Transports for rounds: Flower, and the all-reduce of PyTorch."""
