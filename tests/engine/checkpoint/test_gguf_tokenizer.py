"""Tokenizers of GGUF files: to the token what transformers makes of the same vocabulary by the model's own code."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType
from gguf.gguf_writer import GGUFValue
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.mistral.tokenizer import MistralConverter

from engine.checkpoint.store import resolve_model
from engine.text.tokenizer import Tokenizer, spell_byte_level

TEXTS = (
    "I'LL we've 'S IT'd don't can’t ''s 'tis",
    "1234567 3.14 ½ ٣٤٥٦ 12a34 x1 1 000",
    "  two  spaces\n\n \n\tand\r\n tabs \t end   ",
    "Cafe\u0301 café A\u030a Å \u1e0b\u0323 ﬁ ｆｕｌｌ 한국어 \u1112\u1161\u11ab 中文，。漢字ひらがなカタカナ",
    "HTTPServer camelCase UPPER lower ǅungla ʰʷ нещо на Български हिन्दी ลัก កាន់តែ",
    "🦙 👩‍👩‍👧‍👦 ✅🚀 😶‍🌫️ \u200b\ufeff\u00a0\u3000\u2028x\x00\x7f",
    "a/b//c https://x.y/z?q=1#f ...!!! (--) {}[];\n/// _a_ __init__ «ß» \\n <|x|> <think",
    "<|begin|>whole words<think>\n unbelievable</think><|end|> <|begin|>",
    "word\n/\nword,\n\nthe the the unbelievable whole",
    "",
)
CONTROL = ("<|begin|>", "<|end|>")
WHOLE = "Ġunbelievable"  # is learned below
PAD = "[PAD]"


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Byte-level BPE that knows a little of these texts, as ranks of bytes: whatever was learned is a vocabulary."""
    learned = Backend(BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learned.train_from_iterator(TEXTS * 3, trainer)
    tokens = sorted(learned.get_vocab().items(), key=lambda item: item[1])
    return {spell_byte_level(token): rank for rank, (token, _) in enumerate(tokens)}


def described(
    backend: Backend, folder: Path, *, pre: str, architecture: str = "llama", **told: bool | int
) -> Tokenizer:
    """The tokenizer of a GGUF file that says of this one what llama.cpp's converter would."""
    known = json.loads(backend.to_str())
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    kinds = {token["content"]: token["special"] for token in known["added_tokens"]}
    types = {token: TokenType.CONTROL if special else TokenType.USER_DEFINED for token, special in kinds.items()}
    tokens = [token for token, _ in vocabulary]
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(256)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, PAD])
    writer.add_token_types([*(types.get(token, TokenType.NORMAL) for token in tokens), TokenType.UNUSED])
    writer.add_token_merges([" ".join(merge) for merge in known["model"]["merges"]])
    writer.add_bos_token_id(tokens.index(CONTROL[0]))
    writer.add_eos_token_id(tokens.index(CONTROL[1]))
    for name, value in told.items():
        kind = gguf.GGUFValueType.BOOL if isinstance(value, bool) else gguf.GGUFValueType.UINT32
        writer.kv_data[0][f"tokenizer.ggml.{name}"] = GGUFValue(value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer(resolve_model(str(folder / "model.gguf"), cache_dir=folder / "cache"))


def require_same(found: Tokenizer, expected: Backend) -> None:
    for text in TEXTS:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False) == ids, text
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False), text
    assert PAD not in json.loads(found.json)["model"]["vocab"]
    assert found.special_token_ids == {expected.token_to_id(token) for token in CONTROL}


def unreachable(merges: list[Any]) -> list[Any]:
    """Without the last merge to a whole word, which is one token all the same where merges are ignored for it."""
    kept = [merge for merge in merges if "".join(merge) != WHOLE]
    assert len(kept) < len(merges)
    return kept


def llama_3(ranks: Mapping[bytes, int]) -> Backend:
    class OfRanks(TikTokenConverter):  # type: ignore[misc]
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return dict(ranks)

    made = OfRanks(extra_special_tokens=list(CONTROL)).converted()
    return with_added(made)


def tekken(ranks: Mapping[bytes, int], folder: Path) -> Backend:
    described = {
        "config": {
            "pattern": GGUF_PRE_TOKENIZER_SPLITS["tekken"],
            "default_vocab_size": len(ranks) + 2,
            "default_num_special_tokens": 2,
        },
        "vocab": [{"token_bytes": base64.b64encode(token).decode()} for token in ranks],
        "special_tokens": [{"rank": rank, "token_str": token} for rank, token in enumerate(CONTROL)],
    }
    (folder / "tekken.json").write_text(json.dumps(described))
    return with_added(MistralConverter(str(folder / "tekken.json")).converted())


