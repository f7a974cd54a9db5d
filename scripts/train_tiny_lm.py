"""Train the small bundled language model from the King James Bible, on a CPU, in about an hour.

Retrain the bundled model (Debian or Ubuntu; the text comes from the `bible` program):

    sudo apt-get install bible-kjv
    pip install torch transformers rich
    python scripts/train_tiny_lm.py --steps 3216 --out qsample/assets/tiny_lm

Towards the end of these steps the loss on held-out text no longer falls, only the training loss does.

Any other UTF-8 text works too: `python scripts/train_tiny_lm.py --text book.txt --out my_lm`.
The folder --out appears, or replaces an earlier result, only at the very end.
"""

import argparse
import json
import math
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
VOCAB_SIZE = 2048
CONTEXT = 512  # tokens
# Of a model that was not trained for conversations: each message is a line of the text, and so is the answer.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if add_generation_prompt or not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
PROMPTS = ("And the LORD spake unto", "In the beginning", "Psalms 151\n")
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0, "max_new_tokens": 120}
KJV_CHAPTERS = 1189
KJV_SOURCE = """The King James Bible (1611/1769) as printed by the `bible` program of Debian's bible-kjv package,
without verse numbers. The text is in the public domain (in the United Kingdom the Crown holds printing rights)."""


@dataclass(frozen=True)
class Recipe:
    """How a run goes; `minutes` of wall-clock time (None: no limit) end it even before `steps` are done."""

    steps: int
    minutes: float | None
    seed: int
    batch: int = 4  # windows of CONTEXT tokens per step
    learning_rate: float = 7e-3
    weight_decay: float = 0.1
    warmup: float = 0.03  # share of the run


def kjv_documents() -> list[str]:
    """Return a document per chapter: a line such as `Genesis 1`, then a verse per line."""
    if shutil.which("bible") is None:
        raise SystemExit(
            "error: no `bible` program: run `apt-get install bible-kjv`, or name a text with --text FILE"
        )
    command = [
        "bible",
        "-l",
        "100000",
        "Gen1:1-Rev22:21",
    ]  # so wide that no verse is broken into lines
    printed = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8"
    ).stdout
    chapters: list[list[str]] = []
    for line in filter(str.strip, printed.splitlines()):
        if line.startswith(" ") and chapters:
            chapters[-1].append(" ".join(line.split()[1:]))  # the first word is the verse number
        else:
            chapters.append([line.strip()])
    if len(chapters) != KJV_CHAPTERS:
        raise SystemExit(f"error: `bible` printed {len(chapters)} chapters, not {KJV_CHAPTERS}")
    return ["\n".join(chapter) + "\n" for chapter in chapters]


