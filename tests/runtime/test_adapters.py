"""Reading LoRA adapters: what a package takes, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qsample.contract.interface import AdapterTarget, Features, Interface, KeyValueShape
from qsample.errors import QsampleError
from qsample.runtime.adapters import Adapter, read_adapter
from tests.helpers.adapters import random_adapter

ATTENTION, MLP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def make_interface(**changes: Any) -> Interface:
    targets = AdapterTarget(ATTENTION, 6, 10), AdapterTarget(MLP, 5, 6)
    features = Features(max_loras=2, max_lora_rank=4)
    return Interface(
        16, (KeyValueShape(1, 8),), features=features, **{"adapters": targets, **changes}
    )


def make_adapter(folder: Path, **config: Any) -> Path:
    return random_adapter(folder, make_interface(), seed=1, rank=4, **config)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of an adapter; None removes one. Their names without the beginning, and _ for a dot."""
    path = folder / "adapter_model.safetensors"
    found = load_file(path)
    for name, tensor in tensors.items():
        (old,) = [one for one in found if one.replace(".", "_").endswith(name)] or [
            f"base_model.model.{name}"
        ]
        found.pop(old, None)
        if tensor is not None:
            found[old] = tensor
    save_file(found, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_package", ["float32", "float16", "bfloat16"])
def test_the_numbers(tmp_path: Path, dtype: torch.dtype, of_package: str) -> None:
    folder = make_adapter(tmp_path / "a", use_rslora=True)
    path = folder / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    adapter = read_adapter("a", folder, make_interface(dtype=of_package))
    assert adapter.ranks == {"q_proj": 4, "down_proj": 4}
    for name in (ATTENTION, MLP):
        stored = {
            kind: load_file(path)[f"base_model.model.{name}.lora_{kind}.weight"].float()
            for kind in "AB"
        }
        kept = getattr(torch, of_package)
        wanted = stored["A"].to(kept), (stored["B"].T * (4 / math.sqrt(4))).to(kept)
        for matrix, tensor in zip(adapter.matrices[name], wanted, strict=True):
            bits = torch.int32 if of_package == "float32" else torch.int16
            assert np.array_equal(
                matrix.view(f"int{8 * matrix.itemsize}"), tensor.contiguous().view(bits).numpy()
            )


def test_equal_numbers_have_the_same_hash(tmp_path: Path) -> None:
    one, same = (
        read_adapter(name, make_adapter(tmp_path / name), make_interface()) for name in "ab"
    )
    assert one.sha256 == same.sha256
    assert (
        one.sha256
        != read_adapter("c", make_adapter(tmp_path / "c", use_rslora=True), make_interface()).sha256
    )


def test_equal_matrices_of_another_layer_are_another_adapter(tmp_path: Path) -> None:
    targets = [AdapterTarget(f"model.layers.{layer}.self_attn.q_proj", 6, 10) for layer in (0, 1)]
    both = make_interface(adapters=tuple(targets))
    folders = [
        random_adapter(tmp_path / one.path, make_interface(adapters=(one,)), seed=1)
        for one in targets
    ]
    one, other = (read_adapter("a", folder, both) for folder in folders)
    (pair,), (other_pair,) = one.matrices.values(), other.matrices.values()
    assert all(map(np.array_equal, pair, other_pair))
    assert one.sha256 != other.sha256


def test_the_largest_rank_of_each_kind() -> None:
    ranks = {"0.q_proj": 2, "1.q_proj": 4, "2.q_proj": 1, "0.down_proj": 3}
    matrices = {path: (np.zeros((rank, 6)), np.zeros((rank, 10))) for path, rank in ranks.items()}
    assert Adapter("a", Path("a"), "", matrices).ranks == {"q_proj": 4, "down_proj": 3}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"use_dora": True}, "an adapter with use_dora cannot"),
        ({}, {"lora_alpha": 1e42}, "down_proj, with its scale, has numbers that are not finite"),
        (
            {"q_proj_lora_A_weight": torch.ones(5, 6), "q_proj_lora_B_weight": torch.ones(10, 5)},
            {"rank_pattern": {"q_proj": 5}},
            "rank in .*q_proj is 5.*max_lora_rank=4; export .*max_lora_rank=5",
        ),
        (
            {"q_proj_lora_A_weight": None},
            {},
            f"matrix B of {re.escape(ATTENTION)} without its partner",
        ),
        (
            {"q_proj_lora_A_weight": torch.ones(4, 7)},
            {},
            r"\[4, 7\] and \[10, 4\], and must be \[4, 6\]",
        ),
        (
            {"lm_head.lora_A.weight": torch.ones(4, 6), "lm_head.lora_B.weight": torch.ones(10, 4)},
            {},
            "changes lm_head, and this package .* q_proj, down_proj",
        ),
        (
            {
                "embed.lora_embedding_A": torch.ones(4, 6),
                "embed.lora_embedding_B": torch.ones(6, 4),
            },
            {},
            "changes embed, and this package takes adapters of q_proj",
        ),
        (
            {f"{ATTENTION}.base_layer.weight": torch.ones(10, 6)},
            {},
            "changes .*q_proj, and this package",
        ),
    ],
)
def test_a_package_refuses_adapters_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    folder = make_adapter(tmp_path / "a")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    change(folder, **tensors)
    with pytest.raises(QsampleError, match=message):
        read_adapter("a", folder, make_interface())


def test_files_that_are_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    save_file({}, folder / "adapter_model.safetensors")
    with pytest.raises(QsampleError, match="holds no LoRA matrices"):
        read_adapter("a", folder, make_interface())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(QsampleError, match=r"it has no adapter_model\.safetensors; give a folder"):
        read_adapter("a", folder, make_interface())
    with pytest.raises(
        QsampleError, match=r"no LoRA adapter in .*nowhere: it has no adapter_config\.json"
    ):
        read_adapter("a", tmp_path / "nowhere", make_interface())
    with pytest.raises(QsampleError, match="it has no adapter_config"):
        read_adapter("a", "x" * 5000, make_interface())
    for path in (None, 1, [], b"x"):
        with pytest.raises(
            ValueError, match=r"the path of adapter 'a' is .*; give the path of its folder"
        ):
            read_adapter("a", path, make_interface())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the adapter's name is ''; give a text"):
        read_adapter("", folder, make_interface())
    with pytest.raises(ValueError, match="takes no LoRA adapters; export it with max_loras"):
        read_adapter("a", folder, make_interface(adapters=()))


def test_an_adapter_beyond_the_range_of_float16_is_refused(tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "a")
    change(folder, q_proj_lora_B_weight=torch.full((10, 4), 1e5))
    with pytest.raises(
        QsampleError, match="q_proj, with its scale, has numbers that are not within float16"
    ):
        read_adapter("a", folder, make_interface(dtype="float16"))
