"""The routers of Hugging Face transformers that are known, by class name: checked against version 5.24."""

from __future__ import annotations

from .adapter_base import RouterAdapter
from .adapters_transformers import (
    DbrxAdapter,
    JetMoeAdapter,
    Llama4Adapter,
    SwitchAdapter,
    TransformersRouter,
    bias_argument,
    bias_attribute,
    bias_of_statistics,
)

# softmax over all experts and then top-k, or top-k and then softmax over the chosen: the weights, which are taken as
# they are, tell the two apart, the scores do not
SOFTMAX = (
    *("MixtralTopKRouter", "MiniMaxTopKRouter", "PhimoeTopKRouter"),
    *("OlmoeTopKRouter", "FlexOlmoTopKRouter"),
    *("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "Qwen3NextTopKRouter", "Qwen3_5MoeTopKRouter"),
    "Qwen3VLMoeTextTopKRouter",
    "AriaTextTopKRouter",
    *("GraniteMoeTopKRouter", "GraniteMoeSharedTopKRouter", "GraniteMoeHybridTopKRouter", "GraniteMoeSWATopKRouter"),
    *("HunYuanMoEV1Gate", "JambaTopKRouter"),
    "Gemma4TextRouter",  # hands back probabilities
)
SOFTMAX_GROUPED = (
    *("DeepseekV2TopkRouter", "DeepseekOcr2TextTopkRouter", "UnlimitedOcrTextTopkRouter"),
    "Mistral4TopkRouter",
)
# one and the same forward, copied from DeepSeek-V3's
SIGMOID_GROUPED = (
    *("DeepseekV3TopkRouter", "DeepseekV32TopkRouter", "BailingHybridTopkRouter", "KimiLinearTopkRouter"),
    *("Glm4MoeTopkRouter", "Glm4MoeLiteTopkRouter", "Glm4vMoeTextTopkRouter", "GlmMoeDsaTopkRouter"),
    *("Dots1TopkRouter", "ExaoneMoeTopkRouter", "SolarOpenTopkRouter", "NemotronHTopkRouter", "MiMoV2FlashTopkRouter"),
)

FAMILIES: tuple[RouterAdapter, ...] = (
    TransformersRouter(classes=SOFTMAX),
    TransformersRouter(classes=("GptOssTopKRouter",), activation="clamped-glu"),
    TransformersRouter(classes=SOFTMAX_GROUPED, unsorted=True),
    TransformersRouter(
        classes=SIGMOID_GROUPED, score_function="sigmoid", bias_of=bias_attribute, group_limited=True, unsorted=True
    ),
    TransformersRouter(
        classes=("LagunaTopKRouter",),
        score_function="sigmoid",
        bias_of=bias_attribute,
        unsorted=True,
    ),
    TransformersRouter(
        classes=("MiniMaxM2TopKRouter", "HYV3TopKRouter", "Lfm2MoeTopKRouter", "AfmoeTokenChoiceRouter"),
        score_function="sigmoid",
        bias_of=bias_argument,
        unsorted=True,
    ),
    TransformersRouter(classes=("LongcatFlashTopkRouter",), bias_of=bias_attribute, unsorted=True),
    TransformersRouter(classes=("Ernie4_5_MoeTopKRouter",), bias_of=bias_of_statistics),
    Llama4Adapter(classes=("Llama4Router",), score_function="sigmoid"),
    DbrxAdapter(classes=("DbrxRouter",)),
    JetMoeAdapter(classes=("JetMoeTopKGating",)),
    SwitchAdapter(classes=("SwitchTransformersTop1Router",)),
)
