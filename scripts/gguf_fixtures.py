"""Records what llama.cpp makes of GGUF files, for the tests: tests/fixtures/gguf_*.json.

pip install llama-cpp-python gguf sentencepiece
python scripts/gguf_fixtures.py tokenizers      # of vocabularies that are learned here: tokens of 2,000 texts
python scripts/gguf_fixtures.py cases           # the same, of the vocabularies that were learned before
python scripts/gguf_fixtures.py logits          # of small files, and greedy tokens; a file that it quantized
python scripts/gguf_fixtures.py models NAME ...     # the same, of some of these files alone
python scripts/gguf_fixtures.py compare FILE ...    # prints texts of which qsample makes other tokens

The models of gemma4 were recorded with a llama.cpp that computes GELU, rather than look it up in float16: without the
line `#define GGML_GELU_FP16` in ggml/src/ggml-cpu/vec.h.
"""

from __future__ import annotations

import base64
import ctypes
import io
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from qsample.addons.formats.gguf.file import read_gguf  # noqa: E402
from qsample.addons.formats.gguf.tokenizer import stop_ids, tokenizer_of  # noqa: E402
from tests.helpers import gguf_files  # noqa: E402
from tests.helpers import gguf_vocabularies as vocabularies  # noqa: E402

_defaults = llama_cpp.llama_model_default_params


def _without_amx() -> Any:
    """Its kernels for AMX end a process that may not use AMX."""
    options = _defaults()
    options.use_extra_bufts = False
    return options


llama_cpp.llama_cpp.llama_model_default_params = _without_amx
_SILENT = llama_cpp.llama_log_callback(lambda *_: None)
_TYPES = {bool: "bool", int: "uint32", float: "float32", str: "string"}


