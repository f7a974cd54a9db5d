"""Makes the decoder files of other exporters that the tests of `qsample bake` read: tests/fixtures/foreign/*.tar.xz.

Each part needs different tools, so it runs in its own environment:

    pip install onnxruntime-genai==0.18.* onnx onnx_ir torch transformers
    python scripts/foreign_fixtures.py genai
    python scripts/foreign_fixtures.py example      # examples/tiny_lm_genai, of the bundled model

    pip install optimum-onnx==0.1.0 'transformers<4.58' onnx torch
    python scripts/foreign_fixtures.py optimum

    pip install mobius-onnx==0.1.0 torch transformers
    python scripts/foreign_fixtures.py mobius

    pip install 'transformers==5.23.*' torch onnx onnxscript
    python scripts/foreign_fixtures.py transformers

    pip install onnxruntime onnx onnx_ir     # after the other parts: it converts their files
    python scripts/foreign_fixtures.py layouts

The models are random, with two layers and 128 tokens. `tokens.json` has the greedy tokens of onnxruntime-genai
itself in a genai folder, and those of transformers in folders of mobius and transformers. Names after the part select
single files.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "foreign"
VOCAB_SIZE = 128
PROMPTS = [[1, 17, 40, 23, 9], [1, 88, 5], [1, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
NEW_TOKENS = 24

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZES |= {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_SCALES = {
    "type": "longrope",
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 64,
    "rope_scaling": _SCALES,
}
WINDOW = {"sliding_window": 6}
GEMMA2 = {**WINDOW, "query_pre_attn_scalar": 16}
TWO_KINDS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA3 = {**TWO_KINDS, "query_pre_attn_scalar": 16}
GRANITE = {
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 2.0,
}
EXPERTS = {"num_experts_per_tok": 2}
GPT_OSS = {**TWO_KINDS, **EXPERTS, "num_local_experts": 4, "intermediate_size": 16}
GPT_OSS["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3_NEXT = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8}
QWEN3_NEXT |= {
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **EXPERTS,
}
QWEN3_NEXT |= {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

# name → model type, precision, execution provider, the builder's options, changes of the configuration
GENAI: dict[str, tuple[str, str, str, dict[str, str], dict[str, Any]]] = {
    "genai_cpu_fp32": ("llama", "fp32", "cpu", {}, {}),
    "genai_cpu_int4": ("llama", "int4", "cpu", {}, {}),
    "genai_cpu_int4_tied": (
        "qwen2",
        "int4",
        "cpu",
        {"shared_embeddings": "true"},
        {"tie_word_embeddings": True},
    ),
    "genai_cpu_int4_pruned": ("qwen3", "int4", "cpu", {"prune_lm_head": "true"}, {}),
    "genai_cpu_fp32_pruned": ("qwen3", "fp32", "cpu", {"prune_lm_head": "true"}, {}),
    "genai_cpu_mistral": ("mistral", "fp32", "cpu", {}, WINDOW),
    "genai_cpu_gemma2": ("gemma2", "fp32", "cpu", {}, GEMMA2),
    "genai_cpu_longrope": ("phi3", "fp32", "cpu", {}, LONGROPE),
    "genai_dml_fp16": ("llama", "fp16", "dml", {}, {}),
    "genai_dml_int4": ("qwen3", "int4", "dml", {}, {}),
    "genai_cuda_fp16": ("qwen3", "fp16", "cuda", {}, {}),
    "genai_webgpu_int4": ("qwen3", "int4", "webgpu", {}, {}),
}
# name → model type, opset, changes of the configuration
OPTIMUM: dict[str, tuple[str, int, dict[str, Any]]] = {
    "optimum_llama": ("llama", 14, {}),
    "optimum_llama_18": ("llama", 18, {}),
    "optimum_qwen2": ("qwen2", 14, {"num_key_value_heads": 1}),
    "optimum_qwen3": ("qwen3", 14, {}),
    "optimum_mistral": ("mistral", 15, WINDOW),
    "optimum_granite": ("granite", 14, GRANITE),
    "optimum_gpt2": ("gpt2", 14, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "optimum_gemma2": ("gemma2", 14, GEMMA2),
    "optimum_gemma2_eager": ("gemma2", 14, GEMMA2 | {"attn_logit_softcapping": 4.0}),
    "optimum_gemma3": ("gemma3_text", 14, TWO_KINDS),
    "optimum_phi3": ("phi3", 14, {"sliding_window": None}),
}
# name → model type, mobius's options, changes of the configuration
MOBIUS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "mobius_cpu_llama": ("llama", ["--ep", "cpu"], {}),
    "mobius_gemma3": ("gemma3_text", [], GEMMA3),
    "mobius_cpu_gemma3": (
        "gemma3_text",
        ["--ep", "cpu"],
        GEMMA3,
    ),  # without its window, which mobius forgets
    "mobius_static_qwen3": ("qwen3", ["--static-cache", "--max-seq-len", "48"], {}),
    "mobius_gpt_oss": ("gpt_oss", ["--ep", "onnx-standard"], GPT_OSS),
    "mobius_qwen3_next": ("qwen3_next", [], QWEN3_NEXT),
}
# name → model type, the provider of the fusions (None: without), changes of the configuration
TRANSFORMERS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "transformers_llama": ("llama", None, {}),
    "transformers_cpu_gemma3": ("gemma3_text", "cpu", GEMMA3),
    "transformers_cpu_gpt_oss": ("gpt_oss", "cpu", GPT_OSS),
    "transformers_cuda_qwen3": ("qwen3", "cuda", {}),
    "transformers_webgpu_phi3": ("phi3", "webgpu", {"sliding_window": None}),
}


def checkpoint(
    folder: Path, model_type: str, changes: dict[str, Any], steps: int | None = None
) -> Path:
    """A random `model_type` and a tokenizer of single characters. steps: a unit, to which weights are rounded: then
    they take little room; None = not at all."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes = {
        name: value for name, value in SIZES.items() if model_type != "phi3" or name != "head_dim"
    }
    if model_type == "phi3":
        # The builder takes any matrix with V outputs for the head.
        sizes |= {"hidden_size": 64, "intermediate_size": 48}
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
            if steps is not None:
                parameter.copy_((parameter * steps).round() / steps)
        if steps is not None:  # the embedding of padding, as it is in many checkpoints
            model.get_input_embeddings().weight[0] = 0
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    characters = [chr(code) for code in range(32, 127)]
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)
    return folder


