"""Total compute of a prefill as a share of a full prefill. Counts rows and layers; measures no time."""

from dataclasses import dataclass

from cacheblend.engines.hf import BlendEngine


@dataclass(frozen=True)
class ComputeScale:
    """Converts counts of rows and layers to shares of a full prefill."""

    layers: int  # of the model
    projection: float
    """Cost of a row that only passes a layer's query, key and value projections, as a share of a row that passes the
    whole layer; by parameters, mean over the layers with attention."""

    @staticmethod
    def of(engine: BlendEngine) -> "ComputeScale":
        """The scale of an engine's model."""
        layers = engine.runtime.survey.num_layers
        shares = [_projection_parameters(engine, index) / _active_parameters(engine, index) for index in range(layers)]
        return ComputeScale(layers, sum(shares) / len(engine.runtime.survey.kinds.kv_layers))

    def share(self, row_layers: int, projected_rows: int, prompt_tokens: int) -> float:
        """Compute as a share of a full prefill of `prompt_tokens` rows."""
        return (row_layers + self.projection * projected_rows) / (prompt_tokens * self.layers)


def _projection_parameters(engine: BlendEngine, layer: int) -> int:
    """Weights that a row passes in a layer before attention: the query, key and value projections. A separate query
    projection counts in full (it may include a gate, which is computed with it); a fused projection counts as number of
    heads times head size. With latent attention these are all of its matrices but the output's."""
    if (latent := engine.runtime.view.latent[layer]) is not None:
        return sum(weight.numel() for name, weight in latent.named_parameters() if not name.startswith("o_proj"))
    config = engine.model.config.get_text_config(decoder=True)
    if layer not in engine.runtime.survey.kinds.kv_layers:
        return 0  # its rows are computed as a whole
    shape = engine.runtime.survey.layout.layers[engine.runtime.survey.kinds.kv_layers.index(layer)]
    named = engine.runtime.view.layers[layer].named_parameters()
    own = next((parameter.numel() for name, parameter in named if name.endswith("q_proj.weight")), None)
    queries = config.num_attention_heads * shape.head_dim * config.hidden_size if own is None else own
    return queries + 2 * shape.kv_heads * shape.head_dim * int(config.hidden_size)


def _active_parameters(engine: BlendEngine, layer: int) -> float:
    """Parameters that one row passes; in a mixture of experts, those of the experts that a row is routed to."""
    config = engine.model.config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((count for count in (getattr(config, name, None) for name in names) if count), 1)
    used = (getattr(config, "num_experts_per_tok", None) or 1) / experts
    return sum(
        parameter.numel() * (used if ".experts." in f".{name}" else 1.0)
        for name, parameter in engine.runtime.view.layers[layer].named_parameters()
    )
