"""Models that read images: a decode step beside that of the text model, and the first token of a prompt with an image.

    python benchmarks/images.py                    # about six minutes on two cores
    python benchmarks/images.py --tiny             # a minute: whether everything runs; the figures mean nothing

Models of random weights are made in --work, compiled with 4-bit weights in blocks of 32, and measured in this process.

A step. An image model decodes ids like its text model, and has inputs for images besides. Both take turns of TURN steps
over the same history, of which the first UNCOUNTED do not count, and every step is the same: states but the cache stay
as they were. The place of weights in memory changes a step by some percent, so each package is loaded --copies times.
The ratio compares the medians of a turn; its median and quartiles are over all turns of all pairs of copies.

- qwen3_vl: 28 layers of 1,024, positions of three parts (M-RoPE), and vectors of the tower (deepstack) behind three
  layers; its tower is that of Qwen3-VL-2B, 24 layers of 1,024. Its text model is qwen3, Qwen3-0.6B's shape.
- llava: the same text model behind a small tower, with one position a token: the cost of image inputs by themselves.
- gemma3, with --model: attention in which the tokens of an image see each other, a branch in every layer.

The first token. A new image of 1,024 x 768 random pixels and a short text, greedy, in turns with transformers in
--dtype. qsample reads each prompt twice: the second time, the features of the image are there, so that the difference
is the tower's time. The time to process the pixels is measured alone, and the rest is the prefill. A round that
would begin more than MOST seconds after the start is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime as ort
from checkpoints import ASSETS, SHAPES, TOKEN_IDS, make_package
from PIL import Image
from report import (
    Rows,
    describe_machine,
    make_parser,
    markdown,
    median,
    print_table,
    rotated,
    write_json,
)
from rich.console import Console
from turns import PAUSE

from qsample.ort.options import SessionOptions
from qsample.ort.session import open_sessions
from qsample.ort.stepper import Stepper
from qsample.package.package import read_package

TURN, UNCOUNTED = 16, 4  # steps of a model in a row, and how many of them do not count
HISTORY: Final = 64  # tokens of a row before the step
CTX_LEN: Final = 2048
TEXT_OF: Final = {
    "qwen3_vl": "qwen3",
    "llava": "qwen3",
    "gemma3": "gemma3_text",
}  # image model → its text model
FIRST_TOKEN: Final = "qwen3_vl"
SIZE, SMALL = (1024, 768), (96, 64)
MOST: Final = 390  # of eight minutes
QUESTION: Final = "What is this?"
MARKS: Final = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)  # of every tokenizer here
COUNTED: Final = (
    "GroupQueryAttention",
    "RotaryEmbedding",
    "MatMulNBits",
    "If",
    "Split",
    "Gather",
    "Where",
)
STEP_HEADER: Final = (
    "model",
    "text model",
    "step, ms",
    "text model's, ms",
    "ratio",
    "quartiles",
    "difference, microseconds",
)


def text_sizes(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The language model's configuration, without its type."""
    sizes = {
        **SHAPES["tiny" if options.tiny else "qwen3-0.6b"],
        **TOKEN_IDS,
        "num_hidden_layers": options.layers,
    }
    del sizes["model_type"]
    if options.tiny:
        sizes |= {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    if name == "qwen3_vl":
        half = sizes["head_dim"] // 2
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        sizes["rope_parameters"]["mrope_section"] = [half // 4, half * 3 // 8, half * 3 // 8]
        sizes["rope_parameters"]["mrope_interleaved"] = True
    if name.startswith("gemma3"):
        sizes |= {"sliding_window": 512, "query_pre_attn_scalar": sizes["head_dim"]}
    return sizes


def make_checkpoint(name: str, folder: Path, options: argparse.Namespace) -> Path:
    """Write a bfloat16 checkpoint of random weights with tokenizer and processor, unless it exists."""
    import torch
    import transformers

    from qsample.checkpoints.processor import assemble

    if (folder / "config.json").exists():
        return folder
    tf: Any = transformers
    tokenizer = tf.AutoTokenizer.from_pretrained(ASSETS)
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS)})
    begin, end, image, video = tokenizer.convert_tokens_to_ids(list(MARKS))
    text, kind, processor = text_sizes(name, options), tf.AutoModelForImageTextToText, None
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    small |= {"patch_size": 14, "image_size": 56}
    sizes = {
        "depth": options.depth,
        "out_hidden_size": text["hidden_size"],
        "deepstack_visual_indexes": [0],
    }
    own: dict[str, Any] = {"tie_word_embeddings": True, "image_token_index": image}
    if name == "qwen3_vl":
        if options.tiny:
            sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        else:
            sizes |= {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
            sizes["deepstack_visual_indexes"] = [
                depth for depth in (5, 11, 17) if depth < options.depth
            ]
        ids = {"vision_start_token_id": begin, "vision_end_token_id": end, "image_token_id": image}
        ids["tie_word_embeddings"] = True
        config = tf.Qwen3VLConfig(
            text_config=text, vision_config=sizes, video_token_id=video, **ids, **TOKEN_IDS
        )
        pixels = tf.Qwen2VLImageProcessorPil(
            patch_size=16, size={"shortest_edge": 65536, "longest_edge": 16777216}
        )
        processor = assemble(
            tf.Qwen3VLProcessor, {"image_processor": pixels, "tokenizer": tokenizer}, {}
        )
    elif name == "llava":
        tower = tf.CLIPVisionConfig(**small, projection_dim=64)
        config = tf.LlavaConfig(
            text_config=tf.Qwen3Config(**text), vision_config=tower, image_seq_length=16, **own
        )
        pixels = tf.LlavaImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        )
        settings = {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        }
        settings["image_token"] = MARKS[2]
        processor = assemble(
            tf.LlavaProcessor, {"image_processor": pixels, "tokenizer": tokenizer}, settings
        )
    elif name == "gemma3":
        tower = tf.SiglipVisionConfig(**small, vision_use_head=False)
        more = {"boi_token_index": begin, "eoi_token_index": end, "mm_tokens_per_image": 16, **own}
        config = tf.Gemma3Config(text_config=text, vision_config=tower, **more)
        pixels = tf.Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
        names = dict(zip(("boi_token", "eoi_token", "image_token"), MARKS, strict=False))
        tokenizer = tf.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer._tokenizer, extra_special_tokens=names
        )
        parts = {"image_processor": pixels, "tokenizer": tokenizer}
        processor = assemble(tf.Gemma3Processor, parts, {"image_seq_length": 16})
    else:
        config, kind = tf.AutoConfig.for_model(name, **text), tf.AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.update(**TOKEN_IDS)
    scratch = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    if processor is not None:
        pixels._processor_class = type(processor).__name__
        pixels.save_pretrained(scratch)
        (scratch / "processor_config.json").write_text(
            json.dumps({**settings_of(processor)}, indent=1)
        )
    scratch.rename(folder)  # an existing folder is complete
    return folder


