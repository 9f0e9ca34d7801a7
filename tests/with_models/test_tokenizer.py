"""Tokenizer, streaming detokenisation and stop strings, on the real vocabularies of SmolLM2 and Gemma 3."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.http.served_model import ServedModel
from cluster.load.sending import WORDS
from engine.checkpoint.pooling import CheckpointPooling
from engine.sampling.grammar import grammar_tokenizer
from engine.text.formats import HERMES
from engine.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer, read_spelling
from tests.support.processor_time import in_loop_turns

TEXTS = [
    "Plain English, with  two spaces and a trailing one ",
    "naïve façade — “quotes” … ½ €",
    "日本語のテキスト、한국어 텍스트, العربية, עברית, हिन्दी, ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 ꙮ",
    "def f(x):\n\treturn {x: [1, 22, 333]}  # 0x1F600\r\n\r\n\n",
    "e\u0301 \u200b\ufeff \ufffd \x00\x07",
]
REPLACEMENT = "\ufffd"

# Without control characters and rare planes: SmolLM2's vocabulary lacks some of the bytes they are made of.
characters = st.sampled_from("".join(TEXTS[:5])) | st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"])
real_text = st.text(alphabet=characters, max_size=60)

# The fixtures hand out immutable tokenizers, and other processes share the machine's cores.
unhurried = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer(smollm2_folder)


@pytest.fixture(scope="module")
def gemma3(gemma3_folder: Path) -> Tokenizer:
    return Tokenizer(gemma3_folder)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def with_backend(request: pytest.FixtureRequest) -> tuple[Tokenizer, Backend]:
    """A tokenizer, and the library's own from the same file."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    return request.getfixturevalue(request.param), Backend.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def llama2_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tokenizer of Llama 2's kind: a space goes before every text and is stripped from what is decoded."""
    folder = tmp_path_factory.mktemp("llama2_like")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcé", "▁a", "▁b", "▁▁"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁")]
    backend = Backend(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(folder)
    return folder


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [])
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.flush()]


def split(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]


def test_words_of_drawn_prompts_are_a_token_each(tokenizer: Tokenizer) -> None:
    """Where a prompt begins with one as well, or lengths would be off by one now and then."""
    before = tokenizer.encode("")
    assert [word for word in WORDS if len(tokenizer.encode(word)) != len(before) + 1] == []
    assert len(tokenizer.encode(" ".join(WORDS))) == len(before) + len(WORDS)


def test_smollm2_splits_every_digit(smollm2: Tokenizer) -> None:
    assert split(smollm2, "2026-11-21") == list("2026-11-21")
    assert split(smollm2, "x = [1,  2,   33]") == ["x", " =", " [", "1", ",", "  ", "2", ",", "   ", "3", "3", "]"]


def test_smollm2_chat_prompt(smollm2: Tokenizer) -> None:
    ids = smollm2.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert smollm2.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert smollm2.eos_token_ids == {2}
    assert smollm2.vocab_size == 49152


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": 3}]])
def test_messages_that_the_template_refuses(smollm2: Tokenizer, messages: list[dict[str, object]]) -> None:
    with pytest.raises(ValueError, match="template"):
        smollm2.apply_chat_template(messages)


def test_base_model_has_no_chat_template(gemma3: Tokenizer) -> None:
    assert not gemma3.has_chat_template
    with pytest.raises(ValueError, match="has no chat template"):
        gemma3.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_gemma3_special_tokens(gemma3: Tokenizer) -> None:
    assert gemma3.encode("Hi")[0] == 2
    assert gemma3.encode("Hi", add_special_tokens=False) == gemma3.encode("Hi")[1:]
    assert gemma3.eos_token_ids == {1}
    assert gemma3.vocab_size == 262144
    assert split(gemma3, "a  b\n\n\n<start_of_turn>") == [
        "<bos>", "a", "  ", "b", "\n\n\n", "<start_of_turn>",
    ]  # fmt: skip


def test_gemma3_spells_unknown_characters_byte_by_byte(gemma3: Tokenizer) -> None:
    ids = gemma3.encode("\U00013256", add_special_tokens=False)
    assert [gemma3.token_bytes(i) for i in ids] == [bytes([byte]) for byte in "\U00013256".encode()]
    assert stream(gemma3, ids) == ["", "", "", "\U00013256", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text


def test_same_ids_and_text_as_hugging_face(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["tokenizer"]
    theirs = AutoTokenizer.from_pretrained(request.getfixturevalue(f"{name}_folder"))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@cache
def _theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": "Who wrote «Été»?"},
    {"role": "assistant", "content": "It was"},
]


def test_a_chat_is_rendered_like_hugging_face_does(smollm2: Tokenizer, smollm2_folder: Path) -> None:
    theirs = _theirs(smollm2_folder).apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert smollm2.apply_chat_template(CHAT) == smollm2.encode(theirs, add_special_tokens=False)


def test_chats_with_tools_have_a_template_of_their_own_where_there_is_one(llama2_like: Path, tmp_path: Path) -> None:
    """As in transformers; and what that one says of calls is what the answer is read by."""
    folder = Path(shutil.copytree(llama2_like, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    own = "{{ messages[0].content }}{% for tool in tools %} <tool_call>{{ tool.name }}{% endfor %}"
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(own)
    tokenizer, theirs = Tokenizer(folder), _theirs(folder)
    for tools, text in ((None, "ab"), ([], "ab"), ([{"name": "c"}], "ab <tool_call>c")):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "ab"}], {} if tools is None else {"tools": tools}
        )
        rendered = theirs.apply_chat_template([{"role": "user", "content": "ab"}], tools=tools, tokenize=False)
        assert rendered == text and ids == tokenizer.encode(text, add_special_tokens=False)
    served = ServedModel(name="m", tokenizer=tokenizer, pooling=CheckpointPooling(size=1), limits=lambda: None)
    assert served.formats.in_template and served.formats.tools is HERMES
    assert tokenizer.template_reads("tools")


def test_a_chat_of_no_message_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(ValueError, match="at least one message"):
        smollm2.apply_chat_template([])


@unhurried
@given(data=st.data(), skip=st.booleans())
def test_smollm2_decodes_any_ids_like_hugging_face(
    smollm2: Tokenizer, smollm2_folder: Path, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, smollm2.vocab_size - 1), max_size=40))
    theirs = _theirs(smollm2_folder).decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert smollm2.decode(ids, skip) == theirs


@unhurried
@given(data=st.data())
def test_streamed_pieces_make_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    any_id = st.integers(0, tokenizer.vocab_size + 5)
    single_bytes = st.sampled_from([i for i in range(600) if len(tokenizer.token_bytes(i)) == 1])
    ids = data.draw(st.lists(st.one_of(any_id, single_bytes), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    prompt = data.draw(st.lists(any_id, max_size=20))
    end = tokenizer.text_end(prompt)
    assert len(end) <= len(prompt)
    assert stream(tokenizer, ids, end) == stream(tokenizer, ids, prompt)


def encode_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assume(b"".join(map(tokenizer.token_bytes, ids)) == text.encode() and not tokenizer.special_token_ids & {*ids})
    return ids


@unhurried
@given(text=real_text, cut=st.integers(0, 60))
def test_no_piece_breaks_a_character(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = encode_whole(tokenizer, text)
    prompt, output = ids[:cut], ids[cut:]
    pieces = stream(tokenizer, output, prompt)
    assert sum(piece.count(REPLACEMENT) for piece in pieces) <= text.count(REPLACEMENT)
    # What the prompt leaves open is completed by the output, so together they are the whole text.
    before = b"".join(tokenizer.token_bytes(i) for i in prompt).decode(errors="ignore")
    assert before + "".join(pieces) == text


@unhurried
@given(text=real_text)
def test_pieces_come_as_soon_as_their_characters_are_complete(tokenizer: Tokenizer, text: str) -> None:
    ids = encode_whole(tokenizer, text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    so_far, seen = b"", ""
    for token_id in ids:
        so_far += tokenizer.token_bytes(token_id)
        seen += detokenizer.append(token_id)
        assert seen == so_far.decode(errors="ignore")


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("Paris."), 2]
    assert "".join(stream(smollm2, ids)) == smollm2.decode(ids) == "Paris."
    assert smollm2.decode(ids, skip_special_tokens=False) == "Paris.<|im_end|>"


def test_incomplete_character_is_flushed_as_one_replacement(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("👩")
    assert len(ids) > 1
    assert stream(smollm2, ids[:-1])[-1] == REPLACEMENT


def test_leading_space_is_dropped_only_where_the_text_begins(llama2_like: Path) -> None:
    tokenizer = Tokenizer(llama2_like)
    theirs = AutoTokenizer.from_pretrained(llama2_like)
    ids = tokenizer.encode("a b  é")
    assert tokenizer.decode(ids) == theirs.decode(ids) == "a b  é"
    assert "".join(stream(tokenizer, ids)) == "a b  é"
    assert "".join(stream(tokenizer, ids, prompt=ids)) == " a b  é"
    assert "".join(stream(tokenizer, ids, prompt=[1])) == "a b  é"


def test_eos_ids_come_from_every_place_that_names_one(llama2_like: Path) -> None:
    (llama2_like / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Tokenizer(llama2_like).eos_token_ids == {2, 5, 6}


def test_an_end_outside_the_vocabulary_takes_no_structured_output_away(llama2_like: Path, tmp_path: Path) -> None:
    """As a config has it that was not changed with its vocabulary, or one that means by -1 that there is none."""
    folder = Path(shutil.copytree(llama2_like, tmp_path / "model"))
    size = Tokenizer(folder).vocab_size
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, size - 1]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": size}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_token_ids == {2, size - 1}
    grammar_tokenizer(tokenizer.json, tokenizer.vocab_size, tuple(sorted(tokenizer.eos_token_ids)))


def test_added_token_outside_the_byte_alphabet_stands_for_itself() -> None:
    spell, strips = read_spelling({"type": "ByteLevel"})
    assert (spell("Ġé"), spell("tool call"), strips) == (b" \xe9", b"tool call", False)


def test_unknown_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        read_spelling({"type": "WordPiece"})
    with pytest.raises(ValueError, match="nothing"):
        read_spelling(None)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_long_texts_have_the_same_ids_as_short_ones(
    with_backend: tuple[Tokenizer, Backend], data: st.DataObject
) -> None:
    tokenizer, backend = with_backend
    text = data.draw(st.text(min_size=1)) * data.draw(st.integers(1, 2_000))
    special = data.draw(st.booleans())
    ids = tokenizer.encode(text, special)
    assert ids == backend.encode(text, add_special_tokens=special).ids
    assert len(text) <= len(ids) * tokenizer.longest_token_chars


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("broken \ud83d text")


def test_ids_beyond_the_vocabulary_stand_for_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


def cut_naively(text: str, stop: list[str]) -> tuple[str, bool]:
    """The prefix of `text` that ends with a stop string soonest, less the longest such stop string."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def check(stop: list[str], pieces: list[str]) -> tuple[str, bool, list[int]]:
    """Everything emitted, whether a stop string was met, and how many characters were held after each piece."""
    checker = StopChecker(stop)
    emitted, matched, held, fed = "", False, [], ""
    for piece in pieces:
        safe, matched = checker.append(piece)
        emitted, fed = emitted + safe, fed + piece
        held.append(len(fed) - len(emitted))
        if matched:
            break
    return emitted + checker.flush(), matched, held


