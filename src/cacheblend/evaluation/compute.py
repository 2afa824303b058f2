"""Total compute of a prefill, as a share of a full one. Counts rows and layers, measures nothing."""

from dataclasses import dataclass

from cacheblend.engines.hf import BlendEngine


@dataclass(frozen=True)
class ComputeScale:
    """What row-layers of a model are worth.

    Attributes:
        layers: of the model.
        projection: a row that only goes through a layer's query, key and value projections, as a share of one that
            goes through the whole layer; by parameters, the mean over the layers.
    """

    layers: int
    projection: float

    @staticmethod
    def of(engine: BlendEngine) -> "ComputeScale":
        """Of an engine's model."""
        layers = len(engine.survey.layout.layers)
        shares = [_projection_parameters(engine, index) / _active_parameters(engine, index) for index in range(layers)]
        return ComputeScale(layers, sum(shares) / len(shares))

    def share(self, row_layers: int, projected_rows: int, prompt_tokens: int) -> float:
        """Of a full prefill of `prompt_tokens` rows."""
        return (row_layers + self.projection * projected_rows) / (prompt_tokens * self.layers)


def _projection_parameters(engine: BlendEngine, layer: int) -> int:
    """Weights of what a row goes through until its layer is stopped at attention; queries are made there, too.

    A projection of its own for queries counts as it is (a gate in it is computed with it), one that is fused with
    others as its heads times their size.
    """
    config = engine.model.config.get_text_config(decoder=True)
    shape = engine.survey.layout.layers[layer]
    named = engine.view.layers[layer].named_parameters()
    own = next((parameter.numel() for name, parameter in named if name.endswith("q_proj.weight")), None)
    queries = config.num_attention_heads * shape.head_dim * config.hidden_size if own is None else own
    return queries + 2 * shape.kv_heads * shape.head_dim * int(config.hidden_size)


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
