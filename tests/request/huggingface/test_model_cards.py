"""Programs in the manner of model cards print the same with qsample's import line as with transformers'.

Each makes the calls that the card of such a model shows. The model is a random one, the same for all.
"""

from __future__ import annotations

import functools
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
    set_seed,
)

import qsample
import qsample.runtime

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]


def qwen3() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype="auto", device_map="auto")
    text = tokenizer.apply_chat_template(
        ASKED, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    model_inputs = tokenizer([text], return_tensors="pt").to(model.device)
    generated_ids = model.generate(**model_inputs, max_new_tokens=24, do_sample=False)
    output_ids = generated_ids[0][len(model_inputs.input_ids[0]) :].tolist()
    index = len(output_ids) - output_ids[::-1].index(output_ids[5])
    print(tokenizer.decode(output_ids[:index], skip_special_tokens=True).strip("\n"))
    print(tokenizer.decode(output_ids[index:], skip_special_tokens=True).strip("\n"))


def qwen2_5() -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype="auto", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained("tiny", padding_side="left")
    texts = [
        tokenizer.apply_chat_template(ASKED[-n:], tokenize=False, add_generation_prompt=True)
        for n in (1, 2)
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    outputs = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answers = [
        output[len(given) :] for given, output in zip(inputs.input_ids, outputs, strict=True)
    ]
    print(tokenizer.batch_decode(answers, skip_special_tokens=True))


def llama3() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained(
        "tiny", torch_dtype=torch.float32, device_map="auto"
    )
    inputs = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs = inputs.to(model.device)
    terminators = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")]
    outputs = model.generate(**inputs, max_new_tokens=30, eos_token_id=terminators, do_sample=False)
    print(tokenizer.decode(outputs[0][inputs["input_ids"].shape[-1] :], skip_special_tokens=True))


def gemma3() -> None:
    model = AutoModelForCausalLM.from_pretrained(
        "tiny", device_map="cpu", attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    inputs = tokenizer.apply_chat_template(
        [ASKED, ASKED],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    ).to(model.device)
    with torch.inference_mode():
        outputs = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    print(tokenizer.batch_decode(outputs))


def phi4() -> None:
    torch.random.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        "tiny", device_map="cpu", torch_dtype="auto", trust_remote_code=False
    )
    pipe = pipeline(
        "text-generation",
        model=model,
        tokenizer=AutoTokenizer.from_pretrained("tiny"),
        device="cpu",
    )
    output = pipe(ASKED, max_new_tokens=20, return_full_text=False, do_sample=False)
    print(output[0]["generated_text"])


def mistral() -> None:
    device = "cpu"
    model = AutoModelForCausalLM.from_pretrained("tiny")
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model_inputs = tokenizer.apply_chat_template(ASKED, return_tensors="pt", return_dict=False).to(
        device
    )
    model.to(device)
    generated_ids = model.generate(model_inputs, max_new_tokens=20, do_sample=False)
    print(tokenizer.batch_decode(generated_ids)[0])


def smollm3() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny").to(device)
    inputs = tokenizer.encode("Gravity is", return_tensors="pt").to(device)
    outputs = model.generate(inputs, max_new_tokens=10, do_sample=False)
    print(tokenizer.decode(outputs[0]), outputs.shape, outputs.size(1), len(outputs), outputs.dtype)


def olmo2() -> None:
    olmo = AutoModelForCausalLM.from_pretrained("tiny", low_cpu_mem_usage=True)
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    inputs = tokenizer(["Language modeling is "], return_tensors="pt", return_token_type_ids=False)
    inputs = {name: value.to(olmo.device) for name, value in inputs.items()}
    response = olmo.generate(**inputs, max_new_tokens=20, do_sample=False, top_k=None, top_p=None)
    print(tokenizer.batch_decode(response, skip_special_tokens=True)[0])


def gpt_oss() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained(
        "tiny", dtype="auto", device_map="auto", use_kernels=False
    )
    inputs = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    generated = model.generate(**inputs.to(model.device), max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(generated[0][inputs["input_ids"].shape[-1] :]))
    print(tokenizer.decode(generated[:, inputs["input_ids"].shape[-1] :].cpu()))


def deepseek_r1_distill() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained(
        "tiny", device_map={"": "cpu"}, attn_implementation="sdpa"
    )
    model.generation_config = GenerationConfig.from_pretrained("tiny")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id
    inputs = tokenizer(
        ["1 + 1 =", "The integral of x is"], padding=True, padding_side="left", return_tensors="pt"
    )
    outputs = model.generate(**inputs.to(model.device), max_new_tokens=12, do_sample=False)
    print(
        tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    )


def granite() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", device_map="cpu")
    model.eval()
    chat = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    input_tokens = tokenizer(chat, return_tensors="pt").to("cpu")
    output = tokenizer.batch_decode(
        model.generate(**input_tokens, max_new_tokens=20, do_sample=False)
    )
    print(output[0])


def falcon() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", use_safetensors=True)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_length": 40, "num_return_sequences": 1, "eos_token_id": tokenizer.eos_token_id}
    for sequence in generator("Girafatron:", do_sample=False, **settings):
        print(f"Result: {sequence['generated_text']}")


def hunyuan() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", device_map="auto")
    chat = tokenizer.apply_chat_template(
        ASKED, tokenize=True, return_tensors="pt", return_dict=False
    )
    config = GenerationConfig(
        max_new_tokens=14, do_sample=False, repetition_penalty=1.2, pad_token_id=0
    )
    outputs = model.generate(chat.to(model.device), generation_config=config)
    print(tokenizer.decode(outputs[0]), outputs.tolist())


def ministral() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype="auto")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    tokenized = tokenizer("Mind is", return_tensors="pt")
    _ = model.generate(**tokenized, streamer=streamer, max_new_tokens=16, do_sample=False)


