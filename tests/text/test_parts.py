from pensieve.text import Part, PartMarker
from tests.text.families import DEEPSEEK_R1, QWEN_3, Family, tokenizer_of


def parts_of(family: Family, prompt: str, reply: str) -> dict[str, str]:
    tokenizer = tokenizer_of(family)
    marker = PartMarker(tokenizer, tokenizer.encode_literal(prompt))
    named = [(marker.push(i), tokenizer.token_text(i)) for i in tokenizer.encode_literal(reply)]
    texts = {part: "".join(text for each, text in named if each is part) for part in Part}
    return {part.value: text for part, text in texts.items() if text}


def test_thinking_text_and_tool_call_are_distinguished() -> None:
    reply = '<think>yes</think>Hello<tool_call>{"name": "f"}</tool_call> now<|im_end|>'
    assert parts_of(QWEN_3, "<|im_start|>assistant\n", reply) == {
        "text": "Hello now<|im_end|>",
        "thinking": "<think>yes</think>",
        "tool_call": '<tool_call>{"name": "f"}</tool_call>',
    }


def test_a_reply_starts_as_thinking_if_the_prompt_opens_it() -> None:
    assert parts_of(DEEPSEEK_R1, "<｜Assistant｜><think>\n", "because</think>yes") == {
        "text": "yes",
        "thinking": "because</think>",
    }


def test_an_open_marker_of_an_earlier_turn_does_not_affect_the_reply() -> None:
    prompt = "<tool_call>cut off<|im_end|>\n<|im_start|>assistant\n"
    assert parts_of(QWEN_3, prompt, "yes") == {"text": "yes"}


def test_user_text_cannot_open_a_thinking_part() -> None:
    tokenizer = tokenizer_of(QWEN_3)
    marker = PartMarker(tokenizer, tokenizer.encode_text("<think>"))
    assert marker.push(tokenizer.encode_text("a")[0]) is Part.TEXT