def text_documents(path: Path, size: int = 4000) -> list[str]:
    """Return the text of `path` in documents of `size` characters or a little more, cut only at line ends."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as problem:
        raise SystemExit(f"error: cannot read {path}: {problem}") from None
    documents = [""]
    for line in lines:
        if len(documents[-1]) >= size:
            documents.append("")
        documents[-1] += line
    if len(documents) < 2:
        raise SystemExit(
            f"error: {path} is empty or too short: more than {size} characters in lines are needed"
        )
    return documents


def split(documents: Sequence[str], seed: int, share: float = 0.02) -> tuple[list[str], list[str]]:
    """Return (training, held-out) documents in a seeded random order; the latter are never empty."""
    order = random.Random(seed).sample(documents, len(documents))
    held_out = max(1, round(len(order) * share))
    return order[held_out:], order[:held_out]


def train_tokenizer(documents: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most VOCAB_SIZE tokens that puts `<s>` before every text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that any text can be encoded
    core.train_from_iterator(
        documents,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[BOS, EOS, PAD],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, core.token_to_id(BOS))]
    )
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        **names,
    )


@dataclass(frozen=True)
class Stream:
    """Documents as a stream of token ids, each `<s>` ... `</s>`, and the beginnings of lines."""

    ids: torch.Tensor
    line_starts: torch.Tensor

    @classmethod
    def of(cls, documents: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> "Stream":
        rows = tokenizer(list(documents), verbose=False)[
            "input_ids"
        ]  # verbose: each is longer than CONTEXT
        ids = torch.tensor([token for row in rows for token in (*row, tokenizer.eos_token_id)])
        breaks = torch.tensor(
            [index for token, index in tokenizer.get_vocab().items() if token.endswith("Ċ")]
        )
        begins = torch.cat([torch.tensor([True]), torch.isin(ids, breaks)[:-1]]) & (
            ids != tokenizer.eos_token_id
        )
        return cls(ids, (begins | (ids == tokenizer.bos_token_id)).nonzero().flatten())

    def batches(self, batch: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
        """Yield windows of shape (batch, CONTEXT + 1) for ever; each pass sees nearly every token once.

        A window is `<s>` and then whole lines, as a user's prompt will be. Were windows cut anywhere, the
        model would know `<s>` only before the first line of a document.
        """
        while True:
            phase = int(torch.randint(min(CONTEXT, len(self.ids)), (1,), generator=generator))
            marks = torch.arange(phase, len(self.ids), CONTEXT)
            starts = self.line_starts[torch.searchsorted(self.line_starts, marks, right=True) - 1]
            for chosen in starts[torch.randperm(len(starts), generator=generator)].split(batch):
                yield torch.stack([self.window(int(start)) for start in chosen])

    def window(self, start: int) -> torch.Tensor:
        """Return `<s>` and the CONTEXT ids from the line that begins at `start`, or the last ids of the stream."""
        first = start + int(self.ids[start] == self.ids[0])
        first = max(0, min(first, len(self.ids) - CONTEXT))
        return torch.cat([self.ids[:1], self.ids[first : first + CONTEXT]])


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden: int = 160, intermediate: int = 384
) -> LlamaForCausalLM:
    """Return an untrained Llama; the default widths have 1,373,600 parameters, which float16 keeps below 3 MB."""
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**SAMPLING, **special)
    return model


def loss_of(
    model: LlamaForCausalLM, windows: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """Return the cross-entropy, in nats, of every id in `windows` (batch, length) given those before it."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: Stream) -> float:
    """Return the mean loss in nats per token over the whole stream, each token being predicted once."""
    parts = (
        stream.ids[None, at : at + CONTEXT + 1] for at in range(0, len(stream.ids) - 1, CONTEXT)
    )
    return sum(loss_of(model, part, reduction="sum").item() for part in parts) / (
        len(stream.ids) - 1
    )


class Muon(torch.optim.Optimizer):
    """Muon (Jordan, 2024): momentum whose singular values are all made about 1, for weight matrices.

    It reaches a loss in fewer steps than AdamW does here. torch.optim.Muon computes in bfloat16, one matrix at a time,
    which is slow on a CPU; this class computes in float32 on stacks of matrices of equal shape.
    """

    def __init__(
        self, matrices: Sequence[torch.nn.Parameter], lr: float, weight_decay: float
    ) -> None:
        shapes = sorted({tuple(matrix.shape) for matrix in matrices})
        groups = [
            {"params": [matrix for matrix in matrices if matrix.shape == shape]} for shape in shapes
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            weights, rate = group["params"], group["lr"]
            gradient = torch.stack([weight.grad for weight in weights])
            momentum = self.state[weights[0]].setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 0.05)
            update = gradient.lerp(momentum, 0.95)
            tall = update.shape[1] > update.shape[2]
            update = update.mT if tall else update
            update = update / (update.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):  # Newton-Schulz steps with the published coefficients
                square = update @ update.mT
                update = 3.4445 * update + (2.0315 * square @ square - 4.7750 * square) @ update
            update = update.mT if tall else update
            size = 0.2 * math.sqrt(
                max(update.shape[1:])
            )  # entries as large as AdamW's, so both share a rate
            for weight, change in zip(weights, update, strict=True):
                weight.mul_(1 - rate * group["weight_decay"]).sub_(change, alpha=rate * size)


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [weight for weight in model.model.layers.parameters() if weight.dim() == 2]
    gains = [weight for weight in model.parameters() if weight.dim() == 1]
    embeddings = list(model.model.embed_tokens.parameters())
    groups = [{"params": embeddings}, {"params": gains, "weight_decay": 0.0}]
    rate, decay = recipe.learning_rate, recipe.weight_decay
    adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), weight_decay=decay)
    return [adam, Muon(matrices, lr=rate, weight_decay=decay)]


