"""Tasks: data with labels, split once and for all, and what trivial models score on them."""

from attn_zoo.tasks.contract import AbstractTask, Example, Split, SplitName, TaskKind, TaskSpec

__all__ = ["AbstractTask", "Example", "Split", "SplitName", "TaskKind", "TaskSpec"]
