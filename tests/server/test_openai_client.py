"""The interface through the real `openai` client over a real socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from hybridspec.reference.tokenizer import Tokenizer

if TYPE_CHECKING:
    from conftest import Served, Serving

PROMPT = "def read_file(path):\n"
CHAT: list[Any] = [{"role": "user", "content": "What does `open` do?"}]
OPTIONS = {"hybridspec": {"return_token_ids": True}}


def complete(client: openai.OpenAI, **changes: Any) -> Any:
    request = {"model": "micro", "prompt": PROMPT, "temperature": 0, "max_tokens": 24, **changes}
    return client.completions.create(**request)


def test_completion(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = complete(client, extra_body=OPTIONS)
    choice, details = answer.choices[0], answer.hybridspec
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "micro")
    assert (choice.finish_reason, choice.index) == ("length", 0)
    assert choice.text == tokenizer.decode(details["token_ids"])
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == len(details["token_ids"]) == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    assert details["rounds"] == sum(details["lengths"]) == details["lengths"][16]
    assert details["emitted"] == 23  # the first token is the prefill's
    assert details["decode_us"] > 0
    assert details["prefill_us"] > 0


def test_prompt_as_ids_or_as_a_list_of_one(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = complete(client).choices[0].text
    assert complete(client, prompt=tokenizer.encode(PROMPT)).choices[0].text == text
    assert complete(client, prompt=[PROMPT]).choices[0].text == text


def test_completion_defaults_to_16_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="micro", prompt=PROMPT, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stream_equals_the_whole(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=60)
    chunks = list(
        complete(
            client,
            max_tokens=60,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=OPTIONS,
        )
    )
    *texts, last, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    assert all(chunk.choices[0].finish_reason is None for chunk in texts)
    assert all(chunk.usage is None for chunk in [*texts, last])
    assert last.choices[0].finish_reason == "length"
    assert last.hybridspec["rounds"] == whole.hybridspec["rounds"]
    assert len(last.hybridspec["token_ids"]) == 60
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_and_its_stream(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    request: dict[str, Any] = {
        "model": "micro", "messages": CHAT, "temperature": 0, "max_completion_tokens": 30
    }  # fmt: skip
    whole = client.chat.completions.create(**request)
    assert whole.id.startswith("chatcmpl-")
    message = whole.choices[0].message
    assert message.role == "assistant"
    prompt = tokenizer.encode(tokenizer.apply_chat_template(CHAT))
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert "usage" not in chunks[0].model_fields_set


def test_chat_content_in_parts(client: openai.OpenAI) -> None:
    content = [{"type": "text", "text": part} for part in ("What does ", "`open` do?")]
    parts: list[Any] = [{"role": "user", "content": content}]
    answers = [
        client.chat.completions.create(
            model="micro", messages=messages, temperature=0, max_tokens=8
        )
        for messages in (CHAT, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_chat_ends_with_the_turn(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """The model closes a turn with `<|im_end|>`, which is no `eos` of its config."""
    (im_end,) = tokenizer.end_of_turn_ids
    for seed in range(40):
        answer: Any = client.chat.completions.create(
            model="micro", messages=CHAT, max_tokens=200, seed=seed, extra_body=OPTIONS
        )
        ids = answer.hybridspec["token_ids"]
        assert im_end not in ids[:-1]
        if ids[-1] == im_end:
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].message.content == tokenizer.decode(ids[:-1])
            return
    pytest.fail("no answer of 40 closed its turn")


def test_stop_strings(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=60).choices[0].text
    stop = text[30:34]
    expected = text[: text.index(stop)]
    for stops in (stop, [stop, "never to be seen"]):
        answer = complete(client, max_tokens=60, stop=stops)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 60
    chunks = complete(client, max_tokens=60, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_seeds_reproduce(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return (
            complete(client, temperature=1.0, top_p=0.95, seed=seed, max_tokens=40).choices[0].text
        )

    first = [sample(seed) for seed in range(3)]
    assert first == [sample(seed) for seed in range(3)]
    assert len(set(first)) > 1


@pytest.mark.parametrize("off", [True, False])
def test_unicode_stream_has_only_whole_characters(
    client: openai.OpenAI, tokenizer: Tokenizer, off: bool
) -> None:
    """At temperature 2 the tokens are nearly random bytes: many broken and split characters."""
    prompt = "😀 é 中文 – “ü” " * 4
    for seed in range(3):
        chunks = list(
            complete(
                client,
                prompt=prompt,
                temperature=2.0,
                seed=seed,
                max_tokens=80,
                stream=True,
                extra_body={"hybridspec": {"return_token_ids": True, "off": off}},
            )
        )
        text = "".join(chunk.choices[0].text for chunk in chunks)
        assert text == tokenizer.decode(chunks[-1].hybridspec["token_ids"])


def test_length_options_change_the_rounds_but_not_the_output(client: openai.OpenAI) -> None:
    def run(**options: Any) -> tuple[str, dict[str, Any]]:
        answer = complete(client, max_tokens=40, extra_body={"hybridspec": options})
        return answer.choices[0].text, answer.hybridspec

    text, stock = run()
    for options, length in (
        ({"off": True}, 0),
        ({"fixed_length": 1}, 1),
        ({"fixed_length": 5}, 5),
        ({"max_length": 3}, 3),
        ({"off": False}, 16),
    ):
        other, details = run(**options)
        assert other == text
        assert details["lengths"][length] == details["rounds"]
        assert details["mean_verify_length"] == length
    assert stock["tokens_per_round"] > 1.2  # the drafter is a real one
    assert run(off=True)[1]["tokens_per_round"] == 1.0


def test_models(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["micro"]
    assert client.models.retrieve("micro").owned_by == "hybridspec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_async_requests_are_batched_and_decode_as_alone(
    served: Served, client: openai.OpenAI
) -> None:
    prompts = [
        PROMPT,
        "The licence ",
        "| a | b |\n|---|---|\n",
        "import os\n",
        "# Title\n",
        "x = {",
    ]
    alone = [complete(client, prompt=prompt, max_tokens=48).choices[0].text for prompt in prompts]
    rounds, steps = "hybridspec_rounds_total", "hybridspec_steps_total"
    before = served.metric(rounds, mode="fixed"), served.metric(steps)

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0
        ) as other:
            answers = await asyncio.gather(
                *(
                    other.completions.create(
                        model="micro", prompt=prompt, temperature=0, max_tokens=48
                    )
                    for prompt in prompts
                )
            )
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(together()) == alone
    rounds_run = served.metric(rounds, mode="fixed") - before[0]
    steps_run = served.metric(steps) - before[1]
    assert rounds_run / steps_run > 1.5


def test_metrics_and_health(served: Served, client: openai.OpenAI) -> None:
    labels = {"status": "200", "finish_reason": "length"}
    before = served.metric("hybridspec_requests_total", **labels)
    generated = served.metric("hybridspec_tokens_total", kind="generated")
    complete(client, max_tokens=5)
    assert served.metric("hybridspec_requests_total", **labels) == before + 1
    assert served.metric("hybridspec_tokens_total", kind="generated") == generated + 5
    assert served.metric("hybridspec_slots") == 4
    assert served.metric("hybridspec_active_slots") == 0
    assert served.metric("hybridspec_queue_depth") == 0
    assert served.metric("hybridspec_policy_active") == 0
    health = httpx.get(f"{served.url}/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok"


def test_schema_describes_the_requests(served: Served) -> None:
    schema = httpx.get(f"{served.url}/openapi.json").json()
    assert set(schema["paths"]) >= {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/health",
    }
    body = schema["components"]["schemas"]["HybridSpecOptions"]["properties"]
    assert {"off", "max_length", "fixed_length", "return_token_ids", "return_rounds"} <= set(body)


def test_plain_decoding_without_a_drafter(serving: Serving) -> None:
    with serving(drafter=False) as served, served.client() as client:
        assert complete(client).hybridspec["lengths"][0] == 23
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, extra_body={"hybridspec": {"fixed_length": 4}})
        assert caught.value.param == "hybridspec.fixed_length"


def test_round_log_tells_every_round(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="micro",
        prompt="def main():",
        max_tokens=24,
        temperature=0,
        extra_body={"hybridspec": {"fixed_length": 5, "return_rounds": True}},
    )
    told = answer.model_extra["hybridspec"]  # type: ignore[index]
    log = told["round_log"]
    assert len(log) == told["rounds"]
    assert {r["verify_length"] for r in log} == {5}
    # The first token comes from the prefill; a last round may run past the end.
    assert sum(r["emitted"] for r in log[:-1]) < 23 <= sum(r["emitted"] for r in log)
    assert all(r["observed_us"] > 0 for r in log)
