"""Total compute of a prefill, as a share of a full one. Counts rows and layers, measures nothing."""

from dataclasses import dataclass

from cacheblend.engines.hf import BlendEngine


@dataclass(frozen=True)
class ComputeScale:
    """What row-layers of a model are worth.

    Attributes:
        layers: of the model.
        projection: a row that only goes through a layer's key and value projections, as a share of one that goes
            through the whole layer; by parameters, the mean over the layers.
    """

    layers: int
    projection: float

    @staticmethod
    def of(engine: BlendEngine) -> "ComputeScale":
        """Of an engine's model."""
        shapes = engine.survey.layout.layers
        width = engine.model.config.get_text_config(decoder=True).hidden_size
        shares = [
            2 * shape.kv_heads * shape.head_dim * width / _active_parameters(engine, index)
            for index, shape in enumerate(shapes)
        ]
        return ComputeScale(len(shapes), sum(shares) / len(shares))

    def share(self, row_layers: int, projected_rows: int, prompt_tokens: int) -> float:
        """Of a full prefill of `prompt_tokens` rows."""
        return (row_layers + self.projection * projected_rows) / (prompt_tokens * self.layers)


def _active_parameters(engine: BlendEngine, layer: int) -> float:
    """Parameters that one row goes through: of a layer of experts, those of the experts that a row is sent to."""
    config = engine.model.config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for count in (getattr(config, name, None) for name in names) if count), 1)
    used = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    return sum(
        parameter.numel() * (used if ".experts." in f".{name}" else 1.0)
        for name, parameter in engine.view.layers[layer].named_parameters()
    )
