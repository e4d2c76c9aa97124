"""What generated tasks share: random numbers, and examples drawn in chunks."""