def make_genai(name: str, folder: Path) -> None:
    """Write a folder with onnxruntime-genai's builder, with the tokens of its generator if it runs on the CPU."""
    model_type, precision, provider, options, changes = GENAI[name]
    with tempfile.TemporaryDirectory() as scratch:
        _build_genai(
            checkpoint(Path(scratch, "model"), model_type, changes),
            folder,
            precision,
            provider,
            options,
        )
    # Its generator uses a window as the size of the cache; the graph does not.
    if provider == "cpu" and model_type != "mistral":
        (folder / "tokens.json").write_text(json.dumps(_genai_tokens(folder)))


def _build_genai(
    source: Path, folder: Path, precision: str, provider: str, options: dict[str, str]
) -> None:
    import onnxruntime_genai

    sys.path.insert(0, str(Path(onnxruntime_genai.__file__).parent / "models"))
    from builder import create_model, parse_extra_options

    with tempfile.TemporaryDirectory() as cache:
        given = ("", str(source), str(folder), precision, provider, cache)
        prepared = parse_extra_options(*given, [f"{key}={value}" for key, value in options.items()])
        create_model(*given, **prepared)


def make_example() -> None:
    """Write the bundled model in 4 bits, for DirectML, which rotates outside the attention operator.

    A file for the CPU would need an attention kernel for heads of 40 numbers, which ONNX Runtime lacks.
    """
    source, folder = (
        FIXTURES.parents[2] / name for name in ("qsample/assets/tiny_lm", "examples/tiny_lm_genai")
    )
    _build_genai(source, folder, "int4", "dml", {"shared_embeddings": "true"})


def _genai_tokens(folder: Path) -> dict[str, Any]:
    import onnxruntime_genai as og

    model = og.Model(str(folder))
    answers = []
    for prompt in PROMPTS:
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(do_sample=False, max_length=len(prompt) + NEW_TOKENS)
        generator = og.Generator(model, parameters)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
        answers.append([int(token) for token in generator.get_sequence(0)][len(prompt) :])
        del generator
    gc.collect()
    return {"prompts": PROMPTS, "new_tokens": answers}


