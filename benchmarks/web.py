"""Milliseconds a token in Node and in a browser, against transformers.js on the same weights.

    npm --prefix js install && npm --prefix js run build && npm --prefix js install --no-save @huggingface/transformers
    pip install -e '.[webgpu]' playwright
    python benchmarks/web.py                                   # the bundled model; about five minutes
    python benchmarks/web.py CHECKPOINT --tokens 32            # any checkpoint of up to 0.4 B parameters, in float32

Both continue the same prompt of 32 tokens, a single row, greedily and by top-k 50 (transformers.js ignores top-p): in
Node, in WebAssembly with a single thread and with several, and on WebGPU if Chromium has an adapter. An adapter in
software, such as SwiftShader (for compile, too: VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json and
ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1), shows that it runs, and nothing about the speed of a GPU. Rounds take turns; a
figure is the median of the rounds' averages, without the first token. The greedy tokens of both are compared.

Writes docs/benchmarks/web.json and web.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from report import describe_machine, make_parser, markdown, median, print_table, write_json
from rich.console import Console

from qsample import AutoModelForCausalLM
from qsample.errors import QsampleError
from qsample.models.bundled import TINY_LM

ROOT: Final = Path(__file__).resolve().parents[1]
MODULES: Final = ROOT / "js" / "node_modules"
TRANSFORMERS: Final = MODULES / "@huggingface" / "transformers"
PARAMS: Final = {
    "greedy": {"temperature": 0},
    "top-k 50": {"temperature": 0.8, "topK": 50, "topP": 1},
}
SOFTWARE_GPU: Final = [
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--ignore-gpu-blocklist",
]
PROMPT: Final = 32  # tokens
SYSTEMS: Final = ("qsample", "transformers.js")
NONE: Final = "-"  # in place of a figure
_ISOLATED: Final = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
}


def write_for_transformers(package: Path, folder: Path) -> None:
    """Write the decoder of a package without sampler as transformers.js expects it: a cache that grows in each call.

    The same graph, except that its lengths come from the shapes: of the cache P, and of the new tokens S; T is P + S.
    """
    model = onnx.load(package / "decoder.onnx")
    graph = model.graph
    for (
        weight
    ) in graph.initializer:  # stored in half precision, for which a software GPU has no kernels
        if weight.data_type == TensorProto.FLOAT16:
            weight.CopyFrom(
                numpy_helper.from_array(
                    numpy_helper.to_array(weight).astype(np.float32), weight.name
                )
            )
    del graph.value_info[:]
    names = {value.name for value in graph.input if value.name.startswith("past_key_values.")}
    for node in graph.node:  # the capacity, wherever the graph reads it
        start = next((attribute.i for attribute in node.attribute if attribute.name == "start"), 0)
        if node.op_type == "Shape" and node.input[0] in names and start == 2:
            node.op_type, node.input[0] = "Identity", "all"
            del node.attribute[:]
    next(node for node in graph.node if "logits" in node.output).output[0] = "last_logits"
    nodes = [
        helper.make_node("Shape", [min(names)], ["past"], start=2, end=3),
        helper.make_node("Shape", ["input_ids"], ["new"], start=1, end=2),
        helper.make_node("Add", ["past", "new"], ["all"]),
        helper.make_node("Cast", ["past"], ["lengths"], to=TensorProto.INT32),
        helper.make_node("Cast", ["new"], ["input_lengths"], to=TensorProto.INT32),
        *graph.node,
        helper.make_node("Unsqueeze", ["last_logits", "one"], ["logits"]),
    ]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.append(helper.make_tensor("one", TensorProto.INT64, [1], [1]))
    inputs = [value for value in graph.input if value.name not in ("lengths", "input_lengths")]
    del graph.input[:]
    graph.input.extend(inputs)
    for value in [*graph.input, *graph.output]:  # transformers.js knows these names
        axes = value.type.tensor_type.shape.dim
        axes[0].dim_param = "batch_size"
        if value.name.startswith(("past", "present")):
            kind = "past" if value.name.startswith("past") else "total"
            axes[2].dim_param = f"{kind}_sequence_length"
        elif value.name == "logits":
            shape = ["batch_size", 1, axes[-1].dim_value]
            value.CopyFrom(helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape))
    (folder / "onnx").mkdir(parents=True)
    onnx.save(model, folder / "onnx" / "model.onnx")
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        if (package / name).exists():
            shutil.copyfile(package / name, folder / name)


class _Isolated(SimpleHTTPRequestHandler):
    """Files with the headers for which browsers give WebAssembly threads; /models is the folder of the models."""

    def __init__(self, *args: Any, models: Path, **keywords: Any) -> None:
        self._models = models
        super().__init__(*args, **keywords)

    def translate_path(self, path: str) -> str:
        if path.startswith("/models/"):
            return str(self._models / path.removeprefix("/models/").partition("?")[0])
        return super().translate_path(path)

    def end_headers(self) -> None:
        for name, value in _ISOLATED.items():
            self.send_header(name, value)
        super().end_headers()

    def guess_type(self, path: Any) -> str:
        suffix = Path(path).suffix
        return {".mjs": "text/javascript", ".wasm": "application/wasm"}.get(
            suffix
        ) or super().guess_type(path)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def pages(models: Path) -> Iterator[str]:
    """The address of a server of the repository's files and of `models`."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(_Isolated, directory=str(ROOT), models=models)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def import_map() -> dict[str, Any]:
    """Where a browser finds the libraries that modules import by name."""

    def runtime(modules: Path) -> dict[str, str]:
        folder, own = modules / "onnxruntime-web", modules / "onnxruntime-common"
        base = f"/{(folder if folder.is_dir() else MODULES / 'onnxruntime-web').relative_to(ROOT)}/dist"
        common = f"/{(own if own.is_dir() else MODULES / 'onnxruntime-common').relative_to(ROOT)}/dist/esm/index.js"
        return {
            "onnxruntime-common": common,
            "onnxruntime-web/wasm": f"{base}/ort.wasm.bundle.min.mjs",
            "onnxruntime-web/webgpu": f"{base}/ort.webgpu.bundle.min.mjs",
        }

    hub = "/js/node_modules/@huggingface"
    return {
        "imports": {
            **runtime(MODULES),
            "@huggingface/tokenizers": f"{hub}/tokenizers/dist/tokenizers.mjs",
            "@huggingface/jinja": f"{hub}/jinja/dist/index.js",
        },
        "scopes": {f"{hub}/transformers/": runtime(TRANSFORMERS / "node_modules")},
    }


