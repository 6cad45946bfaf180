"""Records of TRL's formats become the right tokens, of which the right ones count; rows keep every token once."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from meshfold.align import (
    ChatTokenizer,
    Completion,
    completion_of,
    completion_rows,
    pack,
    pair_rows,
    preference_of,
    prompt_of,
    read_records,
    tokenized,
)
from meshfold.align.rows import shuffled
from meshfold.mesh import SpecError


class Letters:
    """A tokenizer with a token a character."""

    end = 0

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) for i in ids if i)


class LettersOfTransformers:
    """Stand-in for a tokenizer of transformers, as far as :class:`ChatTokenizer` needs it, with a template like Qwen's."""

    eos_token_id = 0
    chat_template: str | None = "qwen"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        text = "".join(f"<{m['role']}>{m['content']}|" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


CHAT = ChatTokenizer(LettersOfTransformers())


def say(role: str, content: str) -> dict[str, str]:
    return dict(role=role, content=content)


def counted(one: Completion) -> str:
    return "".join(chr(i) if i else "." for i, counts in zip(one.ids, one.counts, strict=True) if counts)


def whole(one: Completion) -> str:
    return "".join(chr(i) if i else "." for i in one.ids)


def test_completions() -> None:
    one = completion_of(dict(prompt="2+2=", completion="4"), Letters())
    assert (whole(one), counted(one), one.good) == ("2+2=4.", "4.", None)
    assert one.prompt == tuple(map(ord, "2+2="))
    assert completion_of(dict(prompt="a", completion="b", label=False), Letters()).good is False
    assert counted(completion_of(dict(text="abc"), Letters())) == "abc."
    one = completion_of(dict(prompt=[say("user", "hi")], completion=[say("assistant", "yo")]), CHAT)
    assert (whole(one), counted(one)) == ("<user>hi|<assistant>yo|", "yo|")
    one = completion_of(
        dict(messages=[say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]), CHAT
    )
    assert whole(one) == "<user>a|<assistant>b|<user>c|<assistant>d|"
    assert counted(one) == "b|d|"


def test_preferences() -> None:
    pair = preference_of(dict(prompt="p", chosen="good", rejected="bad", margin=2), Letters())
    assert (whole(pair.chosen), whole(pair.rejected), pair.margin) == ("pgood.", "pbad.", 2.0)
    assert counted(pair.rejected) == "bad."
    shared = preference_of(dict(chosen="to be or", rejected="to be not"), Letters())
    assert (counted(shared.chosen), counted(shared.rejected)) == ("or.", "not.")
    dialogue = [say("user", "q")]
    pair = preference_of(
        dict(chosen=[*dialogue, say("assistant", "x")], rejected=[*dialogue, say("assistant", "y")]), CHAT
    )
    assert (counted(pair.chosen), counted(pair.rejected)) == ("x|", "y|")


def test_prompts_keep_their_columns() -> None:
    found = prompt_of(dict(prompt="3*3=", answer=9), Letters())
    assert found.ids == tuple(map(ord, "3*3=")) and found.columns == dict(answer=9) and found.given == "3*3="
    assert prompt_of(dict(prompt=[say("user", "q")]), CHAT).ids == tuple(map(ord, "<user>q|<assistant>"))


@pytest.mark.parametrize(
    ("make", "record", "words"),
    [
        (completion_of, dict(prompt="a"), "'completion'"),
        (completion_of, dict(prompt="a", completion=3), "give text"),
        (completion_of, dict(prompt="a", completion="b", label="good"), "label 'good'"),
        (completion_of, dict(messages=[say("user", "x")]), "role 'assistant'"),
        (preference_of, dict(chosen="a"), "'rejected'"),
        (preference_of, dict(prompt="p", chosen="a", rejected="a"), "the same tokens"),
        (preference_of, dict(chosen="a", rejected=[say("user", "x")]), "two of a kind"),
        (prompt_of, dict(text="a"), "give 'prompt'"),
        (completion_of, dict(promt="a", completion="b"), "has 'promt' and no 'prompt': write 'prompt'"),
        (preference_of, dict(prompts="p", chosen="a", rejected="b"), "has 'prompts' and no 'prompt': write 'prompt'"),
        (prompt_of, dict(prompt=""), "empty prompt"),
    ],
)
def test_mistakes_in_records(make: Any, record: dict[str, Any], words: str) -> None:
    tokenizer: Any = CHAT if "messages" in record else Letters()
    with pytest.raises(SpecError) as told:
        tokenized([record], tokenizer, make)
    assert words in str(told.value) and "record 1" in str(told.value)


def test_mistakes_of_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="chat template"):
        completion_of(dict(messages=[say("assistant", "x")]), Letters())
    without = LettersOfTransformers()
    without.chat_template = None
    with pytest.raises(SpecError, match="without a chat template"):
        prompt_of(dict(prompt=[say("user", "x")]), ChatTokenizer(without))
    file = tmp_path / "data.jsonl"
    with pytest.raises(SpecError, match="cannot be read"):
        read_records(file)
    file.write_text('{"prompt": "a"}\n\n[1]\n')
    with pytest.raises(SpecError, match="line 3: holds a list"):
        read_records(file)
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [record["prompt"] for record in read_records(file)] == ["a", "b"]


def test_rows_hold_each_document_once() -> None:
    documents = [completion_of(dict(prompt="p" * n, completion="abc"[: n % 3 + 1]), Letters()) for n in range(1, 9)]
    rows = pack(documents, 16)
    ids, labels, positions = rows["input_ids"], rows["labels"], rows["position_ids"]
    assert len(ids) == 4  # 61 tokens
    found = []
    for row in range(len(ids)):
        starts = [*(positions[row] == 0).nonzero().flatten().tolist(), 16]
        for start, stop in pairwise(starts):
            assert positions[row, start:stop].tolist() == list(range(stop - start))
            found.append((tuple(ids[row, start:stop].tolist()), tuple((labels[row, start:stop] != -100).tolist())))
    for document in documents:
        assert (document.ids, document.counts) in found
    assert int((labels != -100).sum()) == sum(sum(document.counts) for document in documents)
    assert torch.equal(labels[labels != -100], ids[labels != -100])
    assert pack(documents, 4)["input_ids"].shape == (8, 4)  # cut
    with pytest.raises(SpecError, match="2 tokens at least"):
        pack(documents, 1)


def test_pairs_lie_side_by_side() -> None:
    pairs = [
        preference_of(dict(prompt="pq", chosen="ab", rejected="c"), Letters()),
        preference_of(dict(prompt="p", chosen="a", rejected="bcdef"), Letters()),
    ]
    rows = pair_rows(pairs)
    assert "".join(chr(i) if i else "." for i in rows["input_ids"][0].tolist()) == "pqab.pqc.."
    assert rows["branch"][0].tolist() == [0, 0, 1, 1, 1, 0, 0, 2, 2, 0]
    assert rows["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]
    with pytest.raises(SpecError, match="behind token 2"):
        pair_rows(pairs, 2)
    assert completion_rows([pairs[0].chosen, pairs[1].rejected], 4)["labels"].shape == (2, 4)


def test_examples_are_shuffled_by_epoch() -> None:
    steps = [shuffled(7, step, 3, seed=1) for step in range(7)]
    flat = list(chain(*steps))
    for epoch in range(3):
        assert sorted(flat[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert flat[:7] != flat[7:14]
    assert shuffled(7, 3, 3, seed=1) == steps[3] and shuffled(7, 0, 7, seed=2) != flat[:7]
