"""The words that options take, where code without torch names them too."""

from typing import Literal

Activation = Literal["swiglu", "gelu", "situ-glu", "clamped-glu"]
DropPolicy = Literal["position", "probs"]
ScoreFunction = Literal["softmax", "sigmoid"]
