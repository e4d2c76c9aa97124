"""Time, memory, FLOPs, energy and environment of any callable. Knows nothing of attention."""
