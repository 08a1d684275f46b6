"""Domino speculative decoding for transformers: same text, faster (arXiv 2605.29707)."""

from transformers import AutoConfig, AutoModel

from .candidate_generator_domino import DominoCandidateGenerator
from .configuration_domino import DominoConfig
from .modeling_domino import DominoForSpeculativeDraft


__version__ = "0.1.0"

AutoConfig.register("domino", DominoConfig, exist_ok=True)
AutoModel.register(DominoConfig, DominoForSpeculativeDraft, exist_ok=True)

TRAINING_NAMES = ("DominoTrainer", "DominoTrainingArguments")


def __getattr__(name: str):
    # Decoding needs no accelerate, so the trainer is imported by those who ask for it.
    if name in TRAINING_NAMES:
        from . import training

        return getattr(training, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DominoCandidateGenerator",
    "DominoConfig",
    "DominoForSpeculativeDraft",
    "DominoTrainer",
    "DominoTrainingArguments",
]
