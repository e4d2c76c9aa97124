"""Pathfinder: scenes, their geometry, and the drawing of pictures."""