def with_added(backend: Backend) -> Backend:
    """With a token that is no special one, and a whole word that no merges lead to."""
    known = json.loads(backend.to_str())
    known["model"]["merges"] = unreachable(known["model"]["merges"])
    made = Backend.from_str(json.dumps(known))
    made.add_tokens(["<think>"])
    return made


def qwen_2(ranks: Mapping[bytes, int]) -> Backend:
    known = json.loads(llama_3(ranks).to_str())["model"]
    merges = [tuple(merge) for merge in known["merges"]]
    named = dict.fromkeys(("unk_token", "eos_token", "pad_token"), CONTROL[1])
    made: Backend = Qwen2Tokenizer(vocab=known["vocab"], merges=merges, bos_token=CONTROL[0], **named).backend_tokenizer
    made.add_tokens(["<think>"])
    return made


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_llama_3_s(architecture: str, ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    """Also in a model of another family, such as one that learned from Llama 3, or was trained anew."""
    expected = llama_3(ranks)
    found = described(expected, tmp_path, pre="llama-bpe", architecture=architecture)
    require_same(found, expected)
    bos = expected.token_to_id(CONTROL[0])
    assert found.encode("word") == [bos, *expected.encode("word").ids]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_qwen_s(architecture: str, ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    expected = qwen_2(ranks)
    found = described(expected, tmp_path, pre="qwen2", architecture=architecture)
    require_same(found, expected)
    assert found.encode("word") == expected.encode("word").ids


def test_mistral_s(ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    expected = tekken(ranks, tmp_path)
    found = described(expected, tmp_path, pre="tekken")
    require_same(found, expected)
    assert found.encode("word") == [0, *expected.encode("word").ids]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "smollm"])
def test_a_text_begins_and_ends_as_the_file_says(pre: str, ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    made = llama_3(ranks)
    begin, end = map(made.token_to_id, CONTROL)
    for begins, ends in ((True, False), (False, True), (False, False), (True, True)):
        folder = tmp_path / f"{begins} {ends}"
        folder.mkdir()
        found = described(made, folder, pre=pre, add_bos_token=begins, add_eos_token=ends)
        word = found.encode("word", add_special_tokens=False)
        assert found.encode("word") == [begin] * begins + word + [end] * ends


def test_turns_end_as_the_file_says_and_as_their_ends_are_spelt(ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    made = llama_3(ranks)
    made.add_special_tokens(["<|eot_id|>", "<|turn|>", "<|message|>", "<|other|>"])
    made.add_tokens(["<|im_end|>"])  # is text here
    ids = made.get_vocab()
    turn, message = ids["<|turn|>"], ids["<|message|>"]
    found = described(made, tmp_path, pre="llama-bpe", eot_token_id=turn, eom_token_id=message)
    assert found.eos_token_ids == {ids["<|end|>"], ids["<|eot_id|>"], turn, message}


def test_other_rules_are_refused_with_advice(ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpt2/dbrx, whose rules are unknown here; put .* tokenizer\.json beside it"):
        described(llama_3(ranks), tmp_path, pre="dbrx")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "phi3"])
def test_the_model_s_own_is_taken_from_beside_the_file(
    architecture: str, ranks: Mapping[bytes, int], tmp_path: Path
) -> None:
    """Whatever the file names, and its family's tokenizer is; and again after it was changed."""
    expected = llama_3(ranks)
    expected.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizerFast"}))
    found = described(expected, tmp_path, pre="dbrx", architecture=architecture)
    require_same(found, expected)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    again = Tokenizer(resolve_model(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache"))
    assert (found.has_chat_template, again.has_chat_template) == (False, True)


def test_another_model_s_beside_the_file_is_refused(ranks: Mapping[bytes, int], tmp_path: Path) -> None:
    known = json.loads(llama_3(ranks).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    shifted = {token: (index + 1) % 256 if index < 256 else index for token, index in known["model"]["vocab"].items()}
    known["model"]["vocab"] = shifted
    with pytest.raises(ValueError, match=r"tokenizer\.json lies beside it and is another model's: token 0 is"):
        described(Backend.from_str(json.dumps(known)), tmp_path, pre="llama-bpe")
