"""QEfficient's arguments: its programs run with another import line, and what has no meaning here is refused."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qsample import AutoModelForCausalLM
from qsample.addons.migrate import qefficient
from qsample.addons.migrate.qefficient import (
    AI100_COMPILE,
    IGNORED_COMPILE,
    NEAREST_COMPILE,
    QEFFICIENT,
    REFUSED_COMPILE,
    REFUSED_QAIC_CONFIG,
    REFUSED_SAMPLING_PARAMS,
    read_config,
)
from qsample.contract.interface import Features
from qsample.models.dialects import GenerateArguments
from qsample.request.refusals import GENERATE
from qsample.request.sampling_params import SamplingParams

PAGE = (Path(__file__).parents[3] / "docs" / "qefficient.md").read_text("utf-8")
# Of its commit ebf55e8: the arguments of `compile` and `generate`.
ITS_COMPILE = [
    "onnx_path", "compile_dir", "prefill_seq_len", "ctx_len", "comp_ctx_lengths_prefill", "comp_ctx_lengths_decode",
    "batch_size", "full_batch_size", "kv_cache_batch_size", "num_devices", "num_cores", "mxfp6_matmul",
    "mxint8_kv_cache", "num_speculative_tokens", "prefill_only", "use_onnx_subfunctions", "offload_pt_weights",
    "enable_chunking", "moe_prefill_packed_chunk_size", "retain_full_kv", "layerwise", "layerwise_window_size",
    "kv_cache_prefix", "mos", "aic_enable_depth_first", "allow_mxint8_mdp_io",
]  # fmt: skip
ITS_GENERATE = [
    "tokenizer", "prompts", "device_id", "runtime_ai100", "prompts_txt_file_path", "generation_len", "stream",
    "write_io", "automation", "iteration", "prompt_to_lora_id_mapping", "include_sampler", "return_pdfs",
    "include_guided_decoding", "sampling_params",
]  # fmt: skip
ITS_DEFAULTS = {
    "prefill_seq_len": 32, "ctx_len": 128, "batch_size": 1, "full_batch_size": None, "num_devices": 1,
    "mxfp6_matmul": False, "mxint8_kv_cache": False, "num_speculative_tokens": None, "prefill_only": None,
    "use_onnx_subfunctions": False, "offload_pt_weights": True, "enable_chunking": False, "retain_full_kv": None,
    "moe_prefill_packed_chunk_size": 256, "layerwise": False, "layerwise_window_size": 1, "kv_cache_prefix": None,
}  # fmt: skip


def read_compile(keywords: dict[str, Any]) -> Any:
    return QEFFICIENT.read_compile(keywords)


def read_generate(inputs: Any, params: Any, keywords: dict[str, Any], features: Features) -> Any:
    read = QEFFICIENT.read_generate(GenerateArguments(inputs, params, keywords), features)
    return read.inputs, read.params, read.keywords


def its_program(
    name: str, tokenizer: Any, *, greedy: bool, on_ai100: bool = False
) -> tuple[Any, Any]:
    """What its example of sampling on the device calls, with every argument that this example gives.

    on_ai100: whether the arguments are there that only Cloud AI 100 takes, as the example's usage has them.
    """
    rows = 2
    rng = np.random.default_rng(26)
    numbers = np.tile(rng.uniform(0, 1, 512), (rows, 1)).astype(np.float32)
    its_compile = {"num_cores": 16, "mos": 1, "aic_enable_depth_first": True} if on_ai100 else {}
    its_sampling = {"random_numbers": numbers} if on_ai100 else {}

    def column(value: float, dtype: type) -> Any:
        return np.full((rows, 1), value, dtype)

    model = AutoModelForCausalLM.from_pretrained(
        pretrained_model_name_or_path=name,
        continuous_batching=True,
        qaic_config={
            "include_sampler": True,
            "return_pdfs": False,
            "max_top_k_ids": 512,
            "include_guided_decoding": True,
        },
    )
    qpc = model.compile(
        prefill_seq_len=128,
        ctx_len=64,
        batch_size=1,
        full_batch_size=rows,
        num_devices=0,  # it passes the length of an empty group of devices
        mxfp6_matmul=on_ai100,
        mxint8_kv_cache=on_ai100,
        num_speculative_tokens=0,
        **its_compile,
    )
    mask = np.arange(model.model.config.vocab_size) % 3 > 0
    output = model.generate(
        tokenizer=tokenizer,
        prompts=["Hi", "Hello there"],
        prompts_txt_file_path=None,
        device_id=[0, 1, 2, 3] if on_ai100 else None,
        generation_len=20,
        include_sampler=True,
        return_pdfs=False,
        include_guided_decoding=True,
        sampling_params={
            "repetition_penalties": column(1.9, np.float32),
            "presence_penalties": column(0.0 if greedy else 0.8, np.float32),
            "temperatures": column(0.0 if greedy else 0.67, np.float32),
            "top_ks": column(54, np.int32),
            "top_ps": column(0.89, np.float32),
            "min_ps": column(0.1, np.float32),
            "token_bitmasks": np.tile(mask, (rows, 1)),
            **its_sampling,
        },
        **({} if greedy or on_ai100 else {"seed": 26}),
    )
    return qpc, output


@pytest.mark.ci
def test_its_example_runs_with_another_import_line(checkpoint: Callable[[str], Path]) -> None:
    import torch
    from transformers import AutoModelForCausalLM as Transformers
    from transformers import AutoTokenizer, LogitsProcessorList

    name = str(checkpoint("llama"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    package, greedy = its_program(name, tokenizer, greedy=True)
    compiled = package.package.manifest.compilation
    assert (compiled.batch_size, compiled.ctx_len) == (2, 64)

    def masked(ids: Any, scores: Any) -> Any:
        return torch.where(torch.arange(scores.shape[1]) % 3 > 0, scores, -torch.inf)

    model = Transformers.from_pretrained(name).eval()
    for prompt, got in zip(("Hi", "Hello there"), greedy.token_ids, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")
        processors = LogitsProcessorList([masked])
        wanted = model.generate(
            **ids,
            max_new_tokens=20,
            do_sample=False,
            repetition_penalty=1.9,
            logits_processor=processors,
        )
        assert got == wanted[0, ids["input_ids"].shape[1] :].tolist()[: len(got)]
        assert len(got) == 20 or tokenizer.eos_token_id == got[-1]

    package, sampled = its_program(name, tokenizer, greedy=False)
    row = SamplingParams(
        repetition_penalty=1.9, presence_penalty=0.8, temperature=0.67, top_k=54, top_p=0.89, min_p=0.1,
        max_new_tokens=20, seed=26,
    )  # fmt: skip
    words = np.zeros(package.package.interface.vocab_size + 31 >> 5, np.uint32)
    for token in range(package.package.interface.vocab_size):
        words[token // 32] |= np.uint32((token % 3 > 0) << token % 32)
    wanted = package.generate(["Hi", "Hello there"], row, allowed_tokens=words.view(np.int32))
    assert sampled.token_ids == wanted.token_ids
    assert sampled.token_ids != greedy.token_ids


@pytest.mark.ci
def test_its_example_with_the_options_of_cloud_ai_100(checkpoint: Callable[[str], Path]) -> None:
    """The nearest formats take their place, a warning of a line says so, and the random numbers decide the tokens."""
    from transformers import AutoTokenizer

    name = str(checkpoint("llama"))
    tokenizer = AutoTokenizer.from_pretrained(name)
    with pytest.warns(UserWarning, match="QEfficient's arguments") as said:
        package, output = its_program(name, tokenizer, greedy=False, on_ai100=True)
    of_it = [warning for warning in said if "QEfficient" in str(warning.message)]
    assert [str(warning.message) for warning in of_it] == [
        'QEfficient\'s arguments: mxfp6_matmul is weights="int8" here; mxint8_kv_cache is '
        'kv_cache_dtype="int8" here; no effect here: num_cores, mos, aic_enable_depth_first',
        "QEfficient's arguments: no effect here: device_id; the random_numbers of a row choose its seed",
    ]
    assert {warning.filename for warning in of_it} == {__file__}
    options = package.package.manifest.compilation.options
    assert (options["weights"], options["kv_cache_dtype"]) == ("int8", "int8")
    with pytest.warns(UserWarning, match="QEfficient's arguments"):
        assert (
            its_program(name, tokenizer, greedy=False, on_ai100=True)[1].token_ids
            == output.token_ids
        )
    assert output.seeds[0] == output.seeds[1]  # the example repeats a row of random numbers


@pytest.mark.ci
def test_its_first_program(checkpoint: Callable[[str], Path]) -> None:
    """`compile` changes the model in place, and prompts are continued greedily; positional arguments, too."""
    from transformers import AutoTokenizer

    name = str(checkpoint("llama"))
    model: Any = AutoModelForCausalLM.from_pretrained(name)
    compiled = model.compile(ctx_len=32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    wanted = compiled.generate(["My name is"], do_sample=False, max_new_tokens=256).token_ids
    assert len(wanted[0]) < 32  # the context of this very package
    assert model.generate(prompts=["My name is"], tokenizer=tokenizer).token_ids == wanted
    assert model.generate(tokenizer, ["My name is"], generation_len=None).token_ids == wanted
    assert model.runtime.package.path == compiled.package.path


def test_every_argument_of_its_compile_is_known() -> None:
    from qsample.compiler.options import CompileOptions

    assert not {*ITS_COMPILE} - {
        "full_batch_size",
        *REFUSED_COMPILE,
        *IGNORED_COMPILE,
        *NEAREST_COMPILE,
        *AI100_COMPILE,
        "aic_enable_depth_first",
        *inspect.signature(CompileOptions).parameters,
    }
    read = read_compile(ITS_DEFAULTS)
    assert read == {"ctx_len": 128, "batch_size": 1, "num_devices": 1}
    CompileOptions().override(**read)
    assert read_compile({"batch_size": 1, "full_batch_size": 16, "num_devices": 4}) == {
        "batch_size": 16,
        "num_devices": 4,
    }
    assert read_compile({"num_devices": 0}) == {}
    assert read_compile({"num_speculative_tokens": 3, "weights": "int4"}) == {
        "num_speculative_tokens": 3,
        "weights": "int4",
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mxint8_kv_cache": "yes"}, "mxint8_kv_cache is 'yes'; give True or False"),
        (
            {"prefill_only": True, "compile_dir": "x"},
            "prefill_only is True, .*leave it out; compile_dir is 'x', which is not supported: give path",
        ),
        ({"convert_to_fp16": True}, 'give from_pretrained dtype="float16"'),
    ],
)
def test_arguments_without_a_meaning_here_are_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained("some/model").compile(tmp_path / "package", **given)


@pytest.mark.parametrize(
    ("given", "read", "said"),
    [
        ({"mxfp6_matmul": True}, {"weights": "int8"}, 'mxfp6_matmul is weights="int8" here'),
        (
            {"mxint8_kv_cache": True},
            {"kv_cache_dtype": "int8"},
            "mxint8_kv_cache is kv_cache_dtype",
        ),
        ({"mxfp6_matmul": True, "weights": "int4"}, {"weights": "int4"}, None),
        ({"num_cores": None, "aic_hw_version": None, "aic_num_cores": False}, {}, None),
        ({"num_cores": 16}, {}, "no effect here: num_cores"),
        (
            {"aic_pmu_recipe": "KernelUtil", "enable_qnn": True},
            {},
            "no effect here: aic_pmu_recipe, enable_qnn",
        ),
    ],
)
def test_the_nearest_of_what_is_missing(
    given: dict[str, Any], read: dict[str, Any], said: str | None
) -> None:
    if said is None:
        assert read_compile(given) == read
        return
    with pytest.warns(UserWarning, match=said):
        assert read_compile(given) == read


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("My name is\n  The sun \n", encoding="utf-8")
    given = {"prompts_txt_file_path": str(path), "device_id": [0]}
    inputs, _, rest = read_generate(None, None, given, Features())
    assert (inputs, rest) == (["My name is", "The sun"], {"do_sample": False})
    with pytest.warns(UserWarning, match="prompts_txt_file_path takes the place of prompts"):
        assert read_generate(None, None, {**given, "prompts": ["a"]}, Features())[0] == inputs


def test_random_numbers_choose_seeds() -> None:
    numbers = np.random.default_rng(0).random((3, 8), np.float32)

    def seeds(**given: Any) -> list[int]:
        with pytest.warns(UserWarning, match="random_numbers of a row choose its seed"):
            params = read_generate("a", None, {"sampling_params": given}, Features())[1]
        return [row.seed for row in (params if isinstance(params, list) else [params])]

    found = seeds(random_numbers=numbers)
    assert len({*found}) == 3
    assert seeds(random_numbers=numbers[::-1].astype(np.float64)) == found[::-1]
    assert seeds(random_numbers=numbers[:1], temperatures=np.ones((2, 1))) == found[:1] * 2
    own = {"sampling_params": {"random_numbers": numbers}, "seed": 4}
    assert read_generate("a", None, own, Features())[2] == {"seed": 4}


def test_the_config_names_features() -> None:
    config = {
        "include_sampler": True,
        "return_pdfs": True,
        "max_top_k_ids": 512,
        "include_guided_decoding": True,
    }
    opened = AutoModelForCausalLM.from_pretrained(
        "some/model", qaic_config=config, continuous_batching=True
    )
    assert opened.features == Features(probs=True, allowed_tokens=True)
    assert read_config({"include_sampler": False, "return_pdfs": None}) == {
        "include_sampler": False
    }
    for wrong, message in (
        (
            {"include_samplers": True},
            "qaic_config has no key 'include_samplers'; did you mean 'include_sampler'",
        ),
        ({"max_top_k_ids": 0}, "max_top_k_ids is 0"),
        (
            {"speculative_model_type": "target"},
            r"speculative_model_type is 'target'.*num_speculative_tokens",
        ),
        ({"include_sampler": "true"}, "sampler is 'true'; give True or False"),
        ("sampler", "qaic_config is 'sampler'; give a mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained("some/model", qaic_config=wrong)


def test_rows_of_sampling_params() -> None:
    arrays = {
        "temperatures": np.array([[0.0], [0.5], [1.0]], np.float32),
        "top_ks": np.array([[-1], [0], [7]], np.int32),
        "frequency_penalties": [[0.25]],
        "min_ps": None,
    }
    inputs, params, rest = read_generate(
        None,
        None,
        {"prompts": ["a", "b", "c"], "sampling_params": arrays, "generation_len": 9},
        Features(),
    )
    assert (inputs, rest) == (["a", "b", "c"], {})
    rows = [
        (row.temperature, row.top_k, row.frequency_penalty, row.max_new_tokens) for row in params
    ]
    assert rows == [(0.0, 0, 0.25, 9), (0.5, 0, 0.25, 9), (1.0, 7, 0.25, 9)]
    one = SamplingParams(temperature=0.3)
    assert read_generate("a", None, {"sampling_params": one}, Features()) == ("a", one, {})
    assert read_generate(None, None, {"prompts": ["a"]}, Features())[2] == {"do_sample": False}
    assert read_generate(None, None, {"prompts": ["a"], "top_k": 5}, Features())[2] == {"top_k": 5}
    tokenizer = SimpleNamespace(batch_decode=print)
    named = read_generate(tokenizer, ["a"], {"generation_len": 4}, Features())
    assert named == (["a"], None, {"tokenizer": tokenizer, "max_new_tokens": 4, "do_sample": False})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"sampling_params": {"random_numbers": np.zeros(512)}},
            r"random_numbers of sampling_params is float64 \(512,\); give floats of shape \[512, n\]",
        ),
        (
            {"sampling_params": {"temperature": 1}},
            "no key 'temperature'; did you mean 'temperatures'",
        ),
        (
            {"sampling_params": {"temperatures": np.ones((2, 1)), "top_ks": [1, 2, 3]}},
            r"temperatures of sampl.*\[3, 1\]",
        ),
        (
            {"sampling_params": {"temperatures": np.ones((2, 2))}},
            r"temperatures of sampling_params is \[\[1.0, 1.0\], ",
        ),
        ({"sampling_params": {"top_ps": ["half"]}}, "top_ps of sampling_params"),
        ({"sampling_params": {"top_ps": [np.nan]}}, "top_p is nan; give a number > 0"),
        ({"prompts": ["b"]}, "inputs and prompts were given"),
        (
            {"return_pdfs": True},
            "return_pdfs is True, and the package has it False; give it to from_pretrained",
        ),
    ],
)
def test_arguments_of_generate_that_are_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_generate("a", None, given, Features())
    with pytest.raises(ValueError, match="params and sampling_params"):
        read_generate("a", SamplingParams(), {"sampling_params": {}}, Features())


def test_the_page_has_every_name() -> None:
    for name in (
        *ITS_COMPILE,
        *ITS_GENERATE,
        *REFUSED_QAIC_CONFIG,
        *REFUSED_SAMPLING_PARAMS,
        *REFUSED_COMPILE,
        *IGNORED_COMPILE,
        *NEAREST_COMPILE,
        *AI100_COMPILE,
    ):
        assert re.search(rf"`[^`]*\b{name}\b", PAGE), name
    for name in ITS_GENERATE:
        assert (
            name in GENERATE
            or re.search(rf'"{name}"', inspect.getsource(qefficient))
            or name == "tokenizer"
        ), name
