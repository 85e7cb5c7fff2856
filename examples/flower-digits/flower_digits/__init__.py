"""Ten silos, five thousand images each, and privacy for every image."""
