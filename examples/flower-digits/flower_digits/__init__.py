"""Ten silos, five thousand images each, and privacy for every image."""

SILOS = 10
IMAGES = 5000
