"""What the records say, computed once: curves, fits, scores. Tables, figures and pages read it."""
