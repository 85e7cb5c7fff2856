"""Ten silos, five thousand images each, and privacy for every image."""

SILOS = 10
IMAGES = 5000

# Where images are drawn: the probability of each, for every round.
RATE = 0.05

# With correlated noise every image is in one round only: each of at most 90 rounds has a share of a silo's images.
ROUNDS = 90
SHARE = IMAGES // ROUNDS
