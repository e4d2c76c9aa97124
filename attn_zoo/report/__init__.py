"""Tables, figures and pages from results folders. Reads records only: no torch, no variant is ever loaded."""