class Browser:
    """Runs jobs in a headless Chromium, each in a page of its own."""

    def __init__(self, chromium: Any, address: str, flags: list[str]) -> None:
        self._browser = chromium.launch(
            executable_path=_system_browser(), args=["--no-sandbox", *flags]
        )
        self._address = address

    def adapter(self) -> str | None:
        """The WebGPU adapter; None without one."""
        page = self._open()
        found = page.evaluate(
            "async () => { const adapter = await navigator.gpu?.requestAdapter(); if (!adapter) return null;"
            "const { vendor, architecture, description } = adapter.info;"
            "return [vendor, architecture, description].filter(Boolean).join(' ') || 'unnamed'; }"
        )
        page.close()
        return None if found is None else str(found)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        page = self._open()
        wasm = import_map()["scopes"]["/js/node_modules/@huggingface/transformers/"][
            "onnxruntime-web/webgpu"
        ]
        modules = {
            "qsample": f"{self._address}/js/dist/web.js",
            "transformers": f"{self._address}/js/node_modules/@huggingface/transformers/dist/transformers.web.js",
            "wasmPaths": f"{self._address}{wasm.rpartition('/')[0]}/",
        }
        at = (
            "/models/" + job["at"]
            if job["system"] != "qsample"
            else f"{self._address}/models/{job['at']}/"
        )
        try:
            return dict(
                page.evaluate(
                    "async job => (await import('/benchmarks/web_run.mjs')).run(job)",
                    {**job, "at": at, "modules": modules},
                )
            )
        finally:
            page.close()

    def _open(self) -> Any:
        page = self._browser.new_page()
        html = f'<!doctype html><script type="importmap">{json.dumps(import_map())}</script>'
        page.route(
            "**/bench.html",
            lambda route: route.fulfill(body=html, content_type="text/html", headers=_ISOLATED),
        )
        page.goto(f"{self._address}/bench.html")
        page.set_default_timeout(0)
        return page

    def close(self) -> None:
        self._browser.close()


