"""An app that records what it sends."""
