"""Two servers over HTTP: clients send one message each, and only the sum of all comes out."""
