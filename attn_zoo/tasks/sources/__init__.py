"""Files that tasks read: where they lie, how they are fetched, checked, read and cached."""
