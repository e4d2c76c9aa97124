"""Tasks: data with labels, split once and for all, and what trivial models score on them."""

from attn_zoo.tasks.abstract_task import AbstractTask, Example, Metric, Split, SplitName, TaskKind, TaskSpec
from attn_zoo.tasks.sources.source import Source

__all__ = ["AbstractTask", "Example", "Metric", "Source", "Split", "SplitName", "TaskKind", "TaskSpec"]
