"""Train the small bundled language model from the King James Bible, on a CPU, in about an hour.

Retrain the bundled model (Debian or Ubuntu; the text comes from the `bible` program):

    sudo apt-get install bible-kjv
    pip install torch transformers tokenizers safetensors rich
    python examples/train_tiny_lm.py --minutes 55 --out qsample/assets/tiny_lm

Any other UTF-8 text works too: `python examples/train_tiny_lm.py --text book.txt --out my_lm`.
A folder written by an earlier run is replaced at the very end; nothing is written before that.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = 2048
CONTEXT = 512
HELD_OUT_SHARE = 0.02
IGNORED = -100
PROMPTS = ("And the LORD spake unto", "In the beginning", "Psalms 151\n")
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0, "max_new_tokens": 120}
WRITTEN_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@dataclass(frozen=True)
class Recipe:
    """How long and how hard to train. `minutes` (wall-clock, None for no limit) ends a run before `steps` would."""

    steps: int = 12000
    minutes: float | None = None
    seed: int = 1611
    batch: int = 8  # windows of CONTEXT tokens in one step
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup: float = 0.03  # share of the whole run


@dataclass(frozen=True)
class Outcome:
    """What a run reached; losses are in nats per token."""

    steps: int
    seconds: float
    train_loss: float
    held_out_loss: float
    held_out_bits_per_byte: float


def kjv_documents() -> list[str]:
    """Return one document per chapter: a line such as `Genesis 1`, then one verse per line, without verse numbers."""
    if shutil.which("bible") is None:
        raise SystemExit("error: the `bible` program is missing: run `apt-get install bible-kjv`, or pass --text FILE")
    # Lines of up to 100000 columns, so that no verse is wrapped.
    command = ["bible", "-l", "100000", "Gen1:1-Rev22:21"]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace")
    chapters: list[list[str]] = []
    for line in result.stdout.splitlines():
        if line.startswith(" ") and chapters:
            _, _, verse = line.strip().partition(" ")
            chapters[-1].append(" ".join(verse.split()))
        elif line.strip():
            chapters.append([line.strip()])
    if len(chapters) != 1189:  # the King James Bible without the Apocrypha
        raise SystemExit(f"error: `bible` printed {len(chapters)} chapters instead of 1189: {result.stderr.strip()}")
    return ["\n".join(chapter) + "\n" for chapter in chapters]


def text_documents(path: Path, size: int = 4000) -> list[str]:
    """Return the text of `path` as documents of at least `size` characters, cut only at blank lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise SystemExit(f"error: cannot read {path}: {problem}") from None
    documents = [""]
    for paragraph in text.split("\n\n"):
        if len(documents[-1]) >= size:
            documents.append("")
        if paragraph.strip():
            documents[-1] += paragraph.strip("\n") + "\n\n"
    documents = [document.rstrip("\n") + "\n" for document in documents if document]
    if len(documents) < 2:
        raise SystemExit(f"error: {path} is empty or too short: at least {2 * size} characters and blank lines needed")
    return documents


def split_documents(documents: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Return (training, held-out) documents; about 2 %, but at least one, are held out."""
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
    held_out = set(order[: max(1, round(len(order) * HELD_OUT_SHARE))])
    training = [text for index, text in enumerate(documents) if index not in held_out]
    return training, [documents[index] for index in sorted(held_out)]


def train_tokenizer(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most 2,048 tokens that puts `<s>` before every text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
        show_progress=False,
    )
    core.train_from_iterator(documents, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Stream:
    """Documents as one run of token ids, each `<s>` ... `</s>`, and the places where a line begins."""

    ids: torch.Tensor
    line_starts: torch.Tensor

    @classmethod
    def of(cls, documents: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> "Stream":
        rows = tokenizer(list(documents))["input_ids"]
        ids = torch.tensor([token for row in rows for token in (*row, tokenizer.eos_token_id)])
        breaks = torch.tensor([index for token, index in tokenizer.get_vocab().items() if token.endswith("Ċ")])
        begins = torch.cat([torch.tensor([True]), torch.isin(ids, breaks)[:-1]]) & (ids != tokenizer.eos_token_id)
        return cls(ids, (begins | (ids == tokenizer.bos_token_id)).nonzero().flatten())

    def batches(self, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Yield windows of shape (batch, CONTEXT + 1) for ever; one pass covers nearly every token once.

        Every window begins with `<s>` and then a whole line, which is what a user's prompt looks like:
        with windows cut anywhere, the model would only ever see `<s>` before the first line of a document.
        """
        while True:
            phase = int(torch.randint(min(CONTEXT, len(self.ids)), (1,), generator=generator))
            marks = torch.arange(phase, len(self.ids), CONTEXT)
            starts = self.line_starts[torch.searchsorted(self.line_starts, marks, right=True) - 1]
            for chosen in starts[torch.randperm(len(starts), generator=generator)].split(batch):
                yield torch.stack([self.window(int(start)) for start in chosen])

    def window(self, start: int) -> torch.Tensor:
        """Return CONTEXT + 1 ids: `<s>` and the text from the line that begins at `start`."""
        bos = self.ids[:1]
        first = start + int(self.ids[start] == bos)
        return padded(torch.cat([bos, self.ids[first : first + CONTEXT]]))

    def chunks(self) -> torch.Tensor:
        """Return every token in windows of CONTEXT + 1 that overlap by one, so that each is predicted once."""
        return torch.stack([padded(self.ids[at : at + CONTEXT + 1]) for at in range(0, len(self.ids) - 1, CONTEXT)])


def padded(ids: torch.Tensor) -> torch.Tensor:
    return F.pad(ids, (0, CONTEXT + 1 - len(ids)), value=IGNORED)


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of 1,373,600 parameters; half of its bytes would still be a usable test model."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=160,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=40,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the cross-entropy, in nats, of every id in `windows` (batch, length) given those before it."""
    logits = model(input_ids=windows[:, :-1].clamp(min=0), use_cache=False).logits
    return F.cross_entropy(
        logits.flatten(0, 1), windows[:, 1:].flatten(), ignore_index=IGNORED, reduction=reduction
    )


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: Stream) -> float:
    """Return the mean loss in nats per token over the whole stream."""
    model.eval()
    windows = stream.chunks()
    total = sum(float(loss_of(model, part, reduction="sum")) for part in windows.split(8))
    model.train()
    return total / int((windows[:, 1:] != IGNORED).sum())


