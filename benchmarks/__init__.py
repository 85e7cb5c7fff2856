"""Measurements that `make bench` runs. A package, since other projects install folders of this name."""
