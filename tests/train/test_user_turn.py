"""What stands around a user's words in a template."""

from __future__ import annotations

import pytest

from specdiff_dist.errors import InvalidConfig
from specdiff_dist.text import Tokenizer
from specdiff_dist.train.user_turn import UserTurn
from tests.train.tiny_chat import END, write_tokenizer


def turn_of(folder, template: str | None) -> tuple[UserTurn, Tokenizer]:
    write_tokenizer(folder)
    path = folder / "chat_template.jinja"
    path.unlink()
    if template is not None:
        path.write_text(template)
    tokenizer = Tokenizer.load(folder)
    return UserTurn.of(tokenizer), tokenizer


def test_the_opening_is_all_up_to_the_users_words(tmp_path):
    turn, tokenizer = turn_of(
        tmp_path,
        "<|start|> system w1 <|end|> {% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> "
        "{% endfor %}<|start|> assistant",
    )
    assert tokenizer.decode(turn.opening, skip_special_tokens=False) == "<|start|> <|unk|> w1 <|end|> <|start|> user"
    assert turn.end_token_id == END


@pytest.mark.parametrize(
    "template", [None, "{{ messages[0]['content'] | upper }} <|end|>", "{{ messages[0]['content'] }}"]
)
def test_a_template_without_a_frame_cannot_be_used(tmp_path, template):
    with pytest.raises(InvalidConfig, match="--self-written 0"):
        turn_of(tmp_path, template)


def test_the_embedded_verifiers_turn(embedded_model):
    tokenizer = Tokenizer.load(embedded_model.path)
    turn = UserTurn.of(tokenizer)
    assert tokenizer.decode(turn.opening, skip_special_tokens=False).endswith("<|im_end|>\n<|im_start|>user\n")
    assert turn.end_token_id in embedded_model.eos_token_ids
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert tuple(asked[: len(turn.opening)]) == turn.opening
