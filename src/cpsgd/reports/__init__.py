"""Pictures, a run's progress on the terminal, and sentences about runs."""
