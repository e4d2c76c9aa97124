"""The one shared Transformer: the same positions, norms, heads and start for every variant."""

from attn_zoo.model.config import ModelConfig
from attn_zoo.model.heads import Classifier, LanguageModel, Retriever, Seq2Seq
from attn_zoo.model.stacks import Decoder, Encoder

__all__ = ["Classifier", "Decoder", "Encoder", "LanguageModel", "ModelConfig", "Retriever", "Seq2Seq"]
