"""transformers' functions in ONNX Runtime's operators, in the sizes that released models have."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.tiny_models import export_without_sampler, random_model


def test_a_null_vector_of_a_released_model_s_size_has_a_norm(tmp_path: Path) -> None:
    """The export drops constants below 1e-8, and padding is null: the parity gate would see infinities."""
    model = random_model(
        "qwen3_5_text",
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"],
    )
    export_without_sampler(model, tmp_path / "package")
