"""Every command and every piece of Python on the pages runs, or a comment above it says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrecall import models
from tests.docs import shell
from tests.docs.pages import PAGES, ROOT, RUN, SHOWN, Block, blocks, commands
from tests.tiny import WORDS, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("error:.past_key_values. is deprecated:FutureWarning")
"""The pages use the name that transformers takes today."""

SITE = [page for page in PAGES if page.name != "README.md" and any(b.language in RUN for b in blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_block_is_of_a_known_kind_and_every_mark_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert block.language in (*RUN, *SHOWN), f"{block.place}: expected a block of {RUN} or {SHOWN}, got {block.language!r}"
        if block.mark in ("not run", "parsed"):
            assert len(block.said.split()) > 2, f"{block.place}: expected a reason"
        if block.language == "python" and not block.mark:
            compile(block.text, block.place, "exec")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name; what is written to the user's folders goes there, too."""
    shell.small_files(tmp_path, 3600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVRECALL_SESSIONS", raising=False)  # the pages list and remove what is kept
    return tmp_path


@pytest.fixture
def take(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Any], None]:
    """Lets a model and a tokenizer take the place of every model that a page names."""

    def put(model: Any, tokenizer: Any) -> None:
        monkeypatch.setattr(models, "load", lambda *names, **options: (model, tokenizer))
        monkeypatch.setattr(models, "find", lambda name: here)
        monkeypatch.setattr(models, "pull", lambda *names, **options: here)
        monkeypatch.setattr(models, "load_config", lambda *names, **options: model.config)
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *names, **options: model)
        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *names, **options: tokenizer)

    return put


@pytest.mark.parametrize("page", SITE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_page_runs_on_a_tiny_model(page: Path, take: Callable[[Any, Any], None]) -> None:
    """A random model of four layers; pages may take `model` and `tokenizer` for given."""
    model, tokenizer = _tiny(), tiny_tokenizer()
    take(model, tokenizer)
    _run(page, {"model": model, "tokenizer": tokenizer})


@pytest.mark.model
def test_the_readme_runs_as_it_stands(smollm2: tuple[Any, Any], here: Path, take: Callable[[Any, Any], None]) -> None:
    """On the smaller of the demo's two models."""
    shell.small_files(here, 1200)
    take(*smollm2)
    _run(ROOT / "README.md", {})


def _tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=1 << 20, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def _run(page: Path, given: dict[str, Any]) -> None:
    names = {"__name__": "page", **given}
    for block in blocks(page):
        if block.mark == "not run":
            continue
        if block.language == "python":
            exec(compile(block.text, block.place, "exec"), names)
        elif block.language == "sh":
            shell.run(block)


PAGE = """x

<!-- not run: needs a server -->
```sh
curl x
```

* y

  ```python
  a = 1
  ```
```bash
ls
```
"""


def _block(text: str, mark: str = "", said: str = "") -> Block:
    return Block(ROOT / "README.md", 1, "sh", text, mark, said)


@pytest.mark.parametrize(
    "text",
    ["kvrecall aks report.txt x", "kvrecall plan --kontext 1k", "make demonstration", 'pip install ".[demos]"', "frobnicate",
     "python scripts/none.py", "pip install other"],
)  # fmt: skip
def test_a_command_that_is_wrong_or_of_no_known_kind_fails(text: str) -> None:
    with pytest.raises(AssertionError):
        shell.run(_block(text))
    with pytest.raises((AssertionError, Exception)):
        shell.run(_block(text, "parsed", "needs a GPU to run"))


def test_a_block_that_is_not_marked_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = list(blocks(page))
    assert [(b.language, b.mark, b.said) for b in found] == [
        ("sh", "not run", "needs a server"), ("python", "", ""), ("bash", "", "")
    ]  # fmt: skip
    assert found[1].text == "a = 1"


def test_commands_are_joined_and_have_no_comments() -> None:
    assert commands("a b \\\n  c   # why\n# all\n\nd '#e'") == ["a b  c", "d '#e'"]


def test_options_of_a_comment_replace_those_of_the_page() -> None:
    said = ["eval", "--context", "4k,8k", "--out", "x"]
    short = ["--context", "512", "--samples", "1"]
    assert shell.replaced(said, short) == ["eval", "--out", "x", *short]
    assert shell.replaced(["serve", "M", "--", "--x", "1"], []) == ["serve", "M", "--dry-run", "--", "--x", "1"]
