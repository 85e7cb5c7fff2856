"""Figures: what was computed, drawn so that it can be read at a glance."""