few_letters = st.text(alphabet="ab\n", max_size=6)


@settings(max_examples=500, deadline=None)
@given(stop=st.lists(few_letters.filter(bool), max_size=4), pieces=st.lists(few_letters, max_size=12))
def test_stop_strings_as_if_the_text_came_in_one(stop: list[str], pieces: list[str]) -> None:
    emitted, matched, held = check(stop, pieces)
    assert (emitted, matched) == cut_naively("".join(pieces), stop)
    if not matched:
        fed = ""
        for piece, num_held in zip(pieces, held, strict=True):
            fed += piece
            beginnings = {string[:size] for string in stop for size in range(1, len(string))}
            assert num_held == max(
                (size for size in range(len(fed) + 1) if fed[len(fed) - size :] in beginnings), default=0
            )


def test_many_stop_strings_cost_no_more_than_one() -> None:
    """A client may send 64, make a model write what begins all of them, and have 128 choices of that."""
    stop = ["-" * 62 + f"{number:02}" for number in range(64)]

    def check_all() -> None:
        checker = StopChecker(stop)
        assert all(checker.append("-" * 64) == ("-" * (2 if not step else 64), False) for step in range(100))
        assert checker.append("-63") == ("-", True) and checker.matched == stop[63]

    check_all()
    assert in_loop_turns(check_all) < 1e6  # each by itself: millions


