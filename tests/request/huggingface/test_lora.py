"""The files of LoRA adapters: what a configuration means, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qsample.errors import QsampleError, UnsupportedModelError
from qsample.request.huggingface.lora import LoraConfig, floats, read_changes, read_config
from tests.helpers.adapters import lora_pair, save_adapter

LAYER = "model.layers.0.mlp.up_proj"
A, B = (f"base_model.model.{LAYER}.lora_{part}.weight" for part in "AB")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({A: None}, rf"holds matrix B of {LAYER} without its partner"),
        ({B: None}, rf"holds matrix A of {LAYER} without its partner"),
        (
            {A: torch.ones(5, 64), B: torch.ones(96, 5)},
            r"are \[5, 64\] and \[96, 5\], and the rank .* is 4",
        ),
        ({B: torch.ones(96, 3)}, r"are \[4, 64\] and \[96, 3\]"),
        ({A: torch.ones(64)}, r"lora_A\.weight is float32 \[64\]; it must be a matrix"),
        ({A: torch.ones(64, dtype=torch.bfloat16)}, r"lora_A\.weight is bfloat16 \[64\]"),
        ({A: torch.ones(4, 64, 1, 1)}, r"is float32 \[4, 64, 1, 1\]"),
        ({B: torch.ones(96, 4, dtype=torch.int8)}, r"is int8 \[96, 4\]"),
        (
            {B: torch.ones(96, 4, dtype=torch.uint16)},
            r"cannot be read \(\S+lora_B\.weight is 'U16'; it may be F32",
        ),
        *(
            ({B: torch.full((96, 4), torch.nan, dtype=dtype)}, "finite floats")
            for dtype in (torch.float, torch.bfloat16)
        ),
        (
            {B: torch.full((96, 4), torch.inf, dtype=torch.bfloat16)},
            "must be a matrix of finite floats",
        ),
        (
            {f"base_model.model.{LAYER}.lora_magnitude_vector": torch.ones(96)},
            "lora_magnitude_vector, which does not",
        ),
        (
            {f"base_model.model.{LAYER}.lora_B.bias": torch.ones(96)},
            r"lora_B\.bias, which does not belong",
        ),
        ({f"{LAYER}.lora_A.weight": torch.ones(4, 64)}, "which does not belong to a pair"),
        ({A: None, B: None}, "holds no LoRA matrices"),
    ],
)
def test_damaged_matrices(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = {
        name: tensor
        for name, tensor in (lora_pair(LAYER, 96, 64) | change).items()
        if tensor is not None
    }
    with pytest.raises(QsampleError, match=message):
        read_changes(*save_adapter(tmp_path / "adapter", tensors))


def test_weights_that_are_not_safetensors_are_refused(tmp_path: Path) -> None:
    files = save_adapter(tmp_path / "adapter", lora_pair(LAYER, 96, 64))
    whole = files[1].read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:]):
        files[1].write_bytes(damaged)
        with pytest.raises(
            QsampleError,
            match=r"adapter_model\.safetensors cannot be read .*download the adapter again",
        ):
            read_changes(*files)


# All that peft 0.21 writes for an adapter of default options.
DEFAULTS: dict[str, Any] = {
    "task_type": "CAUSAL_LM",
    "peft_type": "LORA",
    "auto_mapping": None,
    "peft_version": "0.21.2",
    "revision": None,
    "base_model_name_or_path": "some/model",
    "inference_mode": True,
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj"],
    "exclude_modules": ["k_proj"],
    "fan_in_fan_out": True,
    "bias": "none",
    "use_rslora": False,
    "modules_to_save": None,
    "init_lora_weights": True,
    "layers_to_transform": [1, 2],
    "layers_pattern": "layers",
    "rank_pattern": {},
    "alpha_pattern": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "trainable_token_indices": None,
    "loftq_config": {},
    "eva_config": None,
    "corda_config": None,
    "lora_ga_config": None,
    "use_dora": False,
    "velora_config": {"rank": 1},
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "qalora_group_size": 16,
    "monteclora_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "target_parameters": None,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "ensure_weight_tying": False,
}
PATH = "model.layers.1.self_attn.q_proj"


def config(folder: Path, **options: Any) -> LoraConfig:
    (folder / "adapter_config.json").write_text(json.dumps(DEFAULTS | options))
    return read_config(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 16 / 8),
        ({"use_rslora": True}, 16 / 8**0.5),
        ({"rank_pattern": {"q_proj": 4}}, 16 / 4),
        (
            {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 6}, "use_rslora": True},
            6 / 2,
        ),
        # The first that matches counts, whichever says more.
        ({"alpha_pattern": {"q_proj": 2, PATH: 3}}, 2 / 8),
        ({"alpha_pattern": {PATH: 3, "q_proj": 2}}, 3 / 8),
        ({"alpha_pattern": {"k_proj": 1, ".*": 5, "q_proj": 2}}, 5 / 8),
        # A whole name behind a dot, at the end of the path.
        ({"alpha_pattern": {"proj": 2}}, 16 / 8),
        ({"alpha_pattern": {"_proj": 2, "self_attn": 3, "q_proj.": 4, "xq_proj": 5}}, 16 / 8),
        ({"alpha_pattern": {"self_attn.q_proj": 2}}, 2 / 8),
        ({"alpha_pattern": {"elf_attn.q_proj": 2}}, 16 / 8),
        # Anchored at the front, the whole path.
        ({"alpha_pattern": {"^q_proj": 2}}, 16 / 8),
        ({"alpha_pattern": {f"^{PATH}": 2}}, 2 / 8),
        ({"alpha_pattern": {r"^model.layers.\d+.self_attn.(q|k)_proj": 2}}, 2 / 8),
        ({"alpha_pattern": {r"layers\.[02]\..*": 2, r"layers\.1\..*": 3}}, 3 / 8),
        ({"alpha_pattern": {"v_proj|q_proj": 2}}, 2 / 8),
        ({"alpha_pattern": {"": 2}}, 16 / 8),
        ({"alpha_pattern": None, "rank_pattern": None}, 16 / 8),
        ({"lora_alpha": 0.5}, 0.5 / 8),
    ],
)
def test_the_scale_of_a_layer(options: dict[str, Any], scale: float, tmp_path: Path) -> None:
    assert config(tmp_path, **options).scale_of(PATH) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"peft_type": "IA3"}, "of type IA3"),
        ({"peft_type": None}, "of type None"),
        ({"use_dora": True}, "with use_dora"),
        ({"bias": "all"}, "with bias"),
        ({"bias": "lora_only", "use_dora": True}, "with use_dora, bias"),
        ({"modules_to_save": ["lm_head"]}, "with modules_to_save"),
        ({"lora_bias": True}, "with lora_bias"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "with target_parameters"),
        ({"trainable_token_indices": [3]}, "with trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "with layer_replication"),
        ({"use_qalora": True}, "with use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "with use_bdlora"),
        ({"alora_invocation_tokens": [1, 2]}, "with alora_invocation_tokens"),
        ({"arrow_config": {"top_k": 3}}, "with arrow_config"),
        ({"kasa_config": {"beta": 1}}, "with kasa_config"),
        ({"monteclora_config": {"n": 1}}, "with monteclora_config"),
        ({"megatron_config": {"tp": 2}}, "with megatron_config"),
        ({"ensure_weight_tying": True}, "with ensure_weight_tying"),
        ({"use_something_of_tomorrow": True}, "with use_something_of_tomorrow"),
        *(
            ({"init_lora_weights": name}, f"with init_lora_weights='{name}'")
            for name in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq")
        ),
    ],
)
def test_more_than_plain_lora_is_refused_by_name(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"an adapter {named} cannot be .*export the merged checkpoint"
    ):
        config(tmp_path, **options)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_model_alone(init: Any, tmp_path: Path) -> None:
    assert config(tmp_path, init_lora_weights=init).rank == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r is 0; it must be an integer of at least 1"),
        ({"r": True}, "r is True"),
        ({"r": "8"}, "r is '8'"),
        ({"r": None}, "r is None"),
        ({"lora_alpha": "16"}, "lora_alpha is '16'; it must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha is inf"),
        ({"lora_alpha": [1]}, r"lora_alpha is \[1\]"),
        ({"use_rslora": "false"}, "use_rslora is 'false'; it must be true or false"),
        ({"rank_pattern": {"q_proj": 2.5}}, r"rank_pattern\['q_proj'\] is 2.5"),
        ({"rank_pattern": {"q_proj": -1}}, r"rank_pattern\['q_proj'\] is -1"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is .'q_proj'.; it must be an object"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern\['q_proj'\] is None"),
        (
            {"alpha_pattern": {"q_(proj": 2}},
            r"alpha_pattern holds 'q_\(proj', which is not a regular expression",
        ),
        ({"rank_pattern": {"*": 2}}, r"rank_pattern holds '\*', which is not a regular expression"),
        ({"rank_pattern": {"[z-a]": 2}}, r"rank_pattern holds .* taken \(bad character range"),
        # Each of these may take for ever: in Python's `re`, the first took 20 s for 26 characters.
        *(
            (
                {"rank_pattern": {pattern: 2}},
                r"rank_pattern holds .* \(it is not simple\); give fewer, of names",
            )
            for pattern in (
                "([a-z_.0-9]+)+X",
                "(a*)*",
                "(a|a)+X",
                "(?:a+){9}",
                r"(a)\1",
                "(?=a)",
                "((a|a))",
                "a" * 201,
            )
        ),
        *(
            (
                {"rank_pattern": patterns},
                r"rank_pattern holds .* \(there are too many ways to match it\)",
            )
            for patterns in (
                {".*.*.*X": 2},
                {"a?" * 13 + "X": 2},
                {"(a|a)" * 13 + "X": 2},
                {f"{n}.*.*": 2 for n in range(17)},
                {f"x{n}": 4 for n in range(200_000)},
            )
        ),
    ],
)
def test_invalid_values_of_a_configuration_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(QsampleError, match=rf"adapter_config.json: {message}"):
        config(tmp_path, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{'r': 8}", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"lora_alpha": NaN}', "is not valid JSON .NaN is not JSON"),
        (
            b'{"lora_alpha": 1' + b"0" * 400 + b"}",
            "is not valid JSON .10+.* is too large for a number",
        ),
        (b'{"r": "' + b"x" * (4 << 20) + b'"}', "is not valid JSON .it is larger than 4 MiB"),
        (b"[1, 2]", r"holds \[1, 2\], and must hold an object"),
        (b"null", "holds None, and must hold an object"),
    ],
)
def test_invalid_configurations_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    with pytest.raises(QsampleError, match=rf"adapter_config.json {message}"):
        read_config(tmp_path / "adapter_config.json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_changes_that_matrices_make(dtype: torch.dtype, tmp_path: Path) -> None:
    """In order of their paths; those of an embedding have other names, and a copy of the weight."""
    embedding = "base_model.model.model.embed_tokens"
    tensors = {
        **lora_pair(LAYER, 6, 5, rank=2),
        f"{embedding}.lora_embedding_A": torch.randn(3, 9),
        f"{embedding}.lora_embedding_B": torch.randn(5, 3),
        f"{embedding}.base_layer.weight": torch.randn(9, 5),
        "base_model.model.lm_head.base_layer.weight": torch.ones(2, 2),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    options = {"r": 2, "lora_alpha": 8, "rank_pattern": {"embed_tokens": 3}}
    files = save_adapter(tmp_path / "adapter", tensors, **options)
    head, first, second = read_changes(*files)
    assert [head.path, first.path, second.path] == ["lm_head", "model.embed_tokens", LAYER]
    assert (head.a, head.b, second.base) == (None, None, None)
    assert first.scale == pytest.approx(8 / 3)
    assert second.scale == 4
    for found, name in (
        (second.a, A),
        (second.b, B),
        (first.a, f"{embedding}.lora_embedding_A"),
        (first.b, f"{embedding}.lora_embedding_B"),
        (first.base, f"{embedding}.base_layer.weight"),
    ):
        assert found is not None
        assert floats(found).dtype == "float32"
        assert floats(found).tolist() == tensors[name].float().tolist()
    assert len(read_changes(*files, files[1].stat().st_size)) == 3
    with pytest.raises(QsampleError, match="cannot be read"):
        read_changes(*files, 100)


def test_ranks_and_values_by_default(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    plain = read_config(tmp_path / "adapter_config.json")
    assert (plain.rank, plain.alpha, plain.rank_stabilised) == (8, 8.0, False)
    assert (plain.largest_rank, plain.scale_of(PATH)) == (8, 1.0)
    assert config(tmp_path, rank_pattern={"a": 9, "b": 4}).largest_rank == 9
    assert config(tmp_path, rank_pattern={"a": 7}).largest_rank == 8
    # As many ways, and as long a pattern, as may be.
    for pattern in ("a" * 200, "a*a+a?a?", "(a|b)" * 12, "a?" * 12):
        assert config(tmp_path, rank_pattern={pattern: 2}).rank == 8
    with pytest.raises(QsampleError, match="too many ways"):
        config(tmp_path, rank_pattern={"a*a+a?a?a?": 2})
