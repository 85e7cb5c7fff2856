"""Measurements that `make bench` runs. A package, as others install folders of this name, too."""
