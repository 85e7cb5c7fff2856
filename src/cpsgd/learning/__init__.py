"""What people do with private means: training and its data."""
