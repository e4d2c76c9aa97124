"""The one shared Transformer: the same positions, norms, heads and start for every variant."""

from attn_zoo.model.config import ModelConfig
from attn_zoo.model.heads import Classifier, Denoiser, LanguageModel, Retriever, Seq2Seq, TokenClassifier
from attn_zoo.model.stacks import Decoder, Encoder

__all__ = [
    "Classifier",
    "Decoder",
    "Denoiser",
    "Encoder",
    "LanguageModel",
    "ModelConfig",
    "Retriever",
    "Seq2Seq",
    "TokenClassifier",
]