def rate_at(progress: float, recipe: Recipe) -> float:
    """Return the learning rate at `progress` (0 to 1) through the run: a linear warm-up, then a cosine to zero."""
    if progress < recipe.warmup:
        return recipe.learning_rate * (progress / recipe.warmup + 0.01)
    return (
        recipe.learning_rate
        * (1 + math.cos(math.pi * (progress - recipe.warmup) / (1 - recipe.warmup)))
        / 2
    )


def train(
    model: LlamaForCausalLM, training: Stream, held_out: Stream, recipe: Recipe, console: Console
) -> tuple[int, float, float]:
    """Train `model` in place; return (steps, seconds, running mean of the loss over about 100 last steps)."""
    optimizers = make_optimizers(model, recipe)
    windows = training.batches(recipe.batch, torch.Generator().manual_seed(recipe.seed))
    budget = recipe.minutes * 60 if recipe.minutes else math.inf
    began = checked = time.monotonic()
    step, seconds, mean, held = 0, 0.0, 0.0, math.nan
    text = TextColumn(
        "step {task.fields[step]}  loss {task.fields[loss]:.3f}  held-out {task.fields[held]:.3f}"
    )
    with Progress(BarColumn(), TimeElapsedColumn(), text, console=console) as bar:
        task = bar.add_task("training", total=1.0, step=0, loss=mean, held=held)
        while step < recipe.steps and seconds < budget:
            progress = max(step / recipe.steps, seconds / budget)
            loss = loss_of(model, next(windows))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate_at(progress, recipe)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            mean += (loss.item() - mean) / min(step, 100)
            seconds = time.monotonic() - began
            if time.monotonic() - checked > 240:
                held = evaluate(model, held_out)
                checked = time.monotonic()
                console.print(
                    f"{seconds / 60:5.1f} min  step {step:5}  loss {mean:.3f}  held-out {held:.3f}"
                )
            bar.update(task, completed=progress, step=step, loss=mean, held=held)
    return step, seconds, mean


def sample(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int
) -> str:
    """Return `prompt` and the model's continuation, with the settings that are saved with it."""
    torch.manual_seed(seed)
    ids = model.generate(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))
    return tokenizer.decode(ids[0], skip_special_tokens=True).strip()


def model_card(source: str, recipe: Recipe, facts: dict[str, str], samples: Sequence[str]) -> str:
    limit = f"--minutes {recipe.minutes:g}" if recipe.minutes else f"--steps {recipe.steps}"
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    shown = "\n\n".join(f"```text\n{text}\n```" for text in samples)
    return f"""# Tiny language model

A very small Llama that continues a text in the style of its training text. It is a demonstration and test
model: it downloads nothing and runs anywhere.

## Data

{source}

## Figures

| | |
|---|---|
{rows}

Trained with `python scripts/train_tiny_lm.py {limit} --seed {recipe.seed}`. The held-out documents were not used
for training. Tensors are stored as float16 and load as float32.

## Samples

{shown}

## Limits

It was not trained for conversations: its chat template puts each message on a line of its own, and the answer is the
next line of the text. It knows a single text, keeps a thread for a sentence or two, and sometimes invents words.
Nothing that it writes is a quotation or a statement of fact, and other languages or styles come out as noise.
"""