def make_optimum(name: str, folder: Path) -> None:
    """Write a folder with optimum-onnx: attention of plain operators, a cache that grows by Concat."""
    from optimum.exporters.onnx import main_export, onnx_export_from_model
    from transformers import AutoModelForCausalLM

    model_type, opset, changes = OPTIMUM[name]
    given: dict[str, Any] = {
        "task": "text-generation-with-past",
        "opset": opset,
        "do_validation": False,
    }
    with tempfile.TemporaryDirectory() as scratch:
        source = checkpoint(Path(scratch), model_type, changes)
        if name.endswith(
            "_eager"
        ):  # the attention of the model's own code, not scaled_dot_product_attention
            model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
            onnx_export_from_model(model, folder, **given)
        else:
            main_export(str(source), folder, **given)


def make_mobius(name: str, folder: Path) -> None:
    """Write a folder with mobius, and the greedy tokens of transformers for the same weights."""
    model_type, options, changes = MOBIUS[name]
    with tempfile.TemporaryDirectory() as scratch:
        source = checkpoint(Path(scratch), model_type, changes, steps=16)
        command = [
            sys.executable,
            "-m",
            "mobius",
            "build",
            "--config",
            str(source),
            str(folder),
            "--dtype",
            "f32",
        ]
        subprocess.run([*command, *options], check=True, capture_output=True)
        (folder / "tokens.json").write_text(json.dumps(_transformers_tokens(source)))


def make_transformers(name: str, folder: Path) -> None:
    """Write a folder with transformers' exporter, and the greedy tokens of transformers for the same weights."""
    model_type, provider, changes = TRANSFORMERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        source = checkpoint(Path(scratch), model_type, changes, steps=16)
        export_with_transformers(str(source), str(folder), provider)
        (folder / "tokens.json").write_text(json.dumps(_transformers_tokens(source)))


