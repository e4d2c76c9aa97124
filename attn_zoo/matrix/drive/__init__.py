"""The driver: runs a plan, supervises worker processes, stores what they answer."""
