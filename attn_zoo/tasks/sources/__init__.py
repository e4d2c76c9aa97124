"""Files that tasks read: where they are, how they are fetched, checked, read and cached."""
