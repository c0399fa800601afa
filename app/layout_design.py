"""A design: a known model with some of its numbers changed, as the editor and the URL hold it. No Streamlit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

from moe_core.layout import DenseFFN, Layer, Layout, MoEFFN, moe_layer_indices


@dataclass(frozen=True, kw_only=True)
class Design:
    """The numbers that the editor changes. latent_size 0 = experts work in the model's width.

    d_ff is the width of dense layers; MoE layers stand as `moe_layer_indices` puts them.
    """

    num_layers: int
    d_model: int
    moe_frequency: int
    first_k_dense: int
    d_ff: int
    num_experts: int
    top_k: int
    expert_d_ff: int
    num_shared_experts: int
    latent_size: int

    @classmethod
    def of(cls, base: Layout) -> Design:
        """The numbers of a layout whose MoE layers are alike and follow a pattern.

        Raises ValueError for a layout without MoE layers, or with layers that no pattern gives.
        """
        moe = moe_of(base)
        dense = [layer.ffn.d_ff for layer in base.layers if isinstance(layer.ffn, DenseFFN)]
        frequency, first = _pattern(base)
        return cls(
            num_layers=len(base.layers),
            d_model=base.d_model,
            moe_frequency=frequency,
            first_k_dense=first,
            # a model without dense layers gets ones that cost a token as much as its MoE layers do
            d_ff=dense[0] if dense else moe.top_k * moe.expert_d_ff + moe.shared_d_ff,
            num_experts=moe.num_experts,
            top_k=moe.top_k,
            expert_d_ff=moe.expert_d_ff,
            num_shared_experts=moe.num_shared_experts,
            latent_size=moe.latent_size or 0,
        )

    def layout(self, base: Layout, name: str) -> Layout:
        """`base` with these numbers; attention, vocabulary, biases and activation stay its own.

        Raises ValueError for numbers that do not fit together.
        """
        own = moe_of(base)
        moe = replace(
            own,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_d_ff=self.expert_d_ff,
            shared_d_ff=self.num_shared_experts * self.expert_d_ff,
            latent_size=self.latent_size or None,
        )
        dense = DenseFFN(d_ff=self.d_ff, activation=own.activation)
        sparse = set(
            moe_layer_indices(
                self.num_layers,
                moe_frequency=self.moe_frequency,
                first_k_dense=min(self.first_k_dense, self.num_layers),
            )
        )
        like = [base.layers[index % len(base.layers)] for index in range(self.num_layers)]
        layers = tuple(
            Layer(
                attention=layer.attention,
                ffn=moe if index in sparse else dense,
                norms=layer.norms,
                norm_bias=layer.norm_bias,
            )
            for index, layer in enumerate(like)
        )
        return replace(base, name=name, d_model=self.d_model, layers=layers)

    def changes(self, base: Layout) -> list[str]:
        """What differs from the base's own numbers, as the URL holds it: "num_experts:64"."""
        own = asdict(Design.of(base))
        return [f"{name}:{value}" for name, value in asdict(self).items() if value != own[name]]

    def changed(self, changes: Iterable[str]) -> Design:
        """This design with changes as the URL holds them; what cannot be one is left out."""
        known = {field.name for field in fields(self)}
        numbers = {}
        for change in changes:
            name, _, text = change.partition(":")
            if name in known and text.isascii() and text.isdecimal() and len(text) <= 9:
                low, high = LIMITS[name]
                numbers[name] = min(max(int(text), low), high)
        return replace(self, **numbers)


LIMITS = {
    "num_layers": (1, 256),
    "d_model": (1, 65_536),
    "moe_frequency": (1, 256),
    "first_k_dense": (0, 256),
    "d_ff": (1, 1_048_576),
    "num_experts": (1, 4096),
    "top_k": (1, 4096),
    "expert_d_ff": (1, 1_048_576),
    "num_shared_experts": (0, 64),
    "latent_size": (0, 65_536),
}
"""Least and greatest value that the editor takes for each number."""


def moe_of(layout: Layout) -> MoEFFN:
    """The feed-forward part of the first MoE layer; ValueError where there is none."""
    found = next((layer.ffn for layer in layout.layers if isinstance(layer.ffn, MoEFFN)), None)
    if found is None:
        raise ValueError(f"{layout.name} has no MoE layer to start from")
    return found


def _pattern(layout: Layout) -> tuple[int, int]:
    """(moe_frequency, first_k_dense) that give the layout's MoE layers."""
    count, wanted = len(layout.layers), layout.moe_layers
    for frequency in range(1, count + 1):
        for first in (0, wanted[0]):
            if moe_layer_indices(count, moe_frequency=frequency, first_k_dense=first) == wanted:
                return frequency, first
    raise ValueError(f"the MoE layers of {layout.name} follow no pattern")
