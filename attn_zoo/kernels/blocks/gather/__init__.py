"""The gather path: any device and dtype, linear in time and memory."""