def settings_of(processor: Any) -> dict[str, Any]:
    """A processor's arguments, without its parts."""
    return {
        name: value
        for name, value in processor.to_dict().items()
        if name != "image_processor" and value is not None
    }


def build(
    options: argparse.Namespace, console: Console
) -> tuple[dict[str, Path], dict[str, Path], dict[str, float]]:
    """Checkpoints and packages of the models, and the seconds to compile the missing packages."""
    checkpoints, packages, seconds = {}, {}, {}
    names = dict.fromkeys([*options.model, *(TEXT_OF[name] for name in options.model)])
    for name in names:
        folder = (
            options.work
            / f"{name}-{'tiny' if options.tiny else f'{options.layers}-{options.depth}'}"
        )
        with console.status(f"{name}: a checkpoint of random weights"):
            checkpoints[name] = make_checkpoint(name, folder / "checkpoint", options)
        with console.status(f"{name}: compile"):
            start, there = time.perf_counter(), (folder / "int4").exists()
            packages[name] = make_package(
                checkpoints[name], folder / "int4", "int4", ctx_len=CTX_LEN
            )
        if not there:
            seconds[name] = time.perf_counter() - start
    return checkpoints, packages, seconds


def prepared(package: Path, threads: int) -> Stepper:
    """A row behind HISTORY tokens, greedy."""
    sessions = open_sessions(read_package(package, verify=False), None, SessionOptions(threads))
    stepper = Stepper(sessions, 1, CTX_LEN)
    stepper.fill(0, np.arange(3, 3 + HISTORY))
    for name, value in {
        "lengths": HISTORY,
        "input_ids": 7,
        "emit": True,
        "temperature": 0.0,
    }.items():
        stepper.write(name, value)
    return stepper


