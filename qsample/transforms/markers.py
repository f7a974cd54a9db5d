"""Names of the nodes that modules leave in a trace for `exporters` to replace. Without torch: its
readers have none."""

from __future__ import annotations

from typing import Final

MARKER_DOMAIN: Final = "qsample"

# `transforms.recurrent`, around the code of a single token.
# Inputs: states, then inputs [B, S, ..]; outputs: states, then one token of each input [B, ..].
SCAN_BEGIN: Final = "ScanBegin"
# Inputs: next states, then results [B, ..]; outputs: final states, then results [B, S, ..].
SCAN_END: Final = "ScanEnd"
NUM_STATES: Final = "num_states"

# `transforms.experts`; inputs: rows [S, H], choice [S, E] (1 for a row's expert, else 0), then the
# weights as `ExpertWeights` has them; output: [S, H]; attributes: what `SwiGLU` and `ExpertWeights`
# say.
EXPERTS: Final = "Experts"
ALPHA: Final = "alpha"
BETA: Final = "beta"
LIMIT: Final = "limit"
INTERLEAVED: Final = "interleaved"
GATE_TRANSPOSED: Final = "gate_transposed"
DOWN_TRANSPOSED: Final = "down_transposed"

# `transforms.repeated_layers`; inputs and outputs: a layer's hidden states, then its retained
# states.
LAYER_BEGIN: Final = "LayerBegin"
LAYER_END: Final = "LayerEnd"
REPEATED_LAYER: Final = "RepeatedLayer"
GROUP: Final = "group"
LAYER: Final = "layer"

# A linear layer: inputs: what it reads and its result; output: the result. Metadata: its name.
ADAPTED: Final = "Adapted"
ADAPTED_PATH: Final = "qsample.adapted"
