"""`kvrecall serve --dry-run`: what a start would refuse, without weights."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from transformers import LlamaConfig

from kvrecall.backends.vllm.command import serve_command
from kvrecall.backends.vllm.dry_run import NO_CONFIG, NO_WEIGHTS, rehearsed
from kvrecall.core.errors import CompositionError, KVRecallError, ParameterError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a config and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def checked(model: str, *given: str) -> str:
    return rehearsed(serve_command(model, {"method": "pariskv-balanced"}, {"max-model-len": 2048}, given).options)


def test_a_start_that_would_go_well(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing but the command may stand on standard output."""
    assert checked(model, "--max-num-seqs", "4") == NO_WEIGHTS
    assert not capfd.readouterr().out


def test_a_model_that_is_not_here_is_told_and_not_fetched() -> None:
    assert checked("no/such-model") == NO_CONFIG


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (["--block-size", "96"], ParameterError, "block_size: expected a power of two"),
        (["--disable-hybrid-kv-cache-manager"], CompositionError, "--disable-hybrid-kv-cache-manager"),
        (["--max-num-sequences-typo", "4"], ParameterError, "options of vLLM: .*typo"),
        (["--max-model-len", "999999"], ParameterError, "options of vLLM: .*999999"),
    ],
)
def test_what_would_be_refused_is_refused_in_one_line(
    model: str, given: list[str], kind: type[KVRecallError], said: str
) -> None:
    with pytest.raises(kind, match=said) as refused:
        checked(model, *given)
    assert "\n" not in str(refused.value) and "input_value" not in str(refused.value)
