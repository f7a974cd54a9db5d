"""Generate text from a qsample package with ONNX Runtime, NumPy and a tokenizer: the sampler is in the graph.

    python examples/generate_onnxruntime.py exported --prompt "In the beginning" --temperature 0.8

It does not import qsample; docs/contract.md defines the graph's inputs, outputs and states. The package must have the
sampler in its graph.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

PROVIDERS = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
}
RUNNING, STOPPED, INVALID = 0, 1, 3  # values of the state `status`
NOT_CAPTURED = -1  # a CUDA session captures and replays only the decode steps


def retained_name(state: str) -> str:
    """The output that holds the next value of a state."""
    if state.startswith("past_key_values."):
        return state.replace("past_key_values.", "present.")
    return f"{state}_RetainedState"


def read_grammar(path: Path) -> dict[str, np.ndarray]:
    """The tables that `qsample grammar` wrote, by the names of the inputs. The file has the format safetensors: the
    length of a header of JSON, the header, and the numbers."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    tables = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            numbers = np.frombuffer(content[start + begin : start + end], dtype="<i4")
            tables[name] = numbers.reshape(about["shape"])
    return tables


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "package", type=Path, help="a folder written by `qsample export` or `qsample compile`"
    )
    parser.add_argument("--provider", choices=PROVIDERS, default="cpu")
    parser.add_argument("--prompt", default="In the beginning")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="0 is off")
    parser.add_argument("--top-p", type=float, default=0.95, help="1 is off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--prompt-lookup-num-tokens",
        type=int,
        default=0,
        help="guesses a step, for packages compiled with --num-speculative-tokens; the text stays the same",
    )
    parser.add_argument(
        "--grammar",
        type=Path,
        help="a file that `qsample grammar` wrote for this package: the answer follows it",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    manifest = json.loads((args.package / "qsample.json").read_text())
    if not manifest["interface"]["features"]["sampler"]:
        raise SystemExit(
            "the package was exported without its sampler; this script needs a package with the sampler"
        )
    tokenizer = Tokenizer.from_file(str(args.package / "tokenizer.json"))
    prompt = np.array(
        [tokenizer.encode(args.prompt).ids or [manifest["token_ids"]["bos"]]], dtype=np.int64
    )
    length = prompt.shape[1]
    # T, the capacity of the state in tokens: fixed in a compiled package, otherwise chosen here.
    compilation, limit = manifest["compilation"], manifest["max_position_embeddings"]
    capacity = (
        compilation["ctx_len"] if compilation else min(limit or 2**31, length + args.max_new_tokens)
    )
    if length >= capacity:
        raise SystemExit(f"the prompt has {length} tokens and the context holds {capacity}")

    vocab_size = manifest["interface"]["vocab_size"]
    max_length = min(capacity, length + args.max_new_tokens)
    # Tables for no grammar: a single state, which allows every token and stays.
    grammar = {
        "grammar_classes": np.zeros((1, vocab_size), np.int32),
        "grammar_transitions": np.zeros((1, 1), np.int32),
        "grammar_drafts": np.int32([-1]),
    }
    if args.grammar is not None:
        if not manifest["interface"]["features"].get("grammars"):
            raise SystemExit("the package takes no grammars; export the model with --grammars")
        grammar = read_grammar(args.grammar)
        tokens_of_grammar = grammar["grammar_classes"].shape[1]
        if tokens_of_grammar != vocab_size:
            raise SystemExit(
                f"the grammar is for {tokens_of_grammar} tokens and the model has {vocab_size}; "
                "write it with `qsample grammar` for this package"
            )
        shortest, room = grammar["grammar_distances"][1], max_length - length
        if room < shortest:
            raise SystemExit(
                f"the shortest answer of the grammar has {shortest} tokens, and {room} are left; "
                f"give --max-new-tokens {shortest} or more, and a shorter prompt if the context is full"
            )

    if args.provider == "cuda":
        ort.preload_dlls()  # the CUDA libraries of pip packages
    providers = PROVIDERS[args.provider]
    provider_options = [
        compilation["provider_options"] if compilation else {},
        *({} for _ in providers[1:]),
    ]
    # Only errors: ONNX Runtime warns of inputs that have a default, such as those for scores of prompts.
    ort.set_default_logger_severity(3)
    decoder = ort.InferenceSession(
        args.package / "decoder.onnx", providers=providers, provider_options=provider_options
    )
    initial_state = ort.InferenceSession(
        args.package / "initial_state.onnx", providers=PROVIDERS["cpu"]
    )

    kept = []  # before ONNX Runtime 1.30, an OrtValue does not keep its array alive

    def on_device(array: np.ndarray) -> ort.OrtValue:
        kept.append(np.ascontiguousarray(array))
        return ort.OrtValue.ortvalue_from_numpy(kept[-1], args.provider)

    # 1. The starting state: zeros, and the noise that follows from the seed. The CPU makes it, because CUDA lacks
    # kernels for it; it is copied once.
    seeds = {
        "seed": np.array([args.seed], dtype=np.int64),
        "capacity": np.array(capacity, dtype=np.int64),
    }
    names = [output.name for output in initial_state.get_outputs()]
    made = initial_state.run_with_ort_values(
        names, {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in seeds.items()}
    )
    states = {}
    for name, value in zip(names, made, strict=True):
        states[name] = value
        if args.provider != "cpu":
            kind = value.element_type()
            states[name] = ort.OrtValue.ortvalue_from_shape_and_type(
                value.shape(), kind, args.provider
            )
            states[name].update_inplace(value)
    if manifest["interface"].get("captured"):
        # Such a graph records sampled tokens alone. The unused tail has any token of the row.
        known = np.full((1, capacity), prompt[0, 0], np.int32)
        known[:, :length] = prompt
        states["tokens"].update_inplace(known)
    if args.grammar is not None:
        states["grammar_state"].update_inplace(np.int32([1]))  # the state in which an answer begins

    # 2. The sampling parameters, a value per row, which stay the same in all calls.
    stops = manifest["token_ids"]["eos"] or [-1]
    # What a captured graph has to do for the row. Each list leaves a part of the graph out if it is empty; on the CPU,
    # ONNX Runtime before 1.32 needs at least a single row.
    whole = args.provider == "cpu"
    processed = args.temperature > 0 or args.grammar is not None
    beyond_candidates = args.temperature > 0 and not 0 < args.top_k <= 64
    searched = beyond_candidates and (args.top_k > 64 or args.top_p < 1)
    parameters = {
        "temperature": np.float32([args.temperature]),
        "top_k": np.int32([args.top_k]),
        "top_p": np.float32([args.top_p]),
        "min_p": np.float32([0]),
        "repetition_penalty": np.float32([1]),
        "presence_penalty": np.float32([0]),
        "frequency_penalty": np.float32([0]),
        "min_length": np.int32([0]),
        "max_length": np.int32([max_length]),
        "stop_ids": np.int32([stops]),
        "processed_rows": np.int64([0] if processed or whole else []),
        "vocabulary_rows": np.int64([0] if beyond_candidates or whole else []),
        "searched_rows": np.int64([0] if searched or whole else []),
        "emit": np.array([True]),
        # Optional features, off: no bias, every token allowed.
        "logit_bias_ids": np.int32([[-1]]),
        "logit_bias": np.float32([[0]]),
        "allowed_tokens": np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32),
        "typical_p": np.float32([1]),
        "adaptive_target": np.float32([-1]),
        "prompt_lookup_num_tokens": np.int32([args.prompt_lookup_num_tokens]),
        "grammar_deadline": np.int32([2**31 - 1]),
        **grammar,
    }
    # Every other filter is off with zeros, or with -1 in place of tokens.
    for tensor in decoder.get_inputs():
        if tensor.name not in {"input_ids", "input_lengths", *parameters, *states}:
            kind, off = (
                np.float32 if tensor.type == "tensor(float)" else np.int32,
                -1 if len(tensor.shape) > 1 else 0,
            )
            shape = [size if isinstance(size, int) else 1 for size in tensor.shape]
            parameters[tensor.name] = np.full(shape, off, dtype=kind)
    fixed = {name: on_device(array) for name, array in parameters.items()}
    # A step's output is the next step's input; two buffers alternate, because a graph may write while it reads.
    next_ids = [on_device(np.zeros((1, 1), dtype=np.int64)) for _ in range(2)]

    # A step of some packages may give several tokens.
    most = manifest["interface"]["features"].get("num_speculative_tokens", 0) + 1
    several = {
        "new_ids": on_device(np.zeros((1, most), np.int64)),
        "num_new": on_device(np.zeros(1, np.int32)),
    }

    # 3. A binding for the prompt, and a binding for each of the two buffers. States are bound in place.
    def bind(ids: ort.OrtValue, write_to: ort.OrtValue) -> ort.IOBinding:
        binding = decoder.io_binding()
        call = {"input_ids": ids, "input_lengths": on_device(np.int32([ids.shape()[1]]))}
        for tensor in decoder.get_inputs():
            binding.bind_ortvalue_input(tensor.name, (call | fixed | states)[tensor.name])
        written = {retained_name(name): value for name, value in states.items()}
        written |= {"next_ids": write_to, **several}
        for output in decoder.get_outputs():
            if output.name in written:
                binding.bind_ortvalue_output(output.name, written[output.name])
            else:
                binding.bind_output(output.name, args.provider)  # an optional output, ignored here
        return binding

    def run_options(capture: int) -> ort.RunOptions:
        options = ort.RunOptions()
        if provider_options[0].get("enable_cuda_graph") == "1":
            options.add_run_config_entry("gpu_graph_id", str(capture))
        return options

    buffers = [
        (on_device(prompt), next_ids[0]),
        (next_ids[0], next_ids[1]),
        (next_ids[1], next_ids[0]),
    ]
    calls = [
        (bind(*pair), run_options(capture or NOT_CAPTURED)) for capture, pair in enumerate(buffers)
    ]

    # A run that captures executes the graph several times, which does not affect a row that is not running.
    if provider_options[0].get("enable_cuda_graph") == "1":
        states["status"].update_inplace(np.int32([STOPPED]))
        for call in calls[1:]:
            decoder.run_with_iobinding(*call)
        states["status"].update_inplace(np.int32([RUNNING]))

    # 4. Run until the row's status is no longer RUNNING. Only a token and a status return to the host.
    tokens = prompt[0].tolist()
    step = 0
    while step == 0 or states["status"].numpy()[0] == RUNNING:
        call = 0 if step == 0 else 1 + (step - 1) % 2
        decoder.run_with_iobinding(*calls[call])
        if states["status"].numpy()[0] == INVALID:
            raise SystemExit("the model returned NaN or infinite logits")
        if most == 1:
            tokens.append(int(next_ids[step % 2].numpy()[0, 0]))
        else:
            tokens += several["new_ids"].numpy()[0, : several["num_new"].numpy()[0]].tolist()
        step += 1
    print(tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
