"""What a worker process does with one cell, or with several that are timed in turns."""
