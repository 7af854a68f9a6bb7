"""When the model is loaded, the probe finds and names what a template does to earlier turns."""

import pytest
from tokenizers import Tokenizer as Library

from pensieve.errors import ModelError
from pensieve.text import ChatTemplate, TemplateReport, Tokenizer, probe
from tests.text.families import (
    DEEPSEEK_R1,
    GEMMA,
    LLAMA_3,
    MISTRAL,
    PHI_3,
    QWEN_2_5,
    QWEN_3,
    SMOLLM2,
    Family,
    template_of,
)
from tests.text.tiny_tokenizers import byte_level_library, sentencepiece_library


@pytest.mark.parametrize("family", [LLAMA_3, QWEN_2_5], ids=lambda family: family.name)
def test_the_probe_reports_nothing_for_append_only_templates(family: Family) -> None:
    report = probe(template_of(family))
    assert report == (type(report))(True, True, (), (), ())


@pytest.mark.parametrize(
    ("family", "differences"),
    [
        (
            QWEN_3,
            {
                "the template drops the thinking of earlier replies; the log keeps the original",
                "the template drops the think tags of earlier replies; the log keeps the original",
            },
        ),
        (
            MISTRAL,
            {
                "the template moves the system prompt; the log keeps the original",
                "the template moves the tools; the log keeps the original",
            },
        ),
        (
            DEEPSEEK_R1,
            {
                "the template drops the thinking of earlier replies; the log keeps the original",
                "the template drops the think tags of earlier replies; the log keeps the original",
            },
        ),
        (PHI_3, set()),
        (GEMMA, set()),
        (SMOLLM2, set()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_probe_names_the_changes_to_earlier_turns(
    family: Family, differences: set[str]
) -> None:
    report = probe(template_of(family))
    assert set(report.differences) == differences
    assert report.append_only == (not differences)
    assert report.same_tokens


def test_the_probe_names_dialogues_that_a_template_cannot_render() -> None:
    refusals = probe(template_of(GEMMA)).refusals
    assert "a system prompt: the chat template refuses: System role not supported" in refusals
    assert "tools: this model's chat template does not write tools" in refusals


def report_on(source: str, library: Library | None = None) -> TemplateReport:
    library = library or byte_level_library(("<s>", "</s>"))
    return probe(ChatTemplate(Tokenizer(library.to_str(), templates={"default": source})))


@pytest.mark.parametrize(
    "opening",
    [
        "{{ ['<s>', m.role] | join }}",
        "{{ '<s>%s' % m.role }}",
        "{{ '<s>{}'.format(m.role) }}",
        "{{ ('<s>@' ~ m.role) | replace('@', '') }}",
    ],
)
def test_control_tokens_that_cannot_be_distinguished_from_text_are_reported(opening: str) -> None:
    ending = " {{ m.content }}</s>{% endfor %}"
    lost = report_on("{% for m in messages %}" + opening + ending).lost_controls
    assert "conversations" in lost
    assert not report_on("{% for m in messages %}<s>{{ m.role }}" + ending).lost_controls


ALL = [DEEPSEEK_R1, GEMMA, LLAMA_3, MISTRAL, PHI_3, QWEN_2_5, QWEN_3]


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_templates_of_real_models_lose_no_control_token(family: Family) -> None:
    assert probe(template_of(family)).lost_controls == ()


def test_the_probe_quotes_any_other_difference() -> None:
    report = report_on(
        "{% for m in messages %}<s>{{ loop.revindex }} {{ m.role }} {{ m.content }}</s>{% endfor %}"
    )
    assert not report.append_only
    assert report.differences[0] == (
        "in conversations the template writes '<s>5 user Hello there.</s><s>4 assistant' "
        "where the log keeps '<s>1 user Hello there.</s>Yes.</s><s>1 u'"
    )


def test_tokens_that_differ_at_the_border_of_a_turn_are_reported() -> None:
    """The tokenizer puts a space before each section of text. In this log, each turn is a section."""
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert report_on(source).same_tokens
    report = report_on(source, sentencepiece_library(("<s>",)))
    assert report.append_only
    assert not report.same_tokens


@pytest.mark.parametrize(
    "source",
    [
        "(" * 3000 + ")" * 3000,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "".join(f"{{% for a{n} in [1] %}}" for n in range(25)) + "{% endfor %}" * 25,
        "{% break %}",
        "{{ 'x' * 10 ** 13 }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_jinja_cannot_compile_or_run_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError):
        report_on(source)