def check_output(out: Path) -> None:
    """Refuse a place that holds anything but an earlier result, because it will be replaced."""
    ours = {
        "README",
        "config",
        "generation_config",
        "model",
        "tokenizer",
        "tokenizer_config",
        "chat_template",
    }
    if out.exists() and not (out.is_dir() and {entry.stem for entry in out.iterdir()} <= ours):
        raise SystemExit(f"error: {out} exists and is not an earlier result of this script")


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    card: str,
    out: Path,
    dtype: torch.dtype = torch.float16,
    more: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write the folder `out` next to its place, then move it there, so that it is never half-written.

    dtype: of the stored weights. more: further files, name → text.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        fresh = Path(scratch, "fresh")
        model.to(dtype).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        # float16 halves the file; float32 is what CPUs compute well in. The class name is one that transformers 4
        # knows too. Without indentation tokenizer.json is half as long.
        for name, indent, changes in (
            ("config.json", 2, {"dtype": "float32"}),
            ("tokenizer_config.json", 2, {"tokenizer_class": "PreTrainedTokenizerFast"}),
            ("tokenizer.json", None, {}),
        ):
            content = json.loads((fresh / name).read_text(encoding="utf-8")) | changes
            text = json.dumps(content, indent=indent, ensure_ascii=False)
            (fresh / name).write_text(text + "\n", encoding="utf-8")
        for name, text in {"README.md": card, **more}.items():
            (fresh / name).write_text(text, encoding="utf-8")
        (fresh / "model.safetensors").chmod(
            (fresh / "README.md").stat().st_mode
        )  # others may read it too
        if out.exists():
            out.rename(Path(scratch, "earlier"))
        fresh.rename(out)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("tiny_lm"), help="folder to write (default: tiny_lm)"
    )
    parser.add_argument(
        "--text", type=Path, help="a UTF-8 text to train on instead of the King James Bible"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=3216,
        help="training steps (default: 3216, the bundled model's)",
    )
    parser.add_argument(
        "--minutes", type=float, help="wall-clock limit of the training; may end it before --steps"
    )
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument(
        "--threads",
        type=int,
        help="CPU threads (default: PyTorch's choice; 1 if the CPU is shared)",
    )
    options = parser.parse_args(arguments)
    if options.steps < 1 or (options.minutes is not None and options.minutes <= 0):
        parser.error("--steps and --minutes must be above zero")
    if options.threads:
        torch.set_num_threads(options.threads)
    disable_progress_bar()
    console = Console()
    check_output(options.out)
    documents = text_documents(options.text) if options.text else kjv_documents()
    recipe = Recipe(options.steps, options.minutes, options.seed)
    torch.manual_seed(recipe.seed)
    parts = split(documents, recipe.seed)
    tokenizer = train_tokenizer(parts[0])
    training, held_out = (Stream.of(part, tokenizer) for part in parts)
    model = build_model(tokenizer)
    steps, seconds, train_loss = train(model, training, held_out, recipe, console)

    model.half().float().eval()  # measure the stored precision
    loss = evaluate(model, held_out)
    bits = (
        loss
        * (len(held_out.ids) - 1)
        / math.log(2)
        / sum(len(document.encode()) for document in parts[1])
    )
    facts = {
        "Architecture": "Llama, 4 layers, width 160, 4 query and 2 key-value heads, feed-forward 384, tied embeddings",
        "Parameters": f"{model.num_parameters():,}",
        "Tokenizer": f"byte-level BPE, {len(tokenizer):,} tokens, trained on the same text",
        "Context": f"{CONTEXT} tokens",
        "Training tokens": f"{len(training.ids):,} in {len(parts[0]):,} documents",
        "Held-out tokens": f"{len(held_out.ids):,} in {len(parts[1]):,} documents",
        "Training": f"{steps:,} steps of {recipe.batch * CONTEXT:,} tokens, {seconds / 60:.0f} minutes on a CPU",
        "Training loss": f"{train_loss:.3f} nats per token (mean of about 100 last steps)",
        "Held-out loss": f"{loss:.3f} nats per token, {bits:.3f} bits per byte",
        "Held-out perplexity": f"{math.exp(loss):.2f}",
    }
    samples = [sample(model, tokenizer, prompt, recipe.seed) for prompt in PROMPTS]
    for name, value in facts.items():
        console.print(f"{name}: {value}", highlight=False)
    for text in samples:
        console.print(f"\n{text}", markup=False, highlight=False)
    source = (
        f"The text `{options.text.name}`, under its own licence." if options.text else KJV_SOURCE
    )
    save(model, tokenizer, model_card(source, recipe, facts, samples), options.out)
    console.print(f"\nwrote {options.out}")


if __name__ == "__main__":
    main()