class LlamaCpp:
    """llama.cpp's tokenizer of a file."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        options = llama_cpp.llama_model_default_params()
        options.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def encode(self, text: str) -> list[int]:
        content = text.encode()
        ids = (llama_cpp.llama_token * (len(content) + 8))()
        count = llama_cpp.llama_tokenize(
            self._vocab, content, len(content), ids, len(ids), True, True
        )
        return list(ids[:count])

    def stops(self) -> list[int]:
        count = llama_cpp.llama_vocab_n_tokens(self._vocab)
        return [i for i in range(count) if llama_cpp.llama_vocab_is_eog(self._vocab, i)]


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A file without tensors."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            getattr(writer, f"add_{_TYPES[type(value)]}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def learned() -> dict[str, list[str]]:
    """Merges that join words, spaces and lines, so that every wrong cut shows; pieces of sentencepiece."""
    texts = [text for group in vocabularies.texts().values() for text in group]
    texts += [(ROOT / "docs" / name).read_text() for name in ("contract.md", "testing.md")]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(
            [line for text in texts for line in text.splitlines() if "\0" not in line]
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=1400,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    read = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    normal = [
        i
        for i in range(read.vocab_size())
        if not (read.is_byte(i) or read.is_control(i) or read.is_unknown(i))
    ]
    assert [read.get_score(i) for i in normal] == [-float(i) for i in range(len(normal))]
    merges = [merge for merge in merges if merge.replace(" ", "") != vocabularies.WHOLE]
    return {"merges": merges, "pieces": [read.id_to_piece(i) for i in normal]}


def cases(folder: Path) -> None:
    fixture = json.loads(vocabularies.FIXTURE.read_text())
    tokenizers(folder, {name: fixture[name] for name in ("merges", "pieces")})


def tokenizers(folder: Path, found: dict[str, list[str]] | None = None) -> None:
    found = found or learned()
    texts = [text for group in vocabularies.texts().values() for text in group]

    def tokens(values: dict[str, Any]) -> list[list[int]]:
        encode = LlamaCpp(write(folder / "vocabulary.gguf", values)).encode
        return [encode(text) for text in texts]

    for first, others in vocabularies.PRE.items():
        values = vocabularies.metadata(first, found)
        results = [
            tokens({**values, "tokenizer.ggml.pre": name}) for name in (first, *others.split())
        ]
        assert all(result == results[0] for result in results), first
    recorded = {}
    for case in vocabularies.CASES:
        recorded[case] = vocabularies.digests(tokens(vocabularies.metadata(case, found)))
    stops = []
    stops_without_types = []
    for texts_, named in vocabularies.STOPS:
        values = vocabularies.stop_metadata(texts_, named)
        stops.append(LlamaCpp(write(folder / "stops.gguf", values)).stops())
        del values["tokenizer.ggml.token_type"]
        stops_without_types.append(LlamaCpp(write(folder / "stops.gguf", values)).stops())
    content = {
        "llama_cpp_python": version("llama-cpp-python"),
        **found,
        "cases": recorded,
        "stops": stops,
        "stops_without_types": stops_without_types,
    }
    vocabularies.FIXTURE.write_text(json.dumps(content, indent=0, ensure_ascii=False) + "\n")


def recorded(path: Path) -> dict[str, Any]:
    of_the_file = {f"yarn_{name}": -1.0 for name in ("attn_factor", "beta_fast", "beta_slow")}
    exact: dict[str, Any] = {"type_k": 0, "type_v": 0, "logits_all": True, "n_threads": 1}
    model = llama_cpp.Llama(str(path), n_ctx=64, verbose=False, **exact, **of_the_file)
    model.eval(gguf_files.PROMPT)
    chosen = model.scores[list(gguf_files.RECORDED_AT)].astype("<f4")
    tokens = []
    for _ in range(16):
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(tokens[-1:])
    return {"logits": base64.b64encode(chosen.tobytes()).decode(), "tokens": tokens}


def some_models(folder: Path, names: list[str]) -> None:
    content = json.loads(gguf_files.RECORDED.read_text())
    for name in names:
        path = gguf_files.write_gguf(folder / "model.gguf", gguf_files.settled_model(name))
        content["models"][name] = recorded(path)
    gguf_files.RECORDED.write_text(json.dumps(content, indent=0) + "\n")


def logits(folder: Path) -> None:
    path = folder / "model.gguf"
    models_ = {
        name: recorded(gguf_files.write_gguf(path, gguf_files.settled_model(name)))
        for name in gguf_files.MODELS
    }
    gguf_files.write_gguf(path, gguf_files.settled_model("llama, of Mistral", **gguf_files.NARROW))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, 1
    quantized = gguf_files.QUANTIZED
    assert not llama_cpp.llama_model_quantize(
        str(path).encode(), str(quantized).encode(), ctypes.byref(options)
    )
    models_[quantized.name] = recorded(quantized)
    content = {"llama_cpp_python": version("llama-cpp-python"), "models": models_}
    gguf_files.RECORDED.write_text(json.dumps(content, indent=0) + "\n")


def compare(path: Path) -> None:
    """Print the texts whose tokens differ, and the stop tokens."""
    file, llama = read_gguf(path), LlamaCpp(path)
    tokenizer = tokenizer_of(file)
    print(
        f"{path}: {len(tokenizer)} tokens, qsample stops at {sorted(stop_ids(file))}, llama.cpp at {llama.stops()}"
    )
    for group, texts in vocabularies.texts().items():
        for text in texts:
            theirs, ours = llama.encode(text), tokenizer.encode(text)
            if theirs != ours:
                print(f"  {group}: {text!r}\n    llama.cpp {theirs}\n    qsample   {ours}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["compare"]:
        for name in sys.argv[2:]:
            compare(Path(name))
    elif sys.argv[1:2] == ["models"]:
        with tempfile.TemporaryDirectory() as folder:
            some_models(Path(folder), sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as folder:
            {"tokenizers": tokenizers, "cases": cases, "logits": logits}[sys.argv[1]](Path(folder))