def test_stop_strings_of_any_length_are_made_ready_soon_and_kept_small() -> None:
    """Which happens on a gateway's loop. A client may send 64 of 1,024 characters, and others with each request."""
    draw = random.Random(0)
    lists = [["".join(draw.choices("abcdefghé", k=1_024)) for _ in range(64)] for _ in range(20)]
    tracemalloc.start()
    try:
        for stop in lists:
            StopChecker(stop)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 12 * 2**20  # 2 MiB of each were 40
    ready = iter(lists)  # of which the first ones are held no more
    assert in_loop_turns(lambda: StopChecker(next(ready)), rounds=3) < 3.5e6


def test_text_after_a_stop_string_is_dropped() -> None:
    checker = StopChecker(["\n\n"])
    assert checker.append("one\n") == ("one", False)
    assert checker.append("\ntwo") == ("", True)
    assert checker.append("three") == ("", True)
    assert checker.flush() == ""


def test_stop_string_across_tokens_and_characters(smollm2: Tokenizer) -> None:
    detokenizer, checker = IncrementalDetokenizer(smollm2), StopChecker(["👩 end"])
    emitted = ""
    for token_id in smollm2.encode("Hello 👧 and 👩 end of it"):
        safe, matched = checker.append(detokenizer.append(token_id))
        emitted += safe
        if matched:
            break
    assert emitted == "Hello 👧 and "


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])