def steps(
    packages: dict[str, Path], options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Milliseconds of a step: model → a median for each turn of each copy."""
    loaded = {
        (name, copy): prepared(path, options.threads)
        for copy in range(options.copies)
        for name, path in packages.items()
    }
    times: dict[tuple[str, int], list[float]] = {key: [] for key in loaded}
    with console.status("steps"):
        for turn in range(options.rounds + 1):
            for index in rotated(map(str, range(len(loaded))), turn):
                key = list(loaded)[int(index)]
                taken = []
                for _ in range(TURN):
                    start = time.perf_counter()
                    loaded[key].run()
                    taken.append(1e3 * (time.perf_counter() - start))
                if turn:
                    times[key].append(median(taken[UNCOUNTED:]))
    return {name: [times[name, copy] for copy in range(options.copies)] for name in packages}


def operators(package: Path) -> dict[str, int]:
    """The nodes outside of branches that a step may pay for, by operator."""
    counts = Counter(
        node.op_type
        for node in onnx.load(package / "decoder.onnx", load_external_data=False).graph.node
    )
    return {"nodes": counts.total(), **{name: counts[name] for name in COUNTED if counts[name]}}


def first_token(
    package: Path, checkpoint: Path, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Milliseconds to the first token, and its parts, per round."""
    import torch
    import transformers

    from qsample.checkpoints.processor import load_processor
    from qsample.runtime import load

    torch.set_num_threads(options.threads)
    tf: Any = transformers
    own = load(package, intra_op_num_threads=options.threads)
    kind, config = tf.AutoModelForImageTextToText, tf.AutoConfig.from_pretrained(checkpoint)
    peer = kind.from_pretrained(checkpoint, dtype=options.dtype).eval()
    processor: Any = load_processor(
        str(checkpoint), config, tf.AutoTokenizer.from_pretrained(checkpoint)
    )
    text = f"{''.join((MARKS[0], MARKS[2], MARKS[1]))}{QUESTION}"
    reader: Any = own.images.processor
    counts: dict[str, int] = {}

    def read(image: Image.Image) -> None:
        own.generate(QUESTION, images=image, max_new_tokens=1, do_sample=False)

    def ask_peer(image: Image.Image) -> None:
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        counts["tokens of the prompt"] = int(inputs["input_ids"].shape[1])
        counts["values of pixels"] = int(inputs["pixel_values"].numel())
        inputs["pixel_values"] = inputs["pixel_values"].to(peer.dtype)
        with torch.no_grad():
            peer.generate(**inputs, max_new_tokens=1, do_sample=False)

    def milliseconds(call: Any, image: Image.Image) -> float:
        time.sleep(PAUSE)
        start = time.perf_counter()
        call(image)
        return 1e3 * (time.perf_counter() - start)

    rounds: dict[str, list[float]] = {
        name: [] for name in ("qsample", "again", "pixels", "transformers")
    }
    with console.status("first token"):
        for turn in range(-1, options.images):
            if turn > 0 and time.perf_counter() - options.start > MOST:
                break
            size = SMALL if turn < 0 or options.tiny else SIZE  # a small one warms up
            pixels = np.random.default_rng(turn + 1).integers(
                0, 256, (size[1], size[0], 3), np.uint8
            )
            image, found = Image.fromarray(pixels), dict[str, float]()
            for name in rotated(("qsample", "transformers"), turn + 1):
                found[name] = milliseconds(read if name == "qsample" else ask_peer, image)
                if name == "qsample":
                    found["again"] = milliseconds(read, image)
                    found["pixels"] = milliseconds(reader.process, image)
            if turn >= 0:
                for name, value in found.items():
                    rounds[name].append(value)
    parts = np.array([rounds[name] for name in ("qsample", "again", "pixels", "transformers")])
    whole, again, processed, theirs = parts
    return {
        "ms": {
            "first token": whole.tolist(),
            "pixels": processed.tolist(),
            "tower": (whole - again).tolist(),
            "prefill": (again - processed).tolist(),
            "transformers": theirs.tolist(),
        },
        "ratio": (theirs / whole).tolist(),
        "dtype": options.dtype,
        "size": SMALL if options.tiny else SIZE,
        **counts,
    }


def step_rows(times: dict[str, Any]) -> Rows:
    """A line for each image model."""
    lines = []
    for name, text in TEXT_OF.items():
        if name not in times:
            continue
        ours, theirs = (np.array(times[one]) for one in (name, text))  # [copies, rounds]
        ratios = (ours[:, None] / theirs[None]).ravel()
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        gap = 1e3 * median((ours[:, None] - theirs[None]).ravel())
        figures = [
            f"{median(ours):.2f}",
            f"{median(theirs):.2f}",
            f"{middle:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{gap:.0f}",
        ]
        lines.append([name, text, *figures])
    return STEP_HEADER, lines


def first_token_rows(found: dict[str, Any]) -> Rows:
    """The medians of the rounds."""
    names = list(found["ms"])
    values = [f"{median(found['ms'][name]):,.0f}" for name in names]
    return [*(f"{name}, ms" for name in names), "transformers / qsample"], [
        [*values, f"{median(found['ratio']):.2f}x"]
    ]


def operator_rows(counts: dict[str, dict[str, int]]) -> Rows:
    names = list(dict.fromkeys(name for one in counts.values() for name in one))
    return ["package", *names], [
        [model, *(str(one.get(name, 0)) for name in names)] for model, one in counts.items()
    ]


def write(data: dict[str, Any], output: Path) -> None:
    """Print the tables, and write the page."""
    tables = {
        "A decode step": step_rows(data["steps"]),
        "Nodes of the graph, outside of branches": operator_rows(data["nodes"]),
    }
    said = f"{data['machine']}. Made by `python benchmarks/images.py`, whose docstring describes the method."
    shape = f"{data['layers']} layers; {data['settings']}. Seconds to make packages: " + (
        ", ".join(f"{name} {seconds:.0f}" for name, seconds in data["seconds"].items())
        or "they were there"
    )
    lines = ["# Images", "", said, f"{shape}.", ""]
    if found := data["first_token"]:
        width, height = found["size"]
        title = f"The first token, an image of {width:,} x {height} and {found['tokens of the prompt']:,} tokens"
        tables[f"{title}; transformers in {found['dtype']}"] = first_token_rows(found)
    for title, (header, rows) in tables.items():
        print_table(header, rows, title)
        lines += [f"## {title}", "", *markdown(header, rows), ""]
    output.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__, "images", work="build/images", threads=2)
    parser.add_argument("--model", nargs="+", choices=list(TEXT_OF), default=["qwen3_vl", "llava"])
    parser.add_argument("--layers", type=int, help="of the language models (default: 28)")
    parser.add_argument("--depth", type=int, help="layers of qwen3_vl's tower (default: 24)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each copy")
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument(
        "--images", type=int, default=2, help="rounds of first tokens; 0 leaves them out"
    )
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of transformers"
    )
    parser.add_argument("--tiny", action="store_true")
    options, console = parser.parse_args(), Console(stderr=True)
    options.start = time.perf_counter()
    options.layers = options.layers or (2 if options.tiny else 28)
    options.depth = options.depth or (2 if options.tiny else 24)
    checkpoints, packages, seconds = build(options, console)
    load = f"load average {os.getloadavg()[0]:.1f}"
    machine = f"{describe_machine(options.threads)}, onnxruntime {ort.__version__}, {load}"
    settings = f"{options.copies} copies, {options.rounds} turns, {HISTORY} tokens before the step"
    data = {
        "machine": machine,
        "layers": options.layers,
        "settings": settings,
        "seconds": seconds,
        "first_token": {},
    }
    data |= {
        "steps": steps(packages, options, console),
        "nodes": {name: operators(path) for name, path in packages.items()},
    }
    output = options.output.with_suffix(".json")
    write_json(output, data)
    if options.images and FIRST_TOKEN in packages:
        data["first_token"] = first_token(
            packages[FIRST_TOKEN], checkpoints[FIRST_TOKEN], options, console
        )
        write_json(output, data)
    write(data, options.output)


if __name__ == "__main__":
    main()
