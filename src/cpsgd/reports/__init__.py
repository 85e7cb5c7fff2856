"""Pages, pictures and live displays: what was computed, so that it can be read at a glance."""
