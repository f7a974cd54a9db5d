"""Settings of a server, and those that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qsample.addons.serve.settings import DEFAULT_PORT, ServeSettings
from tests.helpers.flags import unlike

GUESSES = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_max": 4,
}  # vLLM's own example

FLAGS = """
    --slots >=1; --max-waiting >=0 = 256; --prefill-chunk-size >=1; --api-key repeated; --trusted-keys FILE repeated
    --cors-origin repeated; --allowed-host NAME repeated; --trust-request-chat-template; --generation-config = openai
    --tool-call-parser; --reasoning-parser; --reasoning-budget >=-1 = -1; --speculative-config JSON
    --prefix FILE repeated; --prefix-cache-dir DIR; --prefix-cache-bytes >=1 = 8589934592; --lora-dir DIR
    --max-cpu-loras >=1 = 64; --request-timeout; --drain-timeout = 30.0; --limit-images-per-prompt >=0 = 8
    --max-image-bytes >=1 = 20971520; --max-image-pixels >=1 = 40000000; --image-cache-mib >=0 = 256
    --allowed-media-domains HOST repeated; --allowed-local-media-path DIR; --max-body-bytes >=1; --spinning
    --access-log/--no-access-log = True
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request_timeout": 0}, "request_timeout is 0, too short for an answer"),
        ({"request_timeout": float("inf")}, "request_timeout is inf"),
        ({"drain_timeout": float("inf")}, "drain_timeout is inf"),
        ({"drain_timeout": -1}, "drain_timeout is -1"),
        ({"drain_timeout": "5"}, "drain_timeout is '5'; give seconds"),
        ({"models": {}}, "models is empty; give a package"),
        ({"models": {"": "tiny"}}, "models has an empty name"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"prefixes": ("x",), "models": {"a": "a", "b": "b"}}, "prefixes are of one package"),
        ({"max_cpu_loras": 0}, "max_cpu_loras is 0; give an integer >= 1$"),
        ({"max_cpu_loras": None}, "max_cpu_loras is None; give an integer >= 1$"),
        ({"loras": ["a"]}, "loras is .*; give a mapping from served names to adapters' folders"),
        ({"lora_dir": ["a"]}, "lora_dir is .*; give an existing folder"),
        (
            {"allowed_media_domains": ("https://x.org/",)},
            "allowed_media_domains is 'https://x.org/'; give names of hosts",
        ),
        (
            {"generation_config": "vllm"},
            "generation_config is .*vllm.*; choose one of openai, auto$",
        ),
        (
            {"tool_call_parser": "x"},
            "tool_call_parser is .*x.*; choose one of qwen3_coder, glm45, .*hermes",
        ),
        ({"reasoning_parser": "x"}, "reasoning_parser is .*x.*; choose one of .*qwen3"),
        ({"slots": 0}, "slots is 0; give an integer >= 1$"),
        ({"max_waiting": -1}, "max_waiting is -1; give an integer >= 0$"),
        (
            {"api_keys": "secret"},
            "api_keys is a text; give a tuple of texts$",
        ),  # and does not show it
        ({"cors_origins": "x"}, "cors_origins is a text"),
        ({"spinning": 1}, "spinning is 1; give True or False"),
        ({"api_keys": ("a", " ")}, "api_keys has an empty key"),
        (
            {"speculative_config": "ngram"},
            'speculative_config is .*: give {"method": "ngram", "num_speculative_tokens"',
        ),
        ({"speculative_config": {"method": "eagle"}}, "tokens are guessed by prompt lookup"),
        (
            {"speculative_config": {"method": "ngram"}},
            'speculative_config has "num_speculative_tokens": None; give 1 to 64',
        ),
        (
            {"speculative_config": GUESSES | {"num_speculative_tokens": 65}},
            'has "num_speculative_tokens": 65; give 1 to 64',
        ),
        (
            {"speculative_config": GUESSES | {"prompt_lookup_max": 0}},
            'has "prompt_lookup_max": 0; give 1 to 64',
        ),
        ({"speculative_config": GUESSES | {"model": "x"}}, "speculative_config has 'model'; give"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings(**{"models": {"tiny": "tiny"}, **options})


def test_right_settings() -> None:
    plain = ServeSettings(models={"tiny": "tiny"})
    assert (plain.slots, plain.max_waiting, plain.api_keys, plain.cors_origins, plain.prefixes) == (
        None,
        256,
        (),
        (),
        (),
    )
    assert (plain.max_body_bytes, plain.request_timeout, plain.drain_timeout) == (None, None, 30.0)
    assert (plain.most_body(images=False), plain.most_body(images=True)) == (4 << 20, 32 << 20)
    assert ServeSettings(models={"a": "a"}, max_body_bytes=9).most_body(images=True) == 9
    hosts = ServeSettings(
        models={"a": "a"}, allowed_media_domains=("Example.ORG.",)
    ).allowed_media_domains
    assert hosts == ("example.org",)
    assert (plain.access_log, plain.trust_request_chat_template, plain.generation_config) == (
        True,
        False,
        "openai",
    )
    quiet = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    assert plain.session_options == quiet
    assert DEFAULT_PORT == 8000
    right: Any = {
        "request_timeout": 1e-9, "drain_timeout": 0, "max_body_bytes": 1, "prefixes": ("x",), "api_keys": ("a",),
        "cors_origins": ("*",), "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "generation_config": "auto",
        "spinning": True, "speculative_config": GUESSES, "session_config": {"a": "b"},
    }  # fmt: skip
    assert ServeSettings(models={"tiny": "tiny"}, **right).session_options == {"a": "b"}
    loud = {"session.intra_op.allow_spinning": "1"}
    assert (
        ServeSettings(models={"a": "a", "b": "b"}, session_config=loud).session_options
        == quiet | loud
    )


def test_every_setting_is_a_flag_with_its_default() -> None:
    assert unlike(FLAGS, "serve") == []


def test_values_that_are_kept_and_refused(tmp_path: Path) -> None:
    def kept(name: str, value: Any) -> Any:
        return getattr(ServeSettings(models={"m": "m"}, **{name: value}), name)

    for name in ("trusted_keys", "allowed_hosts", "prefixes", "allowed_media_domains"):
        assert kept(name, ["a", "b"]) == ("a", "b")
        with pytest.raises(ValueError, match=f"{name} is a text; give a tuple"):
            kept(name, "a")
    for name in ("lora_dir", "allowed_local_media_path"):
        assert kept(name, tmp_path) == tmp_path
        with pytest.raises(ValueError, match=f"{name} is .*; give an existing folder"):
            kept(name, tmp_path / "none")
    for number, wrong in ((1, 0), (64, 65)):
        keys = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        given = GUESSES | dict.fromkeys(keys, number)
        assert kept("speculative_config", given) == given
        for key in keys:
            with pytest.raises(ValueError, match=f'"{key}": {wrong}'):
                kept("speculative_config", given | {key: wrong})
    assert kept("batch_invariant", True) is ServeSettings(models={"m": "m"}).batch_invariant