def export_with_transformers(source: str, folder: str, provider: str | None) -> None:
    """Export `source` for a provider, in float16 for CUDA, or without fusions. Then the batch has no padding, too, and
    the exporter writes no input for a mask. A graph for the first call, which takes no cache, becomes an empty file."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    dtype = torch.float16 if provider == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    mask = [[1, 1, 1, 1, 1], [int(provider is None)] * 2 + [1, 1, 1]]
    inputs = {
        "input_ids": torch.tensor([[1, 17, 40, 23, 9], [1, 1, 88, 5, 7]]),
        "attention_mask": torch.tensor(mask),
    }
    config = OnnxConfig(dynamic=True, ort_fusions=provider)
    exported = OnnxExporter().export_for_generation(model, inputs, config, multi_token_decode=True)
    exported.save_pretrained(folder)
    Path(folder, "prefill.onnx").write_bytes(b"")
    Path(folder, "prefill.onnx.data").unlink(missing_ok=True)


def _transformers_tokens(source: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    answers = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + NEW_TOKENS:
            with torch.no_grad():
                tokens.append(
                    int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
                )
        answers.append(tokens[len(prompt) :])
    return {"prompts": PROMPTS, "new_tokens": answers}


def make_layouts(name: str, folder: Path) -> None:
    """Write a folder like onnx-community's for transformers.js: configurations, and `onnx/` with a file per precision.

    The conversion uses the same tools as onnx-community's scripts.
    """
    import numpy as np
    import onnx
    import onnx_ir as ir
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with tempfile.TemporaryDirectory() as scratch:
        _unpack(LAYOUTS[name], Path(scratch))
        source = Path(scratch) / "model.onnx"
        shutil.copytree(
            scratch,
            folder,
            ignore=shutil.ignore_patterns("*.onnx*", "genai_config.json", "tokens.json"),
        )
        target = folder / "onnx"
        target.mkdir()
        model = ir.load(source)
        _keep_num_logits(model)
        for value in model.graph.initializers.values():
            value.const_value = ir.tensor(np.array(value.const_value.numpy()), name=value.name)
        plain = ir.to_proto(model)

    def fresh() -> onnx.ModelProto:
        return onnx.ModelProto.FromString(plain.SerializeToString())

    def in_float16(proto: onnx.ModelProto, keep_io_types: bool = False) -> onnx.ModelProto:
        for node in proto.graph.node:  # the model's casts to float32 stay in half precision
            for attribute in node.attribute:
                if (
                    node.op_type == "Cast"
                    and attribute.name == "to"
                    and attribute.i == onnx.TensorProto.FLOAT
                ):
                    attribute.i = onnx.TensorProto.FLOAT16
        return convert_float_to_float16(
            proto, keep_io_types=keep_io_types, disable_shape_infer=True
        )

    def four_bits(proto: onnx.ModelProto) -> onnx.ModelProto:
        quantizer = MatMulNBitsQuantizer(
            proto, block_size=32, is_symmetric=True, accuracy_level=None
        )
        quantizer.process()
        return quantizer.model.model

    _save_in_parts(fresh(), target / "model.onnx")
    onnx.save(in_float16(fresh()), target / "model_fp16.onnx")
    onnx.save(four_bits(fresh()), target / "model_q4.onnx")
    onnx.save(in_float16(four_bits(fresh())), target / "model_q4f16.onnx")
    onnx.save(in_float16(fresh(), keep_io_types=True), target / "model_fp16_io32.onnx")
    bnb4 = MatMulBnb4Quantizer(fresh(), quant_type=1, block_size=64)
    bnb4.process()
    onnx.save(bnb4.model.model, target / "model_bnb4.onnx")
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(fresh(), target / "model_quantized.onnx")


LAYOUTS = {"community_gqa": "genai_cpu_fp32", "community_concat": "optimum_qwen3"}


def _keep_num_logits(model: Any) -> None:
    """Add the input num_logits_to_keep of transformers' models: hidden[:, -n:, :] before the head."""
    import numpy as np
    import onnx_ir as ir

    graph = model.graph
    head = next(v for v in graph.outputs if v.name == "logits").producer()
    number = ir.Value(
        name="num_logits_to_keep", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64)
    )
    graph.inputs.append(number)

    def constant(name: str, numbers: list[int]) -> ir.Value:
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        value = ir.Value(
            name=name, shape=tensor.shape, type=ir.TensorType(ir.DataType.INT64), const_value=tensor
        )
        graph.register_initializer(value)
        return value

    neg = ir.node("Neg", [number])
    start = ir.node("Unsqueeze", [neg.outputs[0], constant("keep.axis", [0])])
    end, axis = constant("keep.end", [2**63 - 1]), constant("keep.sequence", [1])
    cut = ir.node("Slice", [head.inputs[0], start.outputs[0], end, axis])
    cut.outputs[0].type = head.inputs[0].type
    graph.insert_before(head, [neg, start, cut])
    head.replace_input_with(0, cut.outputs[0])


def _save_in_parts(model: Any, path: Path) -> None:
    """Save with external data in two files, `NAME_data` and `NAME_data_1`, as for models over two gigabytes."""
    from onnx.external_data_helper import set_external_data, write_external_data_tensors

    weights = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) > 1024]
    for index, tensor in enumerate(weights):
        set_external_data(tensor, f"{path.name}_data{'_1' if index >= len(weights) // 2 else ''}")
    write_external_data_tensors(model, str(path.parent))
    path.write_bytes(model.SerializeToString())


def _unpack(name: str, folder: Path) -> None:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


PARTS: dict[str, tuple[Callable[[str, Path], None], list[str]]] = {
    "genai": (make_genai, list(GENAI)),
    "optimum": (make_optimum, list(OPTIMUM)),
    "mobius": (make_mobius, list(MOBIUS)),
    "transformers": (make_transformers, list(TRANSFORMERS)),
    "layouts": (make_layouts, list(LAYOUTS)),
}


def main() -> None:
    if sys.argv[1] == "example":
        make_example()
        return
    make, names = PARTS[sys.argv[1]]
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or names:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, name)
            try:
                make(name, folder)
            except Exception as error:  # the other files can still be made
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            archive = FIXTURES / f"{name}.tar.xz"
            with tarfile.open(archive, "w:xz") as packed:
                for path in sorted(folder.rglob("*")):
                    packed.add(path, path.relative_to(folder))
            print(f"{name}: {archive.stat().st_size} bytes")


if __name__ == "__main__":
    main()
