"""The parts of transformers, torch and onnxscript that an export uses although they are not public,
and their check.

Some parts have no name that could be looked up. If one of these changes, the comparison with the
model refuses the export:

- the names under which a model takes its cache, and its attributes for experts, rotations and
  positions;
- the methods of the cache that recurrent layers call, and the functions that `recurrent_operators`
  replaces by name;
- the classes that a transform knows by name, a few in `experts` (`positions` checks its own);
- the numbers that torch.export asserts and onnxscript folds.

`transformers.exporters.onnxruntime_fusions` may be absent, because `compiler.passes.fusions` has a
stand-in.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import Final

from qsample.errors import QsampleError, install_hint

# The ranges of pyproject.toml. scripts/versions runs the tests with both ends of each range.
RANGES: Final = {"transformers": ">=5.23,<5.25", "torch": ">=2.11,<2.14", "onnxscript": ">=0.7.2"}
_REWRITER: Final = "onnxscript.rewriter"
# The names of the parts, separated by spaces, by module.
PARTS: Final = {
    "transformers.activations": "ACT2FN",
    "transformers.cache_utils": "Cache CacheLayerMixin LinearAttentionLayer.update_conv_state "
    "LinearAttentionLayer.update_recurrent_state",
    "transformers.image_processing_backends": "PilBackend",
    "transformers.integrations.moe": "ExpertsInterface batched_mm_experts_forward",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.modeling_rope_utils": "ROPE_INIT_FUNCTIONS",
    "transformers.modeling_utils": "PreTrainedModel._can_set_attn_implementation "
    "PreTrainedModel._can_set_experts_implementation PreTrainedModel.set_experts_implementation",
    "transformers.models.auto.processing_auto": "PROCESSOR_MAPPING",
    "transformers.models.gpt_neo.modeling_gpt_neo": "GPTNeoSelfAttention._attn",
    "transformers.pytorch_utils": "Conv1D",
    "transformers.utils.hub": "cached_file get_checkpoint_shard_files",
    "transformers.vision_utils": "_interpolation_axis_taps_weights",
    "torch.export._trace": "__name__",
    "torch.onnx.ops": "symbolic symbolic_multi_out",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils._pytree": "TreeSpec tree_flatten tree_map tree_unflatten",
    f"{_REWRITER}.ort_fusions.bias_gelu": "fuse_bias_gelu",
    f"{_REWRITER}.ort_fusions.erfgelu": "fuse_erfgelu",
    f"{_REWRITER}.ort_fusions.fused_matmul_rule_sets": "fused_matmul_rule_sets",
    f"{_REWRITER}.ort_fusions.gelu": "fuse_gelu",
    f"{_REWRITER}.ort_fusions.rms_normalization": "fuse_rms_normalization",
    f"{_REWRITER}.ort_fusions.skip_normalization": "fuse_skip_layer_normalization fuse_skip_rms_normalization",
    f"{_REWRITER}.pattern": "Constant MatchResult RewriteRule RewriteRuleSet SimplePatternMatcher.match",
    # The newest part that `trace` names.
    f"{_REWRITER}.rules": "common.materialize_reshape_shape_rule",
}


def check_private_parts() -> None:
    """Raise QsampleError for a part that an installed library lacks, ModuleNotFoundError for a
    missing library."""
    # Without torch, transformers lacks parts as well, so a missing library has to be found first.
    for library in RANGES:
        import_module(library)
    for module, names in PARTS.items():
        library = module.partition(".")[0]
        try:
            attrgetter(*names.split())(import_module(module))
        except (ImportError, AttributeError) as error:
            raise QsampleError(
                f"qsample cannot export with {library} {version(library)} ({error}); "
                f"it takes {library}{RANGES[library]}: {install_hint('export')}"
            ) from error
