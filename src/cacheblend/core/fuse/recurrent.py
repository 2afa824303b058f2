"""What recurrent layers (state-space, linear attention, convolution) ask of a prefill.

The state behind a row is a function of all rows in front of it. So such a layer needs every row's hidden state, and no
row can be dropped in front of it:

    layer       0 ....... last recurrent | first that drops ....... last that mixes rows | ...
    rows        all of them, exact       | selected                 K, V; then the last  | the last
    loaded KV   the exact prefix         | all of it

and a pass can only begin where the states of the rows in front are known. Knows no engine and no store.
"""

from collections.abc import Sequence
from typing import Any

from cacheblend.core.fuse.runner import LayerRunner
from cacheblend.core.plan.plan import BlendPlan


class Recurrence:
    """Of a model without recurrent layers, whose attention is in every layer: asks for nothing.

    An engine's own says otherwise. One object serves one prefill.
    """

    lost: Sequence[str] = ()
    """Why states that are held could not be used, one line each."""

    saveable_share: float | None = None
    """See `BlendReport`."""

    def first_to_drop(self, num_layers: int) -> int:
        """The first layer at whose entrance rows may be dropped; `num_layers`: none."""
        return 0

    def last_to_mix(self, num_layers: int) -> int:
        """The last layer with attention or a state: behind it only the prompt's last rows are needed."""
        return num_layers - 1

    def begin(self, plan: BlendPlan) -> BlendPlan:
        """The plan that a pass carries out; called once a pass, before its layers are opened."""
        return plan

    def cuts(self, plan: BlendPlan) -> Sequence[int]:
        """Positions that no tile spans, ascending, because layers keep their state there."""
        return ()

    def kept(self, runner: LayerRunner) -> Any:
        """What the layers have kept of the prompt, for `PrefillResult.states`."""
        return None
