"""Who carries the messages of a round."""
