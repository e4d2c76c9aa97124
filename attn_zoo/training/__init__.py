"""Training: one plain loop for every variant and task, under named protocols."""

from attn_zoo.training.learner import AbstractLearner, Learner
from attn_zoo.training.protocol import PROTOCOLS, Protocol, resolve_protocol
from attn_zoo.training.run import Progress, TrainingResult, run_training

__all__ = [
    "PROTOCOLS",
    "AbstractLearner",
    "Learner",
    "Progress",
    "Protocol",
    "TrainingResult",
    "resolve_protocol",
    "run_training",
]
