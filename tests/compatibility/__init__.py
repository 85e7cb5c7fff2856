"""What release 0.1.0 wrote and computed must stay readable and equal."""