def lfm2() -> None:
    model = AutoModelForCausalLM.from_pretrained("tiny", device_map="auto", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    input_ids = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", tokenize=True, return_dict=False
    ).to(model.device)
    output = model.generate(input_ids, do_sample=False, repetition_penalty=1.05, max_new_tokens=18)
    print(tokenizer.decode(output[0], skip_special_tokens=False))


def tinyllama() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype="auto", device_map="auto")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = pipe.tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    print(pipe(prompt, max_new_tokens=16, do_sample=False)[0]["generated_text"])


def zephyr() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
    for answer in pipe(["One", "Two and three", "Four"], max_new_tokens=8, do_sample=False):
        print(answer[0]["generated_text"])
    print(pipe(ASKED, max_new_tokens=4, do_sample=False, return_tensors=True))


def bloom() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    inputs = tokenizer.encode("Translate to English: Je t'aime.", return_tensors="pt")
    print(tokenizer.decode(model.generate(inputs, max_new_tokens=20, do_sample=False)[0]))


def gpt2() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    drawn = []
    for seed in (42, 42, 43):
        set_seed(seed)
        drawn.append(
            generator("Hello, I'm a language model,", max_new_tokens=8, num_return_sequences=5)
        )
    print(len(drawn[0]), drawn[0] == drawn[1], drawn[0] == drawn[2])


def stablelm() -> None:
    class StopOnLength(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> bool:
            return bool(input_ids.shape[-1] > 20)

    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny", torch_dtype="auto")
    inputs = tokenizer("The weather", return_tensors="pt").to(model.device)
    criteria = StoppingCriteriaList([StopOnLength()])
    tokens = model.generate(
        **inputs, max_new_tokens=64, do_sample=False, stopping_criteria=criteria
    )
    print(tokenizer.decode(tokens[0], skip_special_tokens=True), tokens.shape)


def internlm() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny", trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained("tiny").float().eval()
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    arguments = {
        **tokenizer("A beautiful flower", return_tensors="pt"),
        "max_new_tokens": 16,
        "do_sample": False,
    }
    thread = threading.Thread(target=model.generate, kwargs={**arguments, "streamer": streamer})
    thread.start()
    print("".join(streamer))
    thread.join()


def dialogpt() -> None:
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    chat_history_ids = None
    for said in ("Does money buy happiness?", "Why?"):
        new_ids = tokenizer.encode(said + tokenizer.eos_token, return_tensors="pt")
        ids = (
            new_ids if chat_history_ids is None else torch.cat([chat_history_ids, new_ids], dim=-1)
        )
        mask = torch.ones_like(ids)
        length = ids.shape[-1] + 10
        chat_history_ids = model.generate(
            ids, attention_mask=mask, max_length=length, pad_token_id=2, do_sample=False
        )
        print(tokenizer.decode(chat_history_ids[:, ids.shape[-1] :][0], skip_special_tokens=True))


def a_slow_tokenizer() -> None:
    tokenizer = ByT5Tokenizer(padding_side="left")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    inputs = tokenizer(["a cat", "two dogs"], return_tensors="pt", padding=True)
    output = model.generate(
        **inputs, max_new_tokens=9, do_sample=False, return_dict_in_generate=True
    )
    print(
        tokenizer.batch_decode(output.sequences),
        tokenizer.decode(output.sequences[0], skip_special_tokens=True),
    )


CARDS = [
    qwen3,
    qwen2_5,
    llama3,
    gemma3,
    phi4,
    mistral,
    smollm3,
    olmo2,
    gpt_oss,
    deepseek_r1_distill,
    granite,
    falcon,
]
CARDS += [
    hunyuan,
    ministral,
    lfm2,
    tinyllama,
    zephyr,
    bloom,
    gpt2,
    stablelm,
    internlm,
    dialogpt,
    a_slow_tokenizer,
]


@pytest.fixture(scope="module")
def folders(
    checkpoint: Callable[[str], Path], llama_package: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Two folders with a `tiny`, a checkpoint and its package, both with a chat template."""
    made = []
    for source in (checkpoint("llama"), llama_package):
        made.append(tmp_path_factory.mktemp("cards"))
        shutil.copytree(source, made[-1] / "tiny")
        (made[-1] / "tiny" / "chat_template.jinja").write_text(TEMPLATE)
    return made[0], made[1]


@pytest.fixture(scope="module", autouse=True)
def quick_and_without_accelerate() -> Iterator[None]:
    """The package's sessions are opened once. And transformers needs accelerate for any device_map, even of a CPU."""
    theirs = AutoModelForCausalLM.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qsample.runtime, "load", functools.cache(qsample.runtime.load))
        patch.setattr(
            AutoModelForCausalLM,
            "from_pretrained",
            lambda name, device_map=None, **o: theirs(name, **o),
        )
        yield


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.__name__)
def test_a_card_prints_the_same_as_with_transformers(
    card: Callable[[], None],
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(folders[0])
    card()
    wanted = capsys.readouterr().out
    caplog.clear()
    monkeypatch.chdir(folders[1])
    monkeypatch.setitem(globals(), "AutoModelForCausalLM", qsample.AutoModelForCausalLM)
    card()
    assert capsys.readouterr().out == wanted
    assert len(wanted) > 10
    assert not caplog.messages