def _system_browser() -> str | None:
    names = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def run_in_node(job: dict[str, Any], models: Path) -> dict[str, Any]:
    modules = {"qsample": str(ROOT / "js" / "dist" / "node.js")}
    modules["transformers"] = str(TRANSFORMERS / "dist" / "transformers.node.mjs")
    given = {**job, "at": str(models / job["at"]), "modules": modules}
    command = ["node", str(ROOT / "benchmarks" / "web_run.mjs"), json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(
    host: str,
    name: str,
    prompt: list[int],
    options: argparse.Namespace,
    models: Path,
    browser: Browser,
    console: Console,
) -> dict[str, Any]:
    """A line of the table: both systems in turns."""
    device = {"node": "cpu", "webgpu": "webgpu"}.get(host, "wasm")
    threads = 1 if host == "wasm 1" else options.threads
    folders = {
        "qsample": "webgpu" if device == "webgpu" else "qsample",
        "transformers.js": "transformers",
    }
    job = {
        "device": device,
        "threads": threads,
        "prompt": prompt,
        "tokens": options.tokens,
        "params": PARAMS[name],
    }
    times: dict[str, list[float]] = {}
    ids: dict[str, list[int]] = {}
    for turn in range(options.rounds):
        for system in SYSTEMS if turn % 2 else SYSTEMS[::-1]:
            asked = {**job, "system": system, "at": folders[system]}
            try:
                result = run_in_node(asked, models) if host == "node" else browser.run(asked)
            except Exception as error:  # a system that fails is a result, too
                console.print(f"{host}, {name}, {system}: {str(error)[:300]}", highlight=False)
                continue
            times.setdefault(system, []).append(result["ms"])
            ids[system] = result["ids"]
    row = {"host": host, "threads": threads, "parameters": name}
    row |= {system: median(values) for system, values in times.items()}
    if name == "greedy" and len(ids) == 2:
        row["same_tokens"] = ids["qsample"] == ids["transformers.js"]
    return row


def main() -> None:
    parser = make_parser(__doc__, "web", threads=2)
    parser.add_argument("checkpoint", nargs="?", default=str(TINY_LM))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", nargs="+", default=["node", "wasm 1", "wasm", "webgpu"])
    options, console = parser.parse_args(), Console(stderr=True)
    for needed in (ROOT / "js" / "dist" / "node.js", TRANSFORMERS):
        if not needed.exists():
            parser.error(f"{needed} is missing; the help names the commands that bring it")
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory() as folder,
        pages(Path(folder)) as address,
        sync_playwright() as playwright,
    ):
        models = Path(folder)
        length = PROMPT + options.tokens + 1
        portable = AutoModelForCausalLM.from_pretrained(options.checkpoint).export(
            models / "portable"
        )
        portable.compile(models / "qsample", provider="web", ctx_len=length)
        bare = AutoModelForCausalLM.from_pretrained(options.checkpoint, include_sampler=False)
        write_for_transformers(bare.export(models / "bare").package.path, models / "transformers")
        browser = Browser(playwright.chromium, address, SOFTWARE_GPU)
        adapter = browser.adapter() if "webgpu" in options.hosts else None
        if adapter is not None:
            try:
                portable.compile(models / "webgpu", provider="webgpu", weights=None, ctx_len=length)
            except (
                QsampleError
            ) as error:  # it needs the extra `webgpu`, and an adapter outside of the browser
                console.print(f"no package for WebGPU: {error}", highlight=False)
        else:
            console.print("webgpu: this browser has no adapter; left out")
        vocabulary = portable.package.interface.vocab_size
        prompt = np.random.default_rng(0).integers(3, vocabulary, PROMPT).tolist()
        hosts = [host for host in options.hosts if host != "webgpu" or adapter is not None]
        rows = [
            measure(host, name, prompt, options, models, browser, console)
            for host in hosts
            for name in PARAMS
        ]
        browser.close()
    result = {
        "machine": describe_machine(options.threads),
        "model": Path(options.checkpoint).name,
        "vocabulary": vocabulary,
        "transformers.js": json.loads((TRANSFORMERS / "package.json").read_text())["version"],
        "adapter": adapter,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "rows": rows,
    }
    write_json(options.output.with_suffix(".json"), result)
    options.output.with_suffix(".md").write_text(page(result))
    print_table(*table(rows))


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in rows:
        own, other = (row.get(key) for key in SYSTEMS)
        figures = [f"{value:.2f}" if value is not None else NONE for value in (own, other)]
        ratio = f"{own / other:.2f}" if own is not None and other is not None else NONE
        lines.append([row["host"], str(row["threads"]), row["parameters"], *figures, ratio])
    return ["host", "threads", "parameters", *SYSTEMS, "ratio"], lines


def page(result: dict[str, Any]) -> str:
    """The page of the results."""
    lines = [
        "# Node and browsers",
        "",
        f"{result['machine']}. Model: {result['model']}, a vocabulary of {result['vocabulary']:,}, float32; "
        f"transformers.js {result['transformers.js']} on the same weights. Milliseconds a token of a single row, "
        f"without the first: the median of {result['rounds']} rounds in turns, {result['tokens']} tokens each. "
        "`python benchmarks/web.py` writes this page.",
        "",
        *markdown(*table(result["rows"])),
    ]
    if result["adapter"] is not None:
        lines += [
            "",
            f'WebGPU ran on the adapter "{result["adapter"]}". A software adapter shows no speed of a GPU.',
        ]
    compared = [row["same_tokens"] for row in result["rows"] if "same_tokens" in row]
    lines += [
        "",
        f"The greedy tokens of both were equal in {sum(compared)} of {len(compared)} comparisons.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
