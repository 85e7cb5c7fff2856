"""Transports for rounds: Flower, NVFlare, and the all-reduce of PyTorch. Tables on Spark and Beam."""