def make_optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    gains = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), eps=1e-10)


def rate_at(progress: float, recipe: Recipe) -> float:
    """Return the learning rate at `progress` (0 to 1) through the run: a straight warm-up, then a cosine to zero."""
    if progress < recipe.warmup:
        return recipe.learning_rate * (progress + 1e-3) / (recipe.warmup + 1e-3)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (progress - recipe.warmup) / (1 - recipe.warmup)))


def train(model: LlamaForCausalLM, training: Stream, held_out: Stream, recipe: Recipe, console: Console) -> tuple[int, float, float]:
    """Train in place; return (steps, seconds, training loss averaged over the last steps)."""
    optimizer = make_optimizer(model, recipe)
    windows = training.batches(recipe.batch, torch.Generator().manual_seed(recipe.seed))
    budget = math.inf if recipe.minutes is None else recipe.minutes * 60
    began = checked = time.monotonic()
    step, seconds, average, validation = 0, 0.0, 0.0, math.nan
    columns = (TextColumn("step {task.fields[step]:>5}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[losses]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=1.0, step=0, losses="")
        while step < recipe.steps and seconds < budget:
            progress = max(step / recipe.steps, seconds / budget)
            for group in optimizer.param_groups:
                group["lr"] = rate_at(progress, recipe)
            loss = loss_of(model, next(windows))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            memory = min(0.99, 1 - 1 / step)
            average = memory * average + (1 - memory) * float(loss.detach())
            seconds = time.monotonic() - began
            if time.monotonic() - checked > 60:
                validation = evaluate(model, held_out)
                checked = time.monotonic()
                console.print(f"{seconds / 60:5.1f} min  step {step:5}  loss {average:.4f}  held-out {validation:.4f}")
            losses = f"loss {average:.3f}  held-out {validation:.3f}"
            bar.update(task, completed=progress, step=step, losses=losses)
    return step, seconds, average


@torch.no_grad()
def sample(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int) -> str:
    """Return `prompt` and what the model adds to it with the settings that are saved beside it."""
    torch.manual_seed(seed)
    model.eval()
    ids = model.generate(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def check_output(out: Path) -> None:
    """Refuse a place that holds anything else than an earlier result of this script."""
    if out.exists() and not (out.is_dir() and {entry.name for entry in out.iterdir()} <= WRITTEN_FILES):
        raise SystemExit(f"error: {out} exists and was not written by this script")


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, card: str, out: Path) -> None:
    """Write the folder `out` beside its place and move it there whole, so that it is never half-written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh, old = Path(scratch, "fresh"), Path(scratch, "old")
        model.half().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        # Half the bytes on disk, but float32 when loaded: a CPU is slow, and less exact, in float16.
        edit_json(fresh / "config.json", dtype="float32")
        # The name that both transformers 4 and 5 know.
        edit_json(fresh / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        compact = json.dumps(json.loads((fresh / "tokenizer.json").read_text("utf-8")), ensure_ascii=False)
        (fresh / "tokenizer.json").write_text(compact, encoding="utf-8")
        (fresh / "README.md").write_text(card, encoding="utf-8")
        if out.exists():
            out.rename(old)
        fresh.rename(out)


def edit_json(path: Path, **changes: str) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    c = Console()
    torch.set_num_threads(2)
    recipe = Recipe(minutes=float(sys.argv[1]), batch=2)
    out = Path(sys.argv[2])
    check_output(out)
    docs = kjv_documents()
    torch.manual_seed(1)
    tr, ho = split_documents(docs, 1611)
    tok = train_tokenizer(tr)
    A, B = Stream.of(tr, tok), Stream.of(ho, tok)
    m = build_model(tok)
    c.print(train(m, A, B, recipe, c))
    m.generation_config = GenerationConfig(
        bos_token_id=tok.bos_token_id, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id, **SAMPLING
    )
    m.half().float()
    c.print(evaluate(m, B))
    for p in PROMPTS:
        c.print(sample(m, tok, p, 1))
    save(m, tok, "# Tiny language model\n\nA provisional quick run; the long run replaces it.\n", out)


if __name__ == "__main__":
    main()
